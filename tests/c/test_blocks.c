/* Tests the block functions of common/cpu/block.h: loads, stores, their order, and rounding from
 * float to bfloat16 and float16. */
#include "check.h"
#include "common/cpu/level.h"
#include "probe.h"

enum { LANES = 32 };

/* Returns the element of a block that lane k holds, as common/cpu/block.h defines it. */
static int element_of_lane(dtype_t dtype, int k) {
  if (dtype != DTYPE_BFLOAT16) return k;
  return k < LANES / 2 ? 2 * k : 2 * (k - LANES / 2) + 1;
}

static int same_number(double a, double b) {
  return isnan(a) ? isnan(b) : a == b && !signbit(a) == !signbit(b);
}

/* Checks that a load of n elements gives their values, and 0 in the lanes after them. A store of
 * these lanes must write the bytes of the elements, and change nothing after them. */
static void check_block(dtype_t dtype, const unsigned char *elements, int n, size_t offset,
                        int stream) {
  const size_t size = formats[dtype].size, lane_size = dtype == DTYPE_FLOAT64 ? 8 : 4;
  const dtype_t lane_type = dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  buffer_t memory = buffer_copy(elements, (size_t)n * size, offset * size);
  buffer_t lanes = buffer_new(LANES * lane_size, 0),
           out = buffer_new((size_t)n * size, offset * size);
  block_args load = {memory.data, lanes.data, dtype, n, 0},
             store = {out.data, lanes.data, dtype, n, stream};
  load_block_cpu(0, 1, &load);
  for (int k = 0; k < LANES; ++k) {
    const int i = element_of_lane(dtype, k);
    const double want = i < n ? element(dtype, elements, i) : 0,
                 got = element(lane_type, lanes.data, k);
    CHECK(same_number(got, want), "load of %d %s: lane %d is %a, not %a", n, dtype_names[dtype], k,
          got, want);
  }
  store_block_cpu(0, 1, &store);
  buffer_check(&out, NULL, "store");
  for (int i = 0; i < n; ++i) {
    const double want = element(dtype, elements, i), got = element(dtype, out.data, i);
    CHECK(same_number(got, want), "store of %d %s: element %d is %a, not %a", n, dtype_names[dtype],
          i, got, want);
  }
  buffer_check(&memory, elements, "load");
  buffer_check(&lanes, NULL, "lanes");
  buffer_free(&memory);
  buffer_free(&lanes);
  buffer_free(&out);
}

void test_loads(uint32_t step) {
  static uint16_t all[1 << 16];
  (void)step;
  for (int i = 0; i < 1 << 16; ++i) all[i] = (uint16_t)i;
  for (int d = 0; d < DTYPES; ++d) {
    const dtype_t dtype = (dtype_t)d;
    unsigned char *elements = random_elements(dtype, LANES, 100, 1, 7);
    for (int n = 0; n <= LANES; ++n) {
      for (size_t offset = 0; offset < OFFSETS; ++offset)
        check_block(dtype, elements, n, offset, 0);
      check_block(dtype, elements, n, 0, 1);
    }
    free(elements);
    if (formats[d].size != 2) continue;
    for (int i = 0; i < 1 << 16; i += LANES)
      check_block(dtype, (unsigned char *)(all + i), LANES, 0, i / LANES % 2);
  }
}

typedef struct {
  uint64_t hash[DTYPES];
} store_sweep;

/* Reorders a sweep, which is in memory order, into the block order that the kernel expects. */
static void to_block_order(dtype_t dtype, float *to, const float *from) {
  for (int block = 0; block < SWEEP; block += LANES) {
    for (int k = 0; k < LANES; ++k) to[block + k] = from[block + element_of_lane(dtype, k)];
  }
}

static void visit(const float *x, void *context) {
  store_sweep *all = context;
  float ordered[SWEEP];
  uint16_t half[SWEEP];
  for (int d = DTYPE_BFLOAT16; d <= DTYPE_FLOAT16; ++d) {
    const dtype_t dtype = (dtype_t)d;
    to_block_order(dtype, ordered, x);
    store_args args = {ordered, half, dtype};
    store_all_cpu(0, SWEEP, &args);
    all->hash[d] = hash_elements(all->hash[d], dtype, half, SWEEP);
    for (int i = 0; i < SWEEP; ++i) {
      const uint16_t want = half_bits(dtype, (double)x[i]);
      if (half[i] == want) continue;
      CHECK(isnan(x[i]) && isnan(half_value(dtype, half[i])), "%s of %a is %04x, not %04x",
            dtype_names[d], (double)x[i], (unsigned)half[i], (unsigned)want);
    }
  }
}

void test_stores(uint32_t step) {
  store_sweep all = {0};
  sweep_floats(step, visit, &all);
  /* Visits the floats halfway between neighbours of a 16-bit type, and the floats next to these.
   * They test ties and the ends of the type's range. */
  for (int d = DTYPE_BFLOAT16; d <= DTYPE_FLOAT16; ++d) {
    float x[SWEEP];
    int n = 0;
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      const double low = half_value((dtype_t)d, (uint16_t)bits);
      const float tie = (float)(low + copysign(unit_at(&formats[d], low) / 2, low));
      if (!isfinite(tie)) continue;
      x[n++] = tie, x[n++] = nextafterf(tie, INFINITY), x[n++] = nextafterf(tie, -INFINITY),
      x[n++] = (float)low;
      if (n == SWEEP) visit(x, &all), n = 0;
    }
    while (n < SWEEP) x[n++] = NAN;
    visit(x, &all);
  }
  for (int d = DTYPE_BFLOAT16; d <= DTYPE_FLOAT16; ++d) {
    printf("bits store %s %016llx\n", dtype_names[d], (unsigned long long)all.hash[d]);
  }
}
