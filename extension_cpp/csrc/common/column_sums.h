/* Sums over the rows of a matrix, beside a pass that writes a result of its size: the gradients of
 * an input and of its bias. How the CPU cuts the matrix: into items, parts of the rows times tiles
 * of COLUMN_TILE columns. The shape alone fixes them. */
#ifndef EXTENSION_CPP_COLUMN_SUMS_H
#define EXTENSION_CPP_COLUMN_SUMS_H

#include "common/range.h"

enum { COLUMN_TILE = 2048, COLUMN_FLUSH_ROWS = 64 };

static inline int64_t column_sums_tiles(int64_t cols) { return ceil_div(cols, COLUMN_TILE); }

/* At most 256 items if there are many rows, and at least 64 rows per part. */
static inline int64_t column_sums_part_rows(int64_t rows, int64_t cols) {
  const int64_t parts = ceil_div(256, column_sums_tiles(cols));
  return 64 * ceil_div(ceil_div(rows, parts), 64);
}

static inline int64_t column_sums_parts(int64_t rows, int64_t cols) {
  return rows == 0 ? 0 : ceil_div(rows, column_sums_part_rows(rows, cols));
}

/* Doubles of scratch. */
static inline int64_t column_sums_partial_cpu(int64_t rows, int64_t cols) {
  return column_sums_parts(rows, cols) * column_sums_tiles(cols) * COLUMN_TILE;
}

#ifdef __cplusplus
extern "C"
#endif
    int64_t
    column_sums_partial_cuda(int64_t rows, int64_t cols);

#endif
