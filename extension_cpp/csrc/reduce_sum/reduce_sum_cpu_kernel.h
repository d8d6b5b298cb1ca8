/* CPU kernels of reduce_sum. reduce_sum_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

/* Loads one row of a block, and prefetches the row `ahead` bytes later. */
ALWAYS_INLINE void NAME(load_row)(ACC *restrict row, const T *restrict p, int64_t ahead) {
  prefetch(p, ahead, BLOCK * (int64_t)sizeof(T));
  LOAD(row, p, BLOCK);
}

ALWAYS_INLINE void NAME(add_eight_rows)(double *restrict total, const T *restrict p, int64_t stride,
                                        int64_t ahead) {
  ACC sum[BLOCK], row[BLOCK];
  NAME(load_row)(sum, p, ahead);
  for (int r = 1; r < SUM_ROWS; ++r) {
    NAME(load_row)(row, p + r * stride, ahead);
    for (int k = 0; k < BLOCK; ++k) sum[k] += row[k];
  }
  for (int k = 0; k < BLOCK; ++k) total[k] += (double)sum[k];
}

ALWAYS_INLINE void NAME(add_row)(double *restrict total, const T *restrict p) {
  ACC row[BLOCK];
  LOAD(row, p, BLOCK);
  for (int k = 0; k < BLOCK; ++k) total[k] += (double)row[k];
}

/* Sets total (blocks, BLOCK): total[b][k] is the sum over the rows for lane k of block b. Rows are
 * `stride` elements apart. The next eight rows are prefetched, at least 4 KiB ahead. Without this
 * prefetch, bfloat16 tensors are read a fifth slower. */
ALWAYS_INLINE void NAME(sum_blocks)(double *restrict total, const T *p, int64_t rows,
                                    int64_t stride, int64_t width) {
  const int64_t blocks = ceil_div(width, BLOCK);
  const int64_t eight_rows = SUM_ROWS * stride * (int64_t)sizeof(T),
                ahead = eight_rows < 4096 ? 4096 : eight_rows;
  for (int64_t i = 0; i < blocks * BLOCK; ++i) total[i] = 0;
  int64_t r = 0;
  for (; r + SUM_ROWS <= rows; r += SUM_ROWS, p += SUM_ROWS * stride) {
    for (int64_t b = 0; b < blocks; ++b) {
      NAME(add_eight_rows)(total + b * BLOCK, p + block_begin(b, width), stride, ahead);
    }
  }
  for (; r < rows; ++r, p += stride) {
    for (int64_t b = 0; b < blocks; ++b)
      NAME(add_row)(total + b * BLOCK, p + block_begin(b, width));
  }
}

/* Reorders a block's totals from the order of the lanes to the order in memory. */
ALWAYS_INLINE void NAME(order_block)(double *total) {
  double lane[BLOCK];
  if (NAME(column)(1) == 1) return;
  for (int k = 0; k < BLOCK; ++k) lane[k] = total[k];
  for (int k = 0; k < BLOCK; ++k) total[NAME(column)(k)] = lane[k];
}

/* Sums a contiguous span shorter than two blocks. All lanes are double. */
ALWAYS_INLINE double NAME(sum_short)(const T *p, int64_t n) {
  double lane[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int k = 0; k < 8; ++k) lane[k] += NAME(widen)(p[i + k]);
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] += NAME(widen)(p[i]);
  for (int k = 0; k < 4; ++k) lane[k] += lane[k + 4];
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

/* Sums a contiguous span. The span is treated as a matrix with rows of one block each. */
static double NAME(sum_long)(const T *p, int64_t n) {
  double total[BLOCK];
  NAME(sum_blocks)(total, p, n / BLOCK, BLOCK, BLOCK);
  int64_t i = n / BLOCK * BLOCK;
  for (int j = 0; i + 8 <= n; i += 8, j += 8) {
    for (int k = 0; k < 8; ++k) total[j + k] += NAME(widen)(p[i + k]);
  }
  for (int k = 0; i < n; ++i, ++k) total[k] += NAME(widen)(p[i]);
  for (int k = 0; k < 16; ++k) total[k] += total[k + 16];
  for (int k = 0; k < 8; ++k) total[k] += total[k + 8];
  for (int k = 0; k < 4; ++k) total[k] += total[k + 4];
  return (total[0] + total[2]) + (total[1] + total[3]);
}

