/* How the backward pass of ops with a bias over the last dimension is divided into work items. The
 * pass writes grad_x, a matrix, and sums its rows into grad_bias. On the CPU a work item is a range
 * of rows (a "part") within one tile of COLUMN_TILE columns. The division depends only on the
 * shape, never on the number of threads. */
#ifndef EXTENSION_CPP_COLUMN_SUMS_H
#define EXTENSION_CPP_COLUMN_SUMS_H

#include "common/range.h"

enum { COLUMN_TILE = 2048, COLUMN_FLUSH_ROWS = 64 };

static inline int64_t column_sums_tiles(int64_t cols) { return ceil_div(cols, COLUMN_TILE); }

/* Returns the number of rows in a part. The number is a multiple of 64, and gives about 256 work
 * items for a matrix of many rows. */
static inline int64_t column_sums_part_rows(int64_t rows, int64_t cols) {
  const int64_t parts = ceil_div(256, column_sums_tiles(cols));
  return 64 * ceil_div(ceil_div(rows, parts), 64);
}

static inline int64_t column_sums_parts(int64_t rows, int64_t cols) {
  return rows == 0 ? 0 : ceil_div(rows, column_sums_part_rows(rows, cols));
}

/* Returns how many doubles of scratch memory the CPU kernels need for partial sums. */
static inline int64_t column_sums_partial_cpu(int64_t rows, int64_t cols) {
  return column_sums_parts(rows, cols) * column_sums_tiles(cols) * COLUMN_TILE;
}

#ifdef __cplusplus
extern "C"
#endif
    int64_t
    column_sums_partial_cuda(int64_t rows, int64_t cols);

#endif
