/* Tests one pass of reduce_sum: shapes around the block and the tile, whole and in chunks; guards,
 * offsets, and splits of the work. */
#include "check.h"
#include "reduce_sum/reduce_sum.h"

typedef struct {
  int64_t outer, reduce, inner, chunk, chunks;
  dtype_t dtype, out_dtype;
  void *x;
  double *want, *slack;
} sum_case;

static int64_t inputs(const sum_case *c) { return c->outer * c->reduce * c->inner; }
static int64_t outputs(const sum_case *c) { return c->outer * c->chunks * c->inner; }
static size_t out_bytes(const sum_case *c) {
  return (size_t)outputs(c) * formats[c->out_dtype].size;
}

/* Makes a case, which owns x. chunk = 0 means no chunks. Exact data needs no slack. Otherwise a few
 * dozen terms are added in float, and no partial sum exceeds the sum of the terms' magnitudes. */
static sum_case new_case(int64_t outer, int64_t reduce, int64_t inner, int64_t chunk, dtype_t dtype,
                         dtype_t out_dtype, void *x, int exact) {
  const int64_t rows = chunk    ? chunk
                       : reduce ? reduce
                                : 1,
                chunks = reduce ? ceil_div(reduce, rows) : 1;
  sum_case c = {
      outer, reduce, inner, rows, chunks, dtype, out_dtype, x, doubles(outer * chunks * inner),
      NULL};
  c.slack = doubles(outer * chunks * inner);
  for (int64_t i = 0; i < inputs(&c); ++i) {
    const int64_t o = i / inner / reduce, r = i / inner % reduce,
                  to = (o * chunks + r / rows) * inner + i % inner;
    const double value = element(dtype, x, i);
    c.want[to] += value;
    c.slack[to] += exact ? 0 : 48 * rounding(dtype) * fabs(value);
  }
  return c;
}

static void free_case(sum_case *c) { free(c->x), free(c->want), free(c->slack); }

static void check_output(const sum_case *c, const buffer_t *out) {
  for (int64_t i = 0; i < outputs(c); ++i) {
    const double value = element(c->out_dtype, out->data, i);
    CHECK(close_to(c->out_dtype, value, c->want[i], c->slack[i]),
          "reduce_sum %s to %s (%lld, %lld, %lld) by %lld: element %lld is %a, not %a",
          dtype_names[c->dtype], dtype_names[c->out_dtype], (long long)c->outer,
          (long long)c->reduce, (long long)c->inner, (long long)c->chunk, (long long)i, value,
          c->want[i]);
  }
}

static reduce_sum_args args_of(const sum_case *c, const void *x, void *out) {
  return (reduce_sum_args){x,        out,       c->outer, c->reduce,   c->inner,
                           c->chunk, c->chunks, c->dtype, c->out_dtype};
}

static int64_t items(const sum_case *c) {
  return c->outer * c->chunks * reduce_sum_tiles(c->inner);
}

static void run_case(const sum_case *c, int offset) {
  const size_t size = formats[c->dtype].size;
  buffer_t x = buffer_copy(c->x, (size_t)inputs(c) * size, (size_t)offset * size),
           out = buffer_new(out_bytes(c), 0);
  reduce_sum_args args = args_of(c, x.data, out.data);
  reduce_sum_cpu(0, items(c), &args);
  check_output(c, &out);
  buffer_check(&x, c->x, "reduce_sum");
  buffer_check(&out, NULL, "reduce_sum");
  buffer_free(&x);
  buffer_free(&out);
}

