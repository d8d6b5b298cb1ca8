/* Definitions that rows/cpu_sum_exp_kernel.h uses, and that do not depend on the element type. */
#ifndef EXTENSION_CPP_CPU_SUM_EXP_H
#define EXTENSION_CPP_CPU_SUM_EXP_H

#include "common/cpu/block.h"
#include "common/cpu/math.h"
#include "common/cpu/row.h"

enum {
  SUM_EXP_COLS = 8192,    /* columns that are summed before the sum is added to a double */
  POWER_LANES = 16,       /* lanes in add_powers() */
  POWER_MAX = 90000,      /* plain_sums() is accurate if |max| is below this */
  SUM_EXP_TILE = 128,     /* inner elements in a tile */
  SUM_EXP_TILE_COLS = 32, /* SUM_EXP_COLS of a tile */
};

/* Flags of a kernel.
 *   SOFTCAP  z is capped
 *   ENTROPY  also computes the sum of exp(z - max) * (z - max)
 *   SMOOTH   the gradient has the term of label smoothing
 *   TARGET   the block may contain the target's column
 *   CALLS    calls a function for each block, for rare cases, in which code size matters */
enum { SOFTCAP = 1, ENTROPY = 2, SMOOTH = 4, TARGET = 8, CALLS = 16 };

/* The degree of the polynomial for 2^x in sums. */
enum { DEGREE_float64 = 5, DEGREE_float32 = 5, DEGREE_float16 = 4, DEGREE_bfloat16 = 4 };

/* How a pass over a row of `cols` elements writes its columns. If begin > 0, the pass first writes
 * one block at column 0 and one at column `head`. It then writes [begin, end) with non-temporal
 * stores, and last the blocks from `end` on. The last BLOCK columns form one block that may overlap
 * the block before it. Writing this overlapping block is several times faster than writing a
 * partial block. No block overlaps columns written with non-temporal stores, because their cache
 * line would have to be read from memory again. If the result overwrites the input, or if the row
 * is shorter than a block, the last block is partial instead. */
typedef struct {
  int64_t head, begin, end;
  int partial;
} row_span_t;

ALWAYS_INLINE row_span_t row_span(const void *out, int64_t cols, int64_t size, int stream,
                                  int in_place) {
  row_span_t span = {0, 0, 0, in_place || cols < BLOCK};
  const int64_t head = elements_to_line(out, size);
  if (!stream) return span;
  if (head == 0 && cols % BLOCK == 0) {
    span.end = cols;
  } else if (cols >= 8 * BLOCK) {
    span.head = head;
    span.begin = head > 0 ? head + BLOCK : 0;
    span.end = span.begin + (cols - span.begin - BLOCK) / BLOCK * BLOCK;
  }
  return span;
}

/* Returns how far ahead a sum prefetches: to the next chunk, or in short rows to the next row. */
ALWAYS_INLINE ahead_t sum_exp_ahead(int64_t cols, int64_t size) {
  const int64_t chunk = cols < SUM_EXP_COLS ? cols : SUM_EXP_COLS;
  return row_ahead(chunk, chunk, size);
}

/* Returns the largest of 32 lanes, none of which is NaN. The pragmas keep gcc from unrolling the
 * loops completely, because it would compile unrolled loops to scalar code. */
#define DEFINE_FOLD_MAX(type)                                                       \
  ALWAYS_INLINE type fold_max_##type(const type *lane) {                            \
    type max[16];                                                                   \
    _Pragma("GCC unroll 1") for (int k = 0; k < 16; ++k) max[k] =                   \
        lane[k] > lane[k + 16] ? lane[k] : lane[k + 16];                            \
    _Pragma("GCC unroll 1") for (int k = 0; k < 8; ++k) max[k] =                    \
        max[k] > max[k + 8] ? max[k] : max[k + 8];                                  \
    for (int k = 0; k < 4; ++k) max[k] = max[k] > max[k + 4] ? max[k] : max[k + 4]; \
    for (int k = 0; k < 2; ++k) max[k] = max[k] > max[k + 2] ? max[k] : max[k + 2]; \
    return max[0] > max[1] ? max[0] : max[1];                                       \
  }
DEFINE_FOLD_MAX(float)
DEFINE_FOLD_MAX(double)
#define FOLD_MAX(lane) _Generic((lane)[0], float : fold_max_float, double : fold_max_double)(lane)

/* Sums POWER_LANES lanes in a fixed order, as a binary tree. */
#define DEFINE_FOLD_POWERS(type)                                 \
  ALWAYS_INLINE double fold_powers_##type(const type *lane) {    \
    double sum[8];                                               \
    _Pragma("GCC unroll 1") for (int k = 0; k < 8; ++k) sum[k] = \
        (double)lane[k] + (double)lane[k + 8];                   \
    for (int k = 0; k < 4; ++k) sum[k] += sum[k + 4];            \
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);                \
  }
DEFINE_FOLD_POWERS(float)
DEFINE_FOLD_POWERS(double)
#define FOLD_POWERS(lane) \
  _Generic((lane)[0], float : fold_powers_float, double : fold_powers_double)(lane)

#endif
