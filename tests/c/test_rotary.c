/* Tests rotary_embedding: widths around the block, both layouts and directions, factors of either
 * type, offsets, streaming, and splits of the rows. */
#include "check.h"
#include "rotary_embedding/rotary_embedding.h"

enum { BATCH = 2, TOKENS = 3, TENSORS = 2 };
static const int64_t heads_of[TENSORS] = {3, 2};

typedef struct {
  int64_t cols, rotated;
  dtype_t dtype;
  int wide, interleaved, transposed, heads_inside;
  void *x[TENSORS], *cos, *sin; /* of one batch each */
} rotary_case;

static int64_t numel(const rotary_case *c, int tensor) {
  return BATCH * heads_of[tensor] * TOKENS * c->cols;
}

static dtype_t factor_dtype(const rotary_case *c) { return c->wide ? DTYPE_FLOAT32 : c->dtype; }

static size_t factor_bytes(const rotary_case *c) {
  return (size_t)(BATCH * TOKENS * c->rotated) * formats[factor_dtype(c)].size;
}

static rotary_strides strides_of(const rotary_case *c, int tensor) {
  const int64_t heads = heads_of[tensor], batch = heads * TOKENS * c->cols;
  if (c->heads_inside) return (rotary_strides){batch, c->cols, heads * c->cols};
  return (rotary_strides){batch, TOKENS * c->cols, c->cols};
}

static rotary_case new_case(int64_t cols, int64_t rotated, dtype_t dtype, int kind) {
  rotary_case c = {.cols = cols,
                   .rotated = rotated,
                   .dtype = dtype,
                   .wide = formats[dtype].size == 2 && kind & 1,
                   .interleaved = kind >> 1 & 1,
                   .transposed = kind >> 2 & 1,
                   .heads_inside = kind >> 3 & 1};
  for (int t = 0; t < TENSORS; ++t)
    c.x[t] = random_elements(dtype, numel(&c, t), 3, 0, 1 + (uint64_t)t);
  c.cos = random_elements(factor_dtype(&c), BATCH * TOKENS * rotated, 1, 0, 3);
  c.sin = random_elements(factor_dtype(&c), BATCH * TOKENS * rotated, 1, 0, 4);
  return c;
}

static void free_case(rotary_case *c) {
  for (int t = 0; t < TENSORS; ++t) free(c->x[t]);
  free(c->cos), free(c->sin);
}

/* Checks element `column` of the row at `row`. The factors of its token begin at `factors`. */
static void check_element(const rotary_case *c, int tensor, int64_t row, int64_t factors,
                          int64_t column, double got) {
  double want = element(c->dtype, c->x[tensor], row + column), slack = 0;
  if (column < c->rotated) {
    const int64_t half = c->rotated / 2;
    const int second = c->interleaved ? column % 2 : column >= half;
    const int64_t apart = c->interleaved ? 1 : half, other = column + (second ? -apart : apart);
    const int64_t sin_at = factors + (c->transposed ? other : column);
    const double sign = second == c->transposed ? -1 : 1;
    const double a = want * element(factor_dtype(c), c->cos, factors + column);
    const double b = sign * element(factor_dtype(c), c->sin, sin_at) *
                     element(c->dtype, c->x[tensor], row + other);
    want = a + b;
    /* bounds the rounding of two products and a sum */
    slack = 2 * rounding(c->dtype) * (fabs(a) + fabs(b));
  }
  CHECK(close_to(c->dtype, got, want, slack),
        "rotary_embedding %s (%lld, %lld) wide %d interleaved %d transposed %d: column %lld is %a, "
        "not %a",
        dtype_names[c->dtype], (long long)c->cols, (long long)c->rotated, c->wide, c->interleaved,
        c->transposed, (long long)column, got, want);
}

static void check_tensor(const rotary_case *c, int tensor, const void *y) {
  const rotary_strides s = strides_of(c, tensor);
  for (int64_t i = 0; i < numel(c, tensor) / c->cols; ++i) {
    const int64_t token = i % TOKENS, head = i / TOKENS % heads_of[tensor],
                  batch = i / TOKENS / heads_of[tensor];
    const int64_t row = batch * s.batch + head * s.head + token * s.token;
    for (int64_t column = 0; column < c->cols; ++column)
      check_element(c, tensor, row, (batch * TOKENS + token) * c->rotated, column,
                    element(c->dtype, y, row + column));
  }
}

