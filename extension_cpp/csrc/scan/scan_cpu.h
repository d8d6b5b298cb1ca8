/* Scans of a block in registers, for scan_cpu_kernel.h.
 *
 * The order of the additions is the same for every register width. First, each group of 4 elements
 * is scanned, in two steps. Then groups are joined in pairs: the total of the first group is added
 * to each element of the second. This joins groups of 4, then of 8, then of 16. */
#ifndef EXTENSION_CPP_SCAN_CPU_H
#define EXTENSION_CPP_SCAN_CPU_H

#include <math.h>

#include "common/cpu/block.h"
#include "common/cpu/math.h"
#include "scan/scan.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float lanes_t __attribute__((vector_size(4 * LANES)));
typedef float memory_lanes_t __attribute__((vector_size(4 * LANES), may_alias, aligned(4)));
typedef int32_t lane_index_t __attribute__((vector_size(4 * LANES)));

ALWAYS_INLINE lanes_t load_lanes(const float *p) { return *(const memory_lanes_t *)p; }
ALWAYS_INLINE void store_lanes(float *p, lanes_t x) { *(memory_lanes_t *)p = x; }

/* SHUFFLE(a, b, ...) picks lanes by number. The lanes of a come first, then those of b. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_index_t){__VA_ARGS__})
#endif
#define ZERO ((lanes_t){0})
#define ONE (ZERO + 1)
#define UNROLL _Pragma("GCC unroll 8")

/* UP_1 and UP_2 move lanes up by 1 or 2 within groups of 4. LAST_OF_4 sets the second half of each
 * 8 lanes to the last lane of the first half. LAST_OF_8 does the same in groups of 16. All other
 * lanes become `in`, whose lanes are all equal. UP_FROM(a, b) moves b's lanes up by 1 and puts the
 * last lane of a first. LAST(x) copies x's last lane to all lanes. */
#if LANES == 16
#define UP_1(x, in) SHUFFLE(x, in, 16, 0, 1, 2, 16, 4, 5, 6, 16, 8, 9, 10, 16, 12, 13, 14)
#define UP_2(x, in) SHUFFLE(x, in, 16, 16, 0, 1, 16, 16, 4, 5, 16, 16, 8, 9, 16, 16, 12, 13)
#define LAST_OF_4(x, in) SHUFFLE(x, in, 16, 16, 16, 16, 3, 3, 3, 3, 16, 16, 16, 16, 11, 11, 11, 11)
#define LAST_OF_8(x, in) SHUFFLE(x, in, 16, 16, 16, 16, 16, 16, 16, 16, 7, 7, 7, 7, 7, 7, 7, 7)
#define UP_FROM(a, b) SHUFFLE(a, b, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
#define LAST(x) SHUFFLE(x, x, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15)
#elif LANES == 8
#define UP_1(x, in) SHUFFLE(x, in, 8, 0, 1, 2, 8, 4, 5, 6)
#define UP_2(x, in) SHUFFLE(x, in, 8, 8, 0, 1, 8, 8, 4, 5)
#define LAST_OF_4(x, in) _mm256_permute_ps(_mm256_permute2f128_ps(x, in, 0x02), 0xff)
#define UP_FROM(a, b) SHUFFLE(a, b, 7, 8, 9, 10, 11, 12, 13, 14)
#define LAST(x) SHUFFLE(x, x, 7, 7, 7, 7, 7, 7, 7, 7)
#else
#define UP_1(x, in) SHUFFLE(x, in, 4, 0, 1, 2)
#define UP_2(x, in) SHUFFLE(x, in, 4, 4, 0, 1)
#define UP_FROM(a, b) SHUFFLE(a, b, 3, 4, 5, 6)
#define LAST(x) SHUFFLE(x, x, 3, 3, 3, 3)
#endif

/* UP_1 and UP_2 with 0 for `in`. AVX2 has a single instruction for this. */
#if LANES == 8
#define UP_1_ZERO(x) ((lanes_t)_mm256_bslli_epi128((__m256i)(x), 4))
#define UP_2_ZERO(x) ((lanes_t)_mm256_bslli_epi128((__m256i)(x), 8))
#else
#define UP_1_ZERO(x) UP_1(x, ZERO)
#define UP_2_ZERO(x) UP_2(x, ZERO)
#endif

/* Returns the running sums of the lanes of one register. */
ALWAYS_INLINE lanes_t scan_lanes(lanes_t x) {
  x += UP_1_ZERO(x);
  x += UP_2_ZERO(x);
#if LANES >= 8
  x += LAST_OF_4(x, ZERO);
#endif
#if LANES >= 16
  x += LAST_OF_8(x, ZERO);
#endif
  return x;
}

