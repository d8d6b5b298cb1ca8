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
typedef int32_t lane_index_t __attribute__((vector_size(4 * LANES)));

/* The lanes of a and b, counted on from a to b, in that order. */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_index_t){__VA_ARGS__})
#endif

/* x scanned inside one register. */
ALWAYS_INLINE lanes_t scan_lanes(lanes_t x) {
  const lanes_t zero = {0};
#if LANES == 16
  x += SHUFFLE(x, zero, 16, 0, 1, 2, 16, 4, 5, 6, 16, 8, 9, 10, 16, 12, 13, 14);
  x += SHUFFLE(x, zero, 16, 16, 0, 1, 16, 16, 4, 5, 16, 16, 8, 9, 16, 16, 12, 13);
  x += SHUFFLE(x, zero, 16, 16, 16, 16, 3, 3, 3, 3, 16, 16, 16, 16, 11, 11, 11, 11);
  x += SHUFFLE(x, zero, 16, 16, 16, 16, 16, 16, 16, 16, 7, 7, 7, 7, 7, 7, 7, 7);
#elif LANES == 8
  x += SHUFFLE(x, zero, 8, 0, 1, 2, 8, 4, 5, 6);
  x += SHUFFLE(x, zero, 8, 8, 0, 1, 8, 8, 4, 5);
  x += SHUFFLE(x, zero, 8, 8, 8, 8, 3, 3, 3, 3);
#else
  x += SHUFFLE(x, zero, 4, 0, 1, 2);
  x += SHUFFLE(x, zero, 4, 4, 0, 1);
#endif
  return x;
}

/* `count` registers, a power of two, scanned in place. */
ALWAYS_INLINE void scan_registers(lanes_t *x, int count) {
  for (int i = 0; i < count; ++i) x[i] = scan_lanes(x[i]);
  for (int half = 1; half < count; half *= 2) {
    for (int i = half; i < count; i += 2 * half) {
      for (int j = 0; j < half; ++j) x[i + j] += x[i - 1][LANES - 1];
    }
  }
}

/* A block scanned in place: v[k] becomes the sum of the elements up to v[k]'s. */
ALWAYS_INLINE void scan_block_float32(float *v) {
  lanes_t x[BLOCK / LANES];
  memcpy(x, v, sizeof x);
  scan_registers(x, BLOCK / LANES);
  memcpy(v, x, sizeof x);
}
ALWAYS_INLINE void scan_block_float16(float *v) { scan_block_float32(v); }

/* In a bfloat16 block the even elements come first, then the odd ones: pairs are scanned. */
ALWAYS_INLINE void scan_block_bfloat16(float *v) {
  enum { HALF = BLOCK / 2 };
  float pair[HALF + 1];
  lanes_t x[HALF / LANES];
  for (int k = 0; k < HALF; ++k) pair[k] = v[k] + v[HALF + k];
  memcpy(x, pair, sizeof x);
  scan_registers(x, HALF / LANES);
  pair[0] = 0;
  memcpy(pair + 1, x, sizeof x);
  for (int k = 0; k < HALF; ++k) v[k] += pair[k];
  for (int k = 0; k < HALF; ++k) v[HALF + k] = pair[k + 1];
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
