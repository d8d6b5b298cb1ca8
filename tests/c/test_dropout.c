/* Tests Philox against its published vectors, and the lanes of Philox against one counter at a
 * time. Tests dropout with sizes, offsets, streaming and ranges. */
#include "check.h"
#include "common/range.h"
#include "dropout/dropout.h"
#include "probe.h"

/* From the file kat_vectors of Random123, the authors' library: philox4x32 with 7 rounds. */
static void check_vectors(void) {
  static const struct {
    philox_t counter;
    uint32_t key[2];
    philox_t want;
  } vectors[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
       {0xffffffff, 0xffffffff},
       {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (int i = 0; i < 3; ++i) {
    const philox_t got = philox(vectors[i].counter, vectors[i].key[0], vectors[i].key[1]);
    for (int k = 0; k < 4; ++k) {
      CHECK(got.word[k] == vectors[i].want.word[k], "vector %d: word %d is %08x, not %08x", i, k,
            got.word[k], vectors[i].want.word[k]);
    }
  }
}

/* Checks masks at every alignment, past the counter's low word, of more elements than the state of
 * the masks holds, and with an earlier block that replaces this state. */
static void check_masks(void) {
  static const int64_t seeds[] = {0, 1, INT64_MAX, 0x0123456789abcdef, -1};
  static const int64_t starts[] = {0, 4096, 8 * 0xfffffff8LL, 1LL << 40},
                       lengths[] = {1, 33, 200, 1000};
  enum { LONG = 40000 };
  uint8_t *kept = malloc(LONG);
  uint64_t hash = 0;
  for (int k = 0; k < 4 * 40 + 4; ++k) {
    const int is_long = k >= 4 * 40;
    const int64_t begin = is_long ? 8 * 0xffffff00LL + k : starts[k % 4] + k / 4,
                  numel = is_long ? LONG : lengths[k / 4 % 4];
    const int64_t backs[] = {0, 32, 4001, 20000};
    kept_args args = {kept, dropout_of(0.3, &seeds[k % 5]), is_long ? backs[k % 4] : 0};
    kept_cpu(begin, begin + numel, &args);
    for (int64_t j = 0; j < numel; ++j) {
      const int64_t i = begin + j;
      const uint32_t bits = bits_of(philox_of(seeds[k % 5], i / 8).word[i % 8 / 2], i % 2);
      CHECK(kept[j] == (bits > args.dropout.last_dropped),
            "seed %lld, from %lld: element %lld kept %d, bits %08x", (long long)seeds[k % 5],
            (long long)begin, (long long)i, kept[j], bits);
      hash = 31 * hash + kept[j];
    }
  }
  free(kept);
  printf("bits philox %016llx\n", (unsigned long long)hash);
}

/* Checks the threshold for p, which is p * 2^32, rounded, at least 1 and at most 2^32. */
static void check_thresholds(void) {
  static const struct {
    double p;
    uint32_t last_dropped;
  } cases[] = {{0x1p-40, 0},
               {0x1p-32, 0},
               {0x1.8p-31, 2},
               {0.25, 0x3fffffff},
               {0.5, 0x7fffffff},
               {1 - 0x1p-32, 0xfffffffe},
               {1 - 0x1p-40, 0xffffffff},
               {1, 0xffffffff}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; ++i) {
    const dropout_t got = dropout_of(cases[i].p, NULL);
    const double scale = cases[i].p < 1 ? 1 / (1 - cases[i].p) : 0;
    CHECK(got.last_dropped == cases[i].last_dropped && got.scale == scale,
          "p = %a gives %08x and %a", cases[i].p, got.last_dropped, got.scale);
  }
}

void test_philox(uint32_t step) {
  (void)step;
  check_vectors();
  check_masks();
  check_thresholds();
}

typedef struct {
  dtype_t dtype;
  int64_t numel, seed;
  double p;
  void *x;
} dropout_case;

static dropout_case new_case(dtype_t dtype, int64_t numel, double p) {
  return (dropout_case){dtype, numel, 0x0123456789abcdef + numel, p,
                        random_elements(dtype, numel, 30, 1, 7)};
}

static void check_result(const dropout_case *c, const void *y) {
  const double unit = rounding(c->dtype), scale = 1 / (1 - c->p);
  for (int64_t i = 0; i < c->numel; ++i) {
    const uint32_t bits = bits_of(philox_of(c->seed, i / 8).word[i % 8 / 2], i % 2);
    const double got = element(c->dtype, y, i), x = element(c->dtype, c->x, i);
    /* scale is rounded to float, and so is the product */
    const double want = (double)bits < c->p * 0x1p32 ? 0 : x * scale,
                 slack = 2 * unit * fabs(want) + 0x1p-149;
    CHECK(close_to(c->dtype, got, want, want == 0 ? 0 : slack),
          "dropout %s, p = %g: element %lld of %lld is %a, not %a", dtype_names[c->dtype], c->p,
          (long long)i, (long long)c->numel, got, want);
  }
}

void test_dropout_sizes(uint32_t step) {
  static const int64_t sizes[] = {0, 1, 2, 3, 4, 5, 31, 32, 33, 63, 65, 1023, 4096, 4097, 8193};
  static const double probabilities[] = {0.1, 0.5, 1};
  (void)step;
  for (int kind = 0; kind < 3 * DTYPES; ++kind) {
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; ++s) {
      const dropout_case c = new_case((dtype_t)(kind / 3), sizes[s], probabilities[kind % 3]);
      const size_t size = formats[c.dtype].size, bytes = (size_t)c.numel * size;
      for (int i = 0; i < 2 * OFFSETS * OFFSETS; ++i) {
        should_stream = i % 2;
        buffer_t x = buffer_copy(c.x, bytes, (size_t)(i / 2 % OFFSETS) * size);
        buffer_t y = buffer_new(bytes, (size_t)(i / 2 / OFFSETS) * size);
        dropout_forward_args args = {x.data, y.data, dropout_of(c.p, &c.seed), c.numel, c.dtype};
        dropout_forward_cpu(0, ceil_div(c.numel, CHUNK), &args);
        check_result(&c, y.data);
        buffer_check(&x, c.x, "dropout, x"), buffer_check(&y, NULL, "dropout, y");
        buffer_free(&x), buffer_free(&y);
      }
      should_stream = 0;
      free(c.x);
    }
  }
}

/* Runs the chunks in one range, one by one, and streamed, which must give the same bits. Running
 * one chunk alone must write nothing outside this chunk. */
void test_dropout_ranges(uint32_t step) {
  (void)step;
  for (int dtype = 0; dtype < DTYPES; ++dtype) {
    const dropout_case c = new_case((dtype_t)dtype, 6 * CHUNK + 1025, 0.25);
    const size_t size = formats[dtype].size, bytes = (size_t)c.numel * size;
    const int64_t chunks = ceil_div(c.numel, CHUNK);
    buffer_t whole = buffer_new(bytes, 0);
    for (int way = 0; way < 4; ++way) {
      buffer_t y = way ? buffer_new(bytes, 0) : whole;
      dropout_forward_args args = {c.x, y.data, dropout_of(c.p, &c.seed), c.numel, c.dtype};
      should_stream = way == 2;
      if (way == 0 || way == 2) dropout_forward_cpu(0, chunks, &args);
      for (int64_t chunk = chunks - 1; way == 1 && chunk >= 0; --chunk)
        dropout_forward_cpu(chunk, chunk + 1, &args);
      if (way == 3) dropout_forward_cpu(2, 3, &args), dropout_forward_cpu(1, 1, &args);
      if (way == 0) check_result(&c, y.data);
      if (way == 3)
        buffer_check_part(&y, whole.data, 2 * CHUNK * size, 3 * CHUNK * size, "dropout, one chunk");
      CHECK(way == 3 || memcmp(whole.data, y.data, bytes) == 0, "dropout %s: other bits, way %d",
            dtype_names[dtype], way);
      if (way) buffer_check(&y, NULL, "dropout"), buffer_free(&y);
    }
    should_stream = 0;
    printf("bits dropout %s %016llx\n", dtype_names[dtype],
           (unsigned long long)hash_elements(0, c.dtype, whole.data, c.numel));
    buffer_free(&whole);
    free(c.x);
  }
}