/* Computes the running sums of `count` registers in place, as of one sequence. `count` is a power
 * of two up to 8. */
ALWAYS_INLINE void scan_registers(lanes_t *x, int count) {
  UNROLL for (int i = 0; i < count; ++i) x[i] = scan_lanes(x[i]);
  UNROLL for (int i = 0; i + 1 < count; i += 2) x[i + 1] += LAST(x[i]);
  UNROLL for (int i = 0; i + 3 < count; i += 4) {
    const lanes_t before = LAST(x[i + 1]);
    x[i + 2] += before;
    x[i + 3] += before;
  }
  if (count == 8) {
    const lanes_t before = LAST(x[3]);
    UNROLL for (int i = 4; i < 8; ++i) x[i] += before;
  }
}

/* The running sum of a row. float32 and float64 hold the value before the part and the sum of its
 * blocks in double. Half types hold both in float registers. `before` has equal lanes and includes
 * the sum; of `sum` only the last lane is meaningful. */
typedef struct {
  double start, sum;
} carry_float32, carry_float64;
typedef struct {
  lanes_t before, sum;
} carry_float16, carry_bfloat16;

ALWAYS_INLINE carry_float32 carry_from_float32(double start) { return (carry_float32){start, 0}; }
ALWAYS_INLINE carry_float64 carry_from_float64(double start) { return (carry_float64){start, 0}; }
ALWAYS_INLINE carry_float16 carry_from_float16(double start) {
  return (carry_float16){ZERO + (float)start, ZERO};
}
ALWAYS_INLINE carry_bfloat16 carry_from_bfloat16(double start) { return carry_from_float16(start); }

/* Return the sum of the blocks scanned so far, without the value before the part. */
ALWAYS_INLINE double carried_float32(carry_float32 carry) { return carry.sum; }
ALWAYS_INLINE double carried_float64(carry_float64 carry) { return carry.sum; }
ALWAYS_INLINE double carried_float16(carry_float16 carry) { return carry.sum[LANES - 1]; }
ALWAYS_INLINE double carried_bfloat16(carry_bfloat16 carry) { return carry.sum[LANES - 1]; }

/* Scan a block in place: v[k] becomes the line's running sum up to and including lane k's
 * element. */
ALWAYS_INLINE carry_float32 scan_block_float32(float *v, carry_float32 carry) {
  enum { COUNT = BLOCK / LANES };
  const double before = carry.start + carry.sum;
  lanes_t x[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] = load_lanes(v + i * LANES);
  scan_registers(x, COUNT);
  carry.sum += x[COUNT - 1][LANES - 1];
  /* The double is split into two floats, so that only the last addition rounds. */
  const float high = (float)before;
  const float low = high - high == 0 ? (float)(before - (double)high) : 0;
  UNROLL for (int i = 0; i < COUNT; ++i) store_lanes(v + i * LANES, high + (low + x[i]));
  return carry;
}

ALWAYS_INLINE carry_float16 scan_block_float16(float *v, carry_float16 carry) {
  enum { COUNT = BLOCK / LANES };
  lanes_t x[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] = load_lanes(v + i * LANES);
  scan_registers(x, COUNT);
  carry.sum += x[COUNT - 1];
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] += carry.before;
  UNROLL for (int i = 0; i < COUNT; ++i) store_lanes(v + i * LANES, x[i]);
  carry.before = LAST(x[COUNT - 1]);
  return carry;
}

/* In a bfloat16 block the even elements come first, so the sums of pairs are scanned. */
ALWAYS_INLINE carry_bfloat16 scan_block_bfloat16(float *v, carry_bfloat16 carry) {
  enum { HALF = BLOCK / 2, COUNT = HALF / LANES };
  lanes_t even[COUNT], pair[COUNT], last = carry.before;
  UNROLL for (int i = 0; i < COUNT; ++i) even[i] = load_lanes(v + i * LANES);
  UNROLL for (int i = 0; i < COUNT; ++i) pair[i] = even[i] + load_lanes(v + HALF + i * LANES);
  scan_registers(pair, COUNT);
  carry.sum += pair[COUNT - 1];
  UNROLL for (int i = 0; i < COUNT; ++i) {
    const lanes_t odd = carry.before + pair[i];
    store_lanes(v + i * LANES, even[i] + UP_FROM(last, odd));
    store_lanes(v + HALF + i * LANES, odd);
    last = odd;
  }
  carry.before = LAST(last);
  return carry;
}

