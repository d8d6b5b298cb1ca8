/* What common/cpu_sum_exp_kernel.h needs once, before it is compiled per element type. */
#ifndef EXTENSION_CPP_CPU_SUM_EXP_H
#define EXTENSION_CPP_CPU_SUM_EXP_H

#include "common/cpu_block.h"
#include "common/cpu_math.h"
#include "common/cpu_row.h"

enum {
  SUM_EXP_COLS = 2048,    /* columns of a row between two flushes to double */
  SUM_EXP_TILE = 128,     /* inner elements of a tile */
  SUM_EXP_TILE_COLS = 32, /* columns of a tile between two flushes to double */
};

/* Flags of a kernel: SOFTCAP: z is capped. ENTROPY: also sums exp(z - max) * (z - max). SMOOTH: the
 * gradient has the term of label smoothing. TARGET: the block may have the target's column.
 * CALLS: takes a function call for every block, where little code matters more than speed. */
enum { SOFTCAP = 1, ENTROPY = 2, SMOOTH = 4, TARGET = 8, CALLS = 16 };

/* The largest of 32 lanes, in pairs. No lane is NaN. */
#define DEFINE_FOLD_MAX(type)                                                         \
  ALWAYS_INLINE type fold_max_##type(const type *lane) {                              \
    type max[16];                                                                     \
    _Pragma("GCC unroll 1") for (int k = 0; k < 16; ++k) max[k] =                     \
        lane[k] > lane[k + 16] ? lane[k] : lane[k + 16];                              \
    for (int n = 8; n > 0; n /= 2) {                                                  \
      for (int k = 0; k < n; ++k) max[k] = max[k] > max[k + n] ? max[k] : max[k + n]; \
    }                                                                                 \
    return max[0];                                                                    \
  }
DEFINE_FOLD_MAX(float)
DEFINE_FOLD_MAX(double)
#define FOLD_MAX(lane) _Generic((lane)[0], float : fold_max_float, double : fold_max_double)(lane)

#endif