/* Runs all rows at once, or one by one from the last to the first, or in two ranges. The second
 * range begins before q's last row. */
enum { WHOLE, REVERSED, TWO, WAYS };
static void split(rotary_embedding_args *args, int way) {
  const int64_t rows = rotary_rows(args, 0) + rotary_rows(args, 1),
                middle = rotary_rows(args, 0) - 2;
  if (way == WHOLE) rotary_embedding_cpu(0, rows, args);
  for (int64_t i = rows - 1; way == REVERSED && i >= 0; --i) rotary_embedding_cpu(i, i + 1, args);
  if (way == TWO) rotary_embedding_cpu(middle, rows, args), rotary_embedding_cpu(0, middle, args);
}

/* Runs a case with buffers `offset` elements past a multiple of 64 bytes. Returns a hash of the
 * results. */
static uint64_t run_case(const rotary_case *c, int offset, int way) {
  const size_t size = formats[c->dtype].size, at = (size_t)offset * size;
  buffer_t cos =
      buffer_copy(c->cos, factor_bytes(c), (size_t)offset * formats[factor_dtype(c)].size);
  buffer_t sin =
      buffer_copy(c->sin, factor_bytes(c), (size_t)offset * formats[factor_dtype(c)].size);
  const int64_t batch_stride = TOKENS * c->rotated;
  rotary_embedding_args args = {.cos = cos.data, .sin = sin.data, .cos_batch_stride = batch_stride};
  args.sin_batch_stride = batch_stride;
  args.cos_token_stride = args.sin_token_stride = c->rotated;
  args.batch = BATCH, args.tokens = TOKENS, args.cols = c->cols, args.rotated = c->rotated;
  args.dtype = c->dtype, args.wide_factors = c->wide;
  args.interleaved = c->interleaved, args.transposed = c->transposed;
  buffer_t x[TENSORS], y[TENSORS];
  for (int t = 0; t < TENSORS; ++t) {
    x[t] = buffer_copy(c->x[t], (size_t)numel(c, t) * size, at);
    y[t] = buffer_new((size_t)numel(c, t) * size, at);
    args.tensors[t] =
        (rotary_tensor){x[t].data, y[t].data, heads_of[t], strides_of(c, t), strides_of(c, t)};
  }
  split(&args, way);
  uint64_t hash = 0;
  for (int t = 0; t < TENSORS; ++t) {
    check_tensor(c, t, y[t].data);
    hash = hash_elements(hash, c->dtype, y[t].data, numel(c, t));
    buffer_check(&y[t], NULL, "rotary_embedding"), buffer_free(&y[t]);
    buffer_check(&x[t], c->x[t], "rotary_embedding"), buffer_free(&x[t]);
  }
  buffer_check(&cos, c->cos, "rotary_embedding cos"), buffer_free(&cos);
  buffer_check(&sin, c->sin, "rotary_embedding sin"), buffer_free(&sin);
  return hash;
}

void test_rotary(uint32_t step) {
  static const int64_t widths[][2] = {{64, 64}, {128, 128}, {80, 32},  {256, 192}, {66, 66},
                                      {33, 32}, {7, 6},     {130, 64}, {5, 0},     {62, 60}};
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    uint64_t hash = 0;
    for (int i = 0; i < 10 * 16; ++i) {
      rotary_case c = new_case(widths[i / 16][0], widths[i / 16][1], (dtype_t)dtype, i % 16);
      const uint64_t bits = run_case(&c, 0, WHOLE);
      for (int way = REVERSED; way < WAYS; ++way)
        CHECK(run_case(&c, way, way) == bits, "rotary_embedding: other bits when split");
      should_stream = 1;
      CHECK(run_case(&c, 0, WHOLE) == bits, "rotary_embedding: other bits when streamed");
      CHECK(run_case(&c, 3, WHOLE) == bits, "rotary_embedding: other bits when streamed, offset 3");
      should_stream = 0;
      hash = hash * 31 + bits;
      free_case(&c);
    }
    printf("bits rotary_embedding %s %016llx\n", dtype_names[dtype], (unsigned long long)hash);
  }
}