/* float64 exists for gradcheck, so this function need not be fast. */
ALWAYS_INLINE carry_float64 scan_block_float64(double *v, carry_float64 carry) {
  const double before = carry.start + carry.sum;
  double sum = v[0]; /* a variable, because gcc would read v[k - 1] from memory again */
  v[0] += before;
  for (int k = 1; k < BLOCK; ++k) {
    sum += v[k];
    v[k] = before + sum;
  }
  carry.sum += sum;
  return carry;
}

/* ---- linear recurrences: a pair (a, b) means h -> a h + b, and the scan composes pairs ---- */

#if LANES == 16
#define FMA_LANES(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif LANES == 8
#define FMA_LANES(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
#define FMA_LANES(a, b, c) ((a) * (b) + (c))
#endif

/* Replaces the pair (a, b) by the composition that applies (first_a, first_b) first. */
ALWAYS_INLINE void compose(lanes_t *a, lanes_t *b, lanes_t first_a, lanes_t first_b) {
  *b = FMA_LANES(*a, first_b, *b);
  *a *= first_a;
}

/* Scans `count` registers of pairs in place. `count` is a power of two up to 8. */
ALWAYS_INLINE void compose_registers(lanes_t *a, lanes_t *b, int count) {
  UNROLL for (int i = 0; i < count; ++i) {
    compose(&a[i], &b[i], UP_1(a[i], ONE), UP_1_ZERO(b[i]));
    compose(&a[i], &b[i], UP_2(a[i], ONE), UP_2_ZERO(b[i]));
#if LANES >= 8
    compose(&a[i], &b[i], LAST_OF_4(a[i], ONE), LAST_OF_4(b[i], ZERO));
#endif
#if LANES >= 16
    compose(&a[i], &b[i], LAST_OF_8(a[i], ONE), LAST_OF_8(b[i], ZERO));
#endif
  }
  UNROLL for (int half = 1; half < 8; half *= 2) {
    if (half >= count) break;
    UNROLL for (int i = half; i < count; i += 2 * half) {
      const lanes_t first_a = LAST(a[i - 1]), first_b = LAST(b[i - 1]);
      UNROLL for (int j = i; j < i + half; ++j) compose(&a[j], &b[j], first_a, first_b);
    }
  }
}

/* The pair of all steps of a block: it maps the state before the block to the state after it. */
typedef struct {
  double a, b;
} pair_sum_t;

/* Replaces b by the states h of a block, given the state `start` before it. */
ALWAYS_INLINE pair_sum_t recur_block_float32(const float *a, float *b, double start) {
  enum { COUNT = BLOCK / LANES };
  const lanes_t before = ZERO + (float)start;
  lanes_t x[COUNT], y[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] = load_lanes(a + i * LANES);
  UNROLL for (int i = 0; i < COUNT; ++i) y[i] = load_lanes(b + i * LANES);
  compose_registers(x, y, COUNT);
  UNROLL for (int i = 0; i < COUNT; ++i) store_lanes(b + i * LANES, FMA_LANES(x[i], before, y[i]));
  return (pair_sum_t){x[COUNT - 1][LANES - 1], y[COUNT - 1][LANES - 1]};
}
ALWAYS_INLINE pair_sum_t recur_block_float16(const float *a, float *b, double start) {
  return recur_block_float32(a, b, start);
}

/* Composes each odd step with the even one before it, then computes the states of the odd steps,
 * and from these the states of the even steps. */
ALWAYS_INLINE pair_sum_t recur_block_bfloat16(const float *a, float *b, double start) {
  enum { HALF = BLOCK / 2, COUNT = HALF / LANES };
  lanes_t before = ZERO + (float)start;
  lanes_t x[COUNT], y[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) {
    x[i] = load_lanes(a + HALF + i * LANES);
    y[i] = load_lanes(b + HALF + i * LANES);
    compose(&x[i], &y[i], load_lanes(a + i * LANES), load_lanes(b + i * LANES));
  }
  compose_registers(x, y, COUNT);
  const pair_sum_t sum = {x[COUNT - 1][LANES - 1], y[COUNT - 1][LANES - 1]};
  const lanes_t first = before;
  UNROLL for (int i = 0; i < COUNT; ++i) {
    const lanes_t odd = FMA_LANES(x[i], first, y[i]);
    const lanes_t even =
        FMA_LANES(load_lanes(a + i * LANES), UP_FROM(before, odd), load_lanes(b + i * LANES));
    store_lanes(b + i * LANES, even);
    store_lanes(b + HALF + i * LANES, odd);
    before = odd;
  }
  return sum;
}

ALWAYS_INLINE pair_sum_t recur_block_float64(const double *a, double *b, double start) {
  pair_sum_t sum = {1, 0};
  for (int k = 0; k < BLOCK; ++k) {
    sum.b = fma_double(a[k], sum.b, b[k]);
    sum.a *= a[k];
    start = fma_double(a[k], start, b[k]);
    b[k] = start;
  }
  return sum;
}

