/* What rows/cpu_sum_exp_kernel.h needs once, before it is compiled per element type. */
#ifndef EXTENSION_CPP_CPU_SUM_EXP_H
#define EXTENSION_CPP_CPU_SUM_EXP_H

#include "common/cpu/block.h"
#include "common/cpu/math.h"
#include "common/cpu/row.h"

enum {
  SUM_EXP_COLS = 8192,    /* columns of a row between two flushes to double */
  POWER_LANES = 16,       /* lanes of a sum of powers */
  POWER_MAX = 90000,      /* the largest maximum of a sum of powers */
  SUM_EXP_TILE = 128,     /* inner elements of a tile */
  SUM_EXP_TILE_COLS = 32, /* columns of a tile between two flushes to double */
};

/* Flags of a kernel: SOFTCAP: z is capped. ENTROPY: also sums exp(z - max) * (z - max). SMOOTH: the
 * gradient has the term of label smoothing. TARGET: the block may have the target's column.
 * CALLS: takes a function call for every block, where little code matters more than speed. */
enum { SOFTCAP = 1, ENTROPY = 2, SMOOTH = 4, TARGET = 8, CALLS = 16 };

/* The degree of 2^x in sums. */
enum { DEGREE_float64 = 5, DEGREE_float32 = 5, DEGREE_float16 = 4, DEGREE_bfloat16 = 4 };

/* How a pass over a row writes its columns, in three steps: if begin > 0, a block at 0 and a block
 * at `head`; streamed blocks in [begin, end); the blocks behind `end`. The last BLOCK columns are
 * one block, which may overlap the block before it: that is several times faster than a partial
 * block. No block overlaps a streamed one, whose line would have to be read from memory again. In
 * place, and in rows shorter than a block, the last block is partial. */
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

/* How far ahead a sum prefetches: to the next chunk, which is in short rows the next row. */
ALWAYS_INLINE ahead_t sum_exp_ahead(int64_t cols, int64_t size) {
  const int64_t chunk = cols < SUM_EXP_COLS ? cols : SUM_EXP_COLS;
  return row_ahead(chunk, chunk, size);
}

/* The largest of 32 lanes, in pairs. No lane is NaN. gcc makes scalar code of a loop that it
 * unrolls completely. */
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

/* Sums POWER_LANES lanes in a fixed tree. */
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
