/* CPU kernels of softmax and log_softmax. softmax_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */
#include "rows/cpu_sum_exp_kernel.h"

/* ---- the formulas; in tiles, max, last and sum differ from lane to lane ---- */

/* Computes y from x. `last` is 1 / sum for softmax, and log(sum) for log_softmax. */
#define SOFTMAX_VALUE(x, max, last, is_log) \
  ((is_log) ? ((x) - (max)) - (last) : NAME(exp_value)((x) - (max)) * (last))

/* Computes grad_x from grad_out. `sum` is the sum of grad_out * y (log_softmax: of grad_out). */
#define SOFTMAX_GRADIENT(grad_out, y, sum, is_log) \
  ((is_log) ? FMA(-NAME(exp_value)(y), sum, grad_out) : ((grad_out) - (sum)) * (y))

/* Returns the argument `last` of SOFTMAX_VALUE. */
ALWAYS_INLINE ACC NAME(softmax_last)(double sum, int is_log) {
  return (ACC)(is_log ? log(sum) : 1 / sum);
}

/* ---- forward, rows ---- */

ALWAYS_INLINE void NAME(softmax_block)(const T *x, T *y, ACC max, ACC last, ahead_t ahead, int n,
                                       int is_log, int stream) {
  ACC v[BLOCK];
  prefetch_later(x, BLOCK * sizeof(T), ahead);
  NAME(load_block)(v, x, n);
  for (int k = 0; k < BLOCK; ++k) v[k] = SOFTMAX_VALUE(v[k], max, last, is_log);
  STORE(y, v, n, stream);
}

NOINLINE void NAME(softmax_part)(const T *x, T *y, ACC max, ACC last, int n, int is_log) {
  const ahead_t none = {0};
  NAME(softmax_block)(x, y, max, last, none, n, is_log, 0);
}

ALWAYS_INLINE void NAME(softmax_row)(const T *x, T *y, int64_t cols, ahead_t ahead, int is_log,
                                     int stream) {
  const row_span_t span = row_span(y, cols, sizeof(T), stream, x == y);
  const NAME(map_t) map = {1, 0, 0};
  const NAME(sums_t) row = NAME(plain_sums)(x, cols, map);
  const ACC max = row.max, last = NAME(softmax_last)(row.sum, is_log);
  int64_t c = span.begin;
  if (c > 0) {
    NAME(softmax_part)(x, y, max, last, BLOCK, is_log);
    NAME(softmax_part)(x + span.head, y + span.head, max, last, BLOCK, is_log);
  }
  for (; c + BLOCK <= cols; c += BLOCK)
    NAME(softmax_block)(x + c, y + c, max, last, ahead, BLOCK, is_log, c < span.end);
  if (c == cols) return;
  if (!span.partial) c = cols - BLOCK;
  NAME(softmax_part)(x + c, y + c, max, last, (int)(cols - c), is_log);
}

/* Returns the index at which saved_exp() keeps the last block of a row of at least BLOCK columns.
 * This block overlaps the one before it. If blocks of the type are in memory order, it is kept at
 * its own columns. For bfloat16, it is kept after the other blocks. */
ALWAYS_INLINE int64_t NAME(saved_last)(int64_t cols) {
  return NAME(column)(1) == 1 ? cols - BLOCK : cols / BLOCK * BLOCK;
}

/* Computes exp(x - max) for a row of one chunk, keeps it for every column in block order, and
 * returns 1 / sum. The last block overlaps its neighbour if the row has more than one block. */
ALWAYS_INLINE ACC NAME(saved_exp)(ACC *restrict saved, const T *x, int64_t cols, ahead_t ahead) {
  const ACC max = NAME(chunk_max)(x, cols, cols >= BLOCK);
  ACC sum[BLOCK] = {0}, v[BLOCK];
  int64_t c = 0;
  for (; c + BLOCK <= cols; c += BLOCK) {
    prefetch_later(x + c, BLOCK * sizeof(T), ahead);
    LOAD(v, x + c, BLOCK);
    for (int k = 0; k < BLOCK; ++k) v[k] = NAME(exp_value)(v[k] - max);
    for (int k = 0; k < BLOCK; ++k) sum[k] += v[k];
    for (int k = 0; k < BLOCK; ++k) saved[c + k] = v[k];
  }
  if (c < cols) {
    const int n = (int)(cols - c), skipped = cols >= BLOCK ? BLOCK - n : 0;
    ACC *last = saved;
    if (skipped) {
      LOAD(v, x + cols - BLOCK, BLOCK);
      last += NAME(saved_last)(cols);
    } else {
      NAME(load_part)(v, x, n);
    }
    for (int k = 0; k < BLOCK; ++k) v[k] = NAME(exp_value)(v[k] - max);
    for (int k = 0; k < BLOCK; ++k) sum[k] += NAME(column)(k) >= skipped ? v[k] : 0;
    for (int k = 0; k < BLOCK; ++k) last[k] = v[k];
  }
  return (ACC)(1 / FOLD(sum));
}

NOINLINE void NAME(store_saved)(T *y, const ACC *saved, ACC factor, int n) {
  ACC v[BLOCK];
  for (int k = 0; k < BLOCK; ++k) v[k] = saved[k] * factor;
  STORE(y, v, n, 0);
}