/* Returns the state after the steps of the pair `sum`: a * state + b. If `a` has overflowed to
 * infinity and the state is 0, the result is b and not NaN. If `a` is NaN, so is the result. */
ALWAYS_INLINE double next_state(pair_sum_t sum, double state) {
  return state == 0 && sum.a == sum.a ? sum.b : fma_double(sum.a, state, sum.b);
}

ALWAYS_INLINE pair_sum_t compose_sums(pair_sum_t first, pair_sum_t second) {
  return (pair_sum_t){first.a * second.a, next_state(second, first.b)};
}

/* ---- running maxima ---- */

#if LANES == 16
#define MAX_LANES(a, b) _mm512_max_ps(a, b)
#elif LANES == 8
#define MAX_LANES(a, b) _mm256_max_ps(a, b)
#else
ALWAYS_INLINE lanes_t MAX_LANES(lanes_t a, lanes_t b) {
  const lane_index_t above = a > b;
  return (lanes_t)(((lane_index_t)a & above) | ((lane_index_t)b & ~above));
}
#endif

ALWAYS_INLINE void max_registers(lanes_t *x, int count) {
  const lanes_t lowest = ZERO - INFINITY;
  UNROLL for (int i = 0; i < count; ++i) {
    x[i] = MAX_LANES(x[i], UP_1(x[i], lowest));
    x[i] = MAX_LANES(x[i], UP_2(x[i], lowest));
#if LANES >= 8
    x[i] = MAX_LANES(x[i], LAST_OF_4(x[i], lowest));
#endif
#if LANES >= 16
    x[i] = MAX_LANES(x[i], LAST_OF_8(x[i], lowest));
#endif
  }
  UNROLL for (int i = 1; i < count; ++i) x[i] = MAX_LANES(x[i], LAST(x[i - 1]));
}

/* Sets before[k] to the largest of `start` and the elements before v[k]. v has no NaN. Returns the
 * largest of `start` and all elements. */
ALWAYS_INLINE float max_block_float32(const float *v, float *before, float start) {
  enum { COUNT = BLOCK / LANES };
  lanes_t x[COUNT], last = ZERO + start;
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] = load_lanes(v + i * LANES);
  max_registers(x, COUNT);
  UNROLL for (int i = 0; i < COUNT; ++i) {
    const lanes_t max = MAX_LANES(x[i], ZERO + start);
    store_lanes(before + i * LANES, UP_FROM(last, max));
    last = max;
  }
  return last[LANES - 1];
}
ALWAYS_INLINE float max_block_float16(const float *v, float *before, float start) {
  return max_block_float32(v, before, start);
}

ALWAYS_INLINE float max_block_bfloat16(const float *v, float *before, float start) {
  enum { HALF = BLOCK / 2, COUNT = HALF / LANES };
  lanes_t x[COUNT], last = ZERO + start;
  UNROLL for (int i = 0; i < COUNT; ++i) x[i] =
      MAX_LANES(load_lanes(v + i * LANES), load_lanes(v + HALF + i * LANES));
  max_registers(x, COUNT);
  UNROLL for (int i = 0; i < COUNT; ++i) {
    const lanes_t max = MAX_LANES(x[i], ZERO + start), of_even = UP_FROM(last, max);
    store_lanes(before + i * LANES, of_even);
    store_lanes(before + HALF + i * LANES, MAX_LANES(of_even, load_lanes(v + i * LANES)));
    last = max;
  }
  return last[LANES - 1];
}

ALWAYS_INLINE double max_block_float64(const double *v, double *before, double start) {
  for (int k = 0; k < BLOCK; ++k) {
    before[k] = start;
    start = v[k] > start ? v[k] : start;
  }
  return start;
}

/* ---- sums of exponentials: a maximum, and the sum of exp(x - maximum) over the other x ---- */

typedef struct {
  double max, sum;
} exp_sum_t;

/* The sum over no elements. `sum` leaves out the maximum's own term, 1, so -1 stands for 0. */
static const exp_sum_t NO_EXP_SUM = {-INFINITY, -1};

/* Joins two sums. Equal maxima may be infinite, and are not subtracted, to avoid NaN. */
ALWAYS_INLINE exp_sum_t add_exp_sums(exp_sum_t first, exp_sum_t second) {
  const exp_sum_t high = first.max > second.max ? first : second;
  const exp_sum_t low = first.max > second.max ? second : first;
  const double e = low.max == high.max ? 1 : exp(low.max - high.max);
  return (exp_sum_t){high.max, high.sum + (low.sum * e + e)};
}

#endif
