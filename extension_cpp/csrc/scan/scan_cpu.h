/* The scan of a block in registers, for scan_cpu_kernel.h.
 *
 * A tree of fixed shape, whatever the width of a register: first inside 4 neighbouring elements, in
 * two steps, then 4 elements get the total of the 4 before them, 8 that of 8, 16 that of 16. */
#ifndef EXTENSION_CPP_SCAN_CPU_H
#define EXTENSION_CPP_SCAN_CPU_H

#include "common/cpu_block.h"

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

/* Lanes of a and b by their numbers, which count on from a to b. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_index_t){__VA_ARGS__})
#endif
#define ZERO ((lanes_t){0})
#define UNROLL _Pragma("GCC unroll 8")

/* Inside 4 neighbours, lanes move up by 1 or by 2, and 0 comes in. Of 8 neighbours, the second 4 get
 * the last of the first 4; of 16, the second 8 get the last of the first 8; the others get 0.
 * UP_FROM(a, b): b's lanes move up by 1, and the last of a comes in. LAST(x): all get the last. */
#if LANES == 16
#define UP_1(x) SHUFFLE(x, ZERO, 16, 0, 1, 2, 16, 4, 5, 6, 16, 8, 9, 10, 16, 12, 13, 14)
#define UP_2(x) SHUFFLE(x, ZERO, 16, 16, 0, 1, 16, 16, 4, 5, 16, 16, 8, 9, 16, 16, 12, 13)
#define LAST_OF_4(x) SHUFFLE(x, ZERO, 16, 16, 16, 16, 3, 3, 3, 3, 16, 16, 16, 16, 11, 11, 11, 11)
#define LAST_OF_8(x) SHUFFLE(x, ZERO, 16, 16, 16, 16, 16, 16, 16, 16, 7, 7, 7, 7, 7, 7, 7, 7)
#define UP_FROM(a, b) SHUFFLE(a, b, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
#define LAST(x) SHUFFLE(x, x, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15, 15)
#elif LANES == 8
#define UP_1(x) ((lanes_t)_mm256_bslli_epi128((__m256i)(x), 4))
#define UP_2(x) ((lanes_t)_mm256_bslli_epi128((__m256i)(x), 8))
#define LAST_OF_4(x) _mm256_permute_ps(_mm256_permute2f128_ps(x, x, 0x08), 0xff)
#define UP_FROM(a, b) SHUFFLE(a, b, 7, 8, 9, 10, 11, 12, 13, 14)
#define LAST(x) SHUFFLE(x, x, 7, 7, 7, 7, 7, 7, 7, 7)
#else
#define UP_1(x) SHUFFLE(x, ZERO, 4, 0, 1, 2)
#define UP_2(x) SHUFFLE(x, ZERO, 4, 4, 0, 1)
#define UP_FROM(a, b) SHUFFLE(a, b, 3, 4, 5, 6)
#define LAST(x) SHUFFLE(x, x, 3, 3, 3, 3)
#endif

/* x scanned inside one register. */
ALWAYS_INLINE lanes_t scan_lanes(lanes_t x) {
  x += UP_1(x);
  x += UP_2(x);
#if LANES >= 8
  x += LAST_OF_4(x);
#endif
#if LANES >= 16
  x += LAST_OF_8(x);
#endif
  return x;
}

/* `count` registers, a power of two up to 8, scanned in place. */
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

/* A block scanned in place: v[k] becomes the sum of the elements up to v[k]'s. */
ALWAYS_INLINE void scan_block_float32(float *v) {
  lanes_t x[BLOCK / LANES];
  UNROLL for (int i = 0; i < BLOCK / LANES; ++i) x[i] = load_lanes(v + i * LANES);
  scan_registers(x, BLOCK / LANES);
  UNROLL for (int i = 0; i < BLOCK / LANES; ++i) store_lanes(v + i * LANES, x[i]);
}
ALWAYS_INLINE void scan_block_float16(float *v) { scan_block_float32(v); }

/* In a bfloat16 block the even elements come first, then the odd ones: pairs are scanned. */
ALWAYS_INLINE void scan_block_bfloat16(float *v) {
  enum { HALF = BLOCK / 2, COUNT = HALF / LANES };
  lanes_t even[COUNT], pair[COUNT];
  UNROLL for (int i = 0; i < COUNT; ++i) even[i] = load_lanes(v + i * LANES);
  UNROLL for (int i = 0; i < COUNT; ++i) pair[i] = even[i] + load_lanes(v + HALF + i * LANES);
  scan_registers(pair, COUNT);
  UNROLL for (int i = 0; i < COUNT; ++i) {
    const lanes_t before = i > 0 ? pair[i - 1] : ZERO;
    store_lanes(v + i * LANES, even[i] + UP_FROM(before, pair[i]));
    store_lanes(v + HALF + i * LANES, pair[i]);
  }
}

/* float64 exists for gradcheck. */
ALWAYS_INLINE void scan_block_float64(double *v) {
  for (int k = 1; k < BLOCK; ++k) v[k] += v[k - 1];
}

/* The lines and parts of a work item. */
typedef struct {
  int64_t outer, inner;    /* of the first line */
  int width;               /* lines */
  int64_t part, parts_end; /* of `parts` */
  int64_t total;           /* where the lines are in a part's totals */
} scan_item_t;

ALWAYS_INLINE scan_item_t scan_item(const scan_shape *shape, int64_t steps, int64_t item) {
  const scan_cpu_plan *plan = (const scan_cpu_plan *)shape->state;
  const int64_t tiles = ceil_div(shape->inner, plan->width), tile = item / plan->parts;
  const int64_t inner = tile % tiles * plan->width, rest = shape->inner - inner;
  scan_item_t found;
  found.outer = tile / tiles;
  found.inner = inner;
  found.width = (int)(rest < plan->width ? rest : plan->width);
  found.part = item % plan->parts;
  found.parts_end = plan->parts > 1 ? found.part + 1 : ceil_div(steps, SCAN_PART);
  found.total = found.outer * (scan_lines(shape) / shape->outer) + inner;
  return found;
}

/* The number of lanes of an item's arrays: whole blocks, except for a row. */
ALWAYS_INLINE int scan_lanes_of(const scan_shape *shape, scan_item_t item) {
  return shape->inner == 1 ? 1 : (item.width + BLOCK - 1) / BLOCK * BLOCK;
}

ALWAYS_INLINE double *scan_totals(const scan_shape *shape, scan_item_t item, int64_t part) {
  const scan_cpu_plan *plan = (const scan_cpu_plan *)shape->state;
  return plan->totals + part * scan_lines(shape) + item.total;
}

#endif