ALWAYS_INLINE void NAME(saved_row)(const T *x, T *y, int64_t cols, ahead_t ahead, int stream) {
  ACC saved[SUM_EXP_COLS + BLOCK], v[BLOCK];
  const ACC factor = NAME(saved_exp)(saved, x, cols, ahead);
  /* For bfloat16, the blocks of y must begin at the same columns as the saved blocks. */
  const int fixed = NAME(column)(1) != 1 && (uintptr_t)y % 64 != 0;
  const row_span_t span = row_span(y, cols, sizeof(T), stream && !fixed, 0);
  int64_t c = span.begin;
  if (c > 0) {
    NAME(store_saved)(y, saved, factor, BLOCK);
    NAME(store_saved)(y + span.head, saved + span.head, factor, BLOCK);
  }
  for (; c + BLOCK <= cols; c += BLOCK) {
    for (int k = 0; k < BLOCK; ++k) v[k] = saved[c + k] * factor;
    STORE(y + c, v, BLOCK, c < span.end);
  }
  if (c == cols) return;
  if (cols >= BLOCK) {
    NAME(store_saved)(y + cols - BLOCK, saved + NAME(saved_last)(cols), factor, BLOCK);
  } else {
    NAME(store_saved)(y, saved, factor, (int)cols);
  }
}

ALWAYS_INLINE void NAME(softmax_rows)(const softmax_forward_args *args, int64_t begin, int64_t end,
                                      int is_log, int stream) {
  const int64_t cols = args->cols;
  const ahead_t ahead = row_ahead(cols, cols, sizeof(T));
  for (int64_t r = begin; r < end; ++r) {
    const T *x = (const T *)args->x + r * cols;
    T *y = (T *)args->y + r * cols;
    if (!is_log && cols <= SUM_EXP_COLS) {
      NAME(saved_row)(x, y, cols, ahead, stream);
    } else {
      NAME(softmax_row)(x, y, cols, ahead, is_log, stream);
    }
  }
}

/* ---- forward, tiles ---- */

ALWAYS_INLINE void NAME(softmax_tile_block)(const T *x, T *y, const ACC *restrict tile_max,
                                            const ACC *restrict tile_last, int64_t cols,
                                            int64_t inner, int n, int is_log, int stream) {
  ACC max[BLOCK], last[BLOCK];
  for (int k = 0; k < BLOCK; ++k) max[k] = tile_max[k];
  for (int k = 0; k < BLOCK; ++k) last[k] = tile_last[k];
  for (int64_t c = 0; c < cols; ++c) {
    ACC v[BLOCK];
    LOAD(v, x + c * inner, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = SOFTMAX_VALUE(v[k], max[k], last[k], is_log);
    STORE(y + c * inner, v, n, stream);
  }
}

ALWAYS_INLINE void NAME(softmax_tile)(const T *x, T *y, int64_t cols, int64_t inner, int width,
                                      int is_log, int stream) {
  const NAME(map_t) map = {1, 0, 0};
  NAME(tile_sums_t) tile;
  ACC last[SOFTMAX_TILE];
  NAME(tile_sums)(&tile, x, cols, inner, width, map, 0);
  for (int k = 0; k < SOFTMAX_TILE; ++k) last[k] = NAME(softmax_last)(tile.sum[k], is_log);
  for (int k = 0; k < width; k += BLOCK) {
    const int n = width - k < BLOCK ? width - k : BLOCK;
    const int aligned = stream && (uintptr_t)(y + k) % 64 == 0;
    NAME(softmax_tile_block)
    (x + k, y + k, tile.max + k, last + k, cols, inner, n, is_log, aligned);
  }
}

/* Returns the index of a work item's first element, and sets *width to the number of inner elements
 * in its tile. */
ALWAYS_INLINE int64_t NAME(tile_begin)(int64_t item, int64_t cols, int64_t inner, int *width) {
  const int64_t tiles = ceil_div(inner, SOFTMAX_TILE), i = item % tiles * SOFTMAX_TILE;
  *width = inner - i < SOFTMAX_TILE ? (int)(inner - i) : SOFTMAX_TILE;
  return item / tiles * cols * inner + i;
}

NOINLINE void NAME(softmax_tiles)(const softmax_forward_args *args, int64_t begin, int64_t end,
                                  int stream) {
  /* Non-temporal stores need every column of the tile to begin at a multiple of 64 bytes. */
  const int streams_columns = stream && args->inner * (int64_t)sizeof(T) % 64 == 0;
  for (int64_t item = begin; item < end; ++item) {
    int width;
    const int64_t i = NAME(tile_begin)(item, args->cols, args->inner, &width);
    if (args->is_log) {
      NAME(softmax_tile)
      ((const T *)args->x + i, (T *)args->y + i, args->cols, args->inner, width, 1,
       streams_columns);
    } else {
      NAME(softmax_tile)
      ((const T *)args->x + i, (T *)args->y + i, args->cols, args->inner, width, 0,
       streams_columns);
    }
  }
}

static void NAME(softmax_forward)(const softmax_forward_args *args, int64_t begin, int64_t end) {
  const int64_t bytes = 2 * args->outer * args->cols * args->inner * (int64_t)sizeof(T);
  const int stream = streams(bytes, args->y, args->x, args->x);
  if (args->inner > 1) {
    NAME(softmax_tiles)(args, begin, end, stream);
  } else if (args->is_log) {
    NAME(softmax_rows)(args, begin, end, 1, stream);
  } else {
    NAME(softmax_rows)(args, begin, end, 0, stream);
  }
  if (stream) stream_fence();
}

#include "softmax/softmax_cpu_backward_kernel.h"