void test_reduce_sum_sizes(uint32_t step) {
  static const int64_t outers[] = {0, 1, 3}, chunks[] = {0, 1, 8, 50};
  static const int64_t reduces[] = {0, 1, 7, 8, 9, 31, 33, 65, 1025};
  static const int64_t inners[] = {0,  1,  2,    3,    5,    16,   31,   32,
                                   33, 63, 1023, 1024, 1025, 2047, 2048, 2049};
  (void)step;
  int offset = 0;
  for (int o = 0; o < 3; ++o) {
    for (int r = 0; r < 9; ++r) {
      for (int i = 0; i < 16; ++i) {
        const int64_t numel = outers[o] * reduces[r] * inners[i];
        if (numel > 70000) continue; /* shapes that are both wide and long test nothing new */
        for (int k = 0; k < 16; ++k, ++offset) {
          const dtype_t dtype = (dtype_t)(k % 4), out_dtype = offset % 2 ? DTYPE_FLOAT64 : dtype;
          if (chunks[k / 4] > 0 && reduces[r] == 0) continue;
          void *x = random_exact(dtype, numel, (uint64_t)offset);
          if (numel > 99)
            set_element(dtype, x, numel / 2, (double)NAN),
                set_element(dtype, x, 3, (double)INFINITY);
          sum_case c =
              new_case(outers[o], reduces[r], inners[i], chunks[k / 4], dtype, out_dtype, x, 1);
          run_case(&c, offset / 2 % OFFSETS);
          free_case(&c);
        }
      }
    }
  }
}

/* Checks that one range, single items from the last on, and three ranges give the same bits. */
static uint64_t check_ranges(const sum_case *c) {
  buffer_t out[3];
  const int64_t n = items(c);
  for (int way = 0; way < 3; ++way) {
    out[way] = buffer_new(out_bytes(c), 0);
    reduce_sum_args args = args_of(c, c->x, out[way].data);
    if (way == 0) reduce_sum_cpu(0, n, &args);
    for (int64_t i = n - 1; way == 1 && i >= 0; --i) reduce_sum_cpu(i, i + 1, &args);
    if (way == 2)
      reduce_sum_cpu(n / 2, n, &args), reduce_sum_cpu(0, n / 3, &args),
          reduce_sum_cpu(n / 3, n / 2, &args);
    buffer_check(&out[way], out[0].data, "reduce_sum, split");
  }
  check_output(c, &out[0]);
  if (c->inner == 1) { /* a work item is one element of out, and must write nothing else */
    buffer_t alone = buffer_new(out_bytes(c), 0);
    reduce_sum_args args = args_of(c, c->x, alone.data);
    const size_t size = formats[c->out_dtype].size;
    reduce_sum_cpu(5, 6, &args);
    reduce_sum_cpu(3, 3, &args);
    buffer_check_part(&alone, out[0].data, 5 * size, 6 * size, "reduce_sum");
    buffer_free(&alone);
  }
  const uint64_t hash = hash_elements(0, c->out_dtype, out[0].data, outputs(c));
  for (int way = 0; way < 3; ++way) buffer_free(&out[way]);
  return hash;
}

void test_reduce_sum_ranges(uint32_t step) {
  static const int64_t shapes[][4] = {
      {5, 20001, 1, 1000}, {3, 3001, 3, 500}, {2, 65, 5000, 16}, {700, 40, 33, 0}};
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    for (int s = 0; s < 4; ++s) {
      const int64_t *shape = shapes[s];
      void *x =
          random_elements((dtype_t)dtype, shape[0] * shape[1] * shape[2], 100, 0, (uint64_t)s);
      sum_case c =
          new_case(shape[0], shape[1], shape[2], shape[3], (dtype_t)dtype, (dtype_t)dtype, x, 0);
      printf("bits reduce_sum %d %s %016llx\n", s, dtype_names[dtype],
             (unsigned long long)check_ranges(&c));
      free_case(&c);
    }
  }
  /* Sums three million times 4/3. A running sum in float, even in 32 lanes, would have an error of
   * 0.1 %. */
  const int64_t n = 3 << 20;
  for (int64_t inner = 1; inner <= 2; ++inner) {
    float *x = malloc((size_t)n * sizeof *x);
    CHECK(x, "out of memory");
    for (int64_t i = 0; i < n; ++i) x[i] = 4.0f / 3;
    sum_case c = new_case(1, n / inner, inner, 0, DTYPE_FLOAT32, DTYPE_FLOAT32, x, 0);
    run_case(&c, 0);
    free_case(&c);
  }
}