/* Processes work items [begin, end) of a sum over contiguous spans. Sums are stored in batches. */
static void NAME(sum_spans)(const reduce_sum_args *args, int64_t begin, int64_t end) {
  double sums[64];
  int64_t o = begin / args->chunks, c = begin % args->chunks;
  for (int64_t item = begin; item < end;) {
    const int64_t batch = end - item < 64 ? end - item : 64;
    for (int64_t j = 0; j < batch; ++j) {
      const int64_t row = c * args->chunk, left = args->reduce - row,
                    n = left < args->chunk ? left : args->chunk;
      const T *p = (const T *)args->x + o * args->reduce + row;
      sums[j] = n < 2 * BLOCK ? NAME(sum_short)(p, n) : NAME(sum_long)(p, n);
      if (++c == args->chunks) {
        c = 0;
        ++o;
      }
    }
    store_sums(args, item, sums, batch);
    item += batch;
  }
}

/* Sums rows narrower than a block. Several rows are treated as one, and a tree adds up their
 * totals. */
static void NAME(sum_narrow)(const reduce_sum_args *args, const T *p, int64_t rows, int64_t out) {
  double total[BLOCK * BLOCK];
  const int64_t inner = args->inner, as_one = reduce_sum_rows_as_one(inner), width = as_one * inner;
  NAME(sum_blocks)(total, p, rows / as_one, width, width);
  for (int64_t b = 0; b < width / BLOCK; ++b) NAME(order_block)(total + b * BLOCK);
  const T *rest = p + rows / as_one * width;
  for (int64_t i = 0; i < rows % as_one * inner; ++i) total[i] += NAME(widen)(rest[i]);
  for (int64_t half = width / 2; half >= inner; half /= 2) {
    for (int64_t i = 0; i < half; ++i) total[i] += total[i + half];
  }
  store_sums(args, out, total, inner);
}

static void NAME(sum_tile)(const reduce_sum_args *args, const T *p, int64_t rows, int64_t width,
                           int64_t out) {
  double total[2 * SUM_TILE];
  NAME(sum_blocks)(total, p, rows, args->inner, width);
  for (int64_t b = 0; b < ceil_div(width, BLOCK); ++b) {
    NAME(order_block)(total + b * BLOCK);
    store_sums(args, out + block_begin(b, width), total + b * BLOCK, BLOCK);
  }
}

static void NAME(reduce_sum)(const reduce_sum_args *args, int64_t begin, int64_t end) {
  const int64_t inner = args->inner, tiles = reduce_sum_tiles(inner);
  if (inner == 0) return;
  int64_t tile = begin % tiles, c = begin / tiles % args->chunks, o = begin / tiles / args->chunks;
  if (inner == 1) {
    NAME(sum_spans)(args, begin, end);
    return;
  }
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = c * args->chunk,
                  rows = args->reduce - row < args->chunk ? args->reduce - row : args->chunk;
    const int64_t column = tile * SUM_TILE;
    const T *p = (const T *)args->x + (o * args->reduce + row) * inner + column;
    const int64_t out = (o * args->chunks + c) * inner + column;
    if (inner < BLOCK) {
      NAME(sum_narrow)(args, p, rows, out);
    } else {
      NAME(sum_tile)(args, p, rows, tile == tiles - 1 ? inner - column : SUM_TILE, out);
    }
    if (++tile < tiles) continue;
    tile = 0;
    if (++c < args->chunks) continue;
    c = 0;
    ++o;
  }
}
