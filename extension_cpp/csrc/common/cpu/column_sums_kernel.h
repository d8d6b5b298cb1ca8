/* Backward kernel of ops with a bias over the last dimension. One pass over the rows of x and
 * grad_out writes grad_x and sums over the rows into grad_bias. for_each_dtype.h compiles this file
 * once per element type and defines T, ACC, NAME, LOAD and STORE. The file that includes it first
 * defines COLUMN_SUMS_ARGS, the struct of arguments, and two functions:
 *   ACC NAME(column_term)(args, kind, x, grad_out, bias)   the term that is summed
 *   ACC NAME(column_value)(args, kind, term)               the element of grad_x
 * `kind` is passed through to both functions. It is a constant if the op has several variants.
 *
 * A work item is a range of rows within one tile of columns (common/column_sums.h). The bias and
 * the running sums of a tile fit into the L1 cache. Each lane sums at most COLUMN_FLUSH_ROWS rows
 * before its sum is added to a double. The doubles of the row ranges are added in order. */
/* The bias and the running sums of a tile of columns, in block order (common/cpu/block.h). */
typedef struct {
  ACC bias[COLUMN_TILE];
  ACC sums[COLUMN_TILE];
} NAME(column_tile_t);

/* Processes n elements of one row. The first has flat index i and column t within the tile. */
ALWAYS_INLINE void NAME(column_block)(const COLUMN_SUMS_ARGS *args, int kind,
                                      NAME(column_tile_t) *restrict tile, int64_t i, int64_t t,
                                      int n, int want_x, int want_bias, int stream) {
  ACC x[BLOCK], g[BLOCK];
  READ(x, (const T *)args->x + i, n);
  READ(g, (const T *)args->grad_out + i, n);
  for (int k = 0; k < BLOCK; ++k)
    g[k] = NAME(column_term)(args, kind, x[k], g[k], tile->bias[t + k]);
  if (want_bias) {
    for (int k = 0; k < BLOCK; ++k) tile->sums[t + k] += g[k];
  }
  if (want_x) {
    for (int k = 0; k < BLOCK; ++k) g[k] = NAME(column_value)(args, kind, g[k]);
    STORE((T *)args->grad_x + i, g, n, stream);
  }
}

/* Processes the `width` elements of one row that belong to the tile. */
ALWAYS_INLINE void NAME(column_row)(const COLUMN_SUMS_ARGS *args, int kind,
                                    NAME(column_tile_t) *restrict tile, int64_t i, int64_t width,
                                    int want_x, int want_bias, int stream) {
  const int aligned = stream && (uintptr_t)((T *)args->grad_x + i) % 64 == 0;
  int64_t t = 0;
  for (; t + BLOCK <= width; t += BLOCK)
    NAME(column_block)(args, kind, tile, i + t, t, BLOCK, want_x, want_bias, aligned);
  if (t < width)
    NAME(column_block)(args, kind, tile, i + t, t, (int)(width - t), want_x, want_bias, 0);
}

ALWAYS_INLINE void NAME(column_sums)(const COLUMN_SUMS_ARGS *args, int kind, int64_t item) {
  const int64_t tiles = column_sums_tiles(args->cols),
                part_rows = column_sums_part_rows(args->rows, args->cols);
  const int64_t column = item % tiles * COLUMN_TILE, first = item / tiles * part_rows;
  const int64_t width = args->cols - column < COLUMN_TILE ? args->cols - column : COLUMN_TILE;
  const int64_t last = first + part_rows < args->rows ? first + part_rows : args->rows;
  const int stream =
      args->grad_x && cpu_should_stream(3 * args->rows * args->cols * (int64_t)sizeof(T));
  double *restrict partial = args->grad_bias ? args->partial + item * COLUMN_TILE : NULL;
  const int want_x = args->grad_x != NULL, want_bias = args->grad_bias != NULL;
  NAME(column_tile_t) tile;
  for (int64_t t = 0; t < width; t += BLOCK) {
    LOAD(tile.bias + t, (const T *)args->bias + column + t,
         width - t < BLOCK ? (int)(width - t) : BLOCK);
  }
  for (int64_t t = 0; args->grad_bias && t < COLUMN_TILE; ++t) partial[t] = 0;
  for (int64_t r = first; r < last;) {
    const int64_t flush = r + COLUMN_FLUSH_ROWS < last ? r + COLUMN_FLUSH_ROWS : last;
    memset(tile.sums, 0, sizeof tile.sums);
    for (; r < flush; ++r) NAME(column_row)
    (args, kind, &tile, r * args->cols + column, width, want_x, want_bias, stream);
    for (int64_t t = 0; args->grad_bias && t < COLUMN_TILE; ++t) partial[t] += (double)tile.sums[t];
  }
  if (stream) stream_fence();
}

static void NAME(column_sums_total)(const COLUMN_SUMS_ARGS *args, int64_t tile) {
  const int64_t tiles = column_sums_tiles(args->cols),
                parts = column_sums_parts(args->rows, args->cols);
  const int64_t column = tile * COLUMN_TILE,
                width = args->cols - column < COLUMN_TILE ? args->cols - column : COLUMN_TILE;
  double sums[COLUMN_TILE] = {0};
  for (int64_t part = 0; part < parts; ++part) {
    const double *partial = args->partial + (part * tiles + tile) * COLUMN_TILE;
    for (int64_t t = 0; t < COLUMN_TILE; ++t) sums[t] += partial[t];
  }
  for (int64_t t = 0; t < width; t += BLOCK) {
    ACC total[BLOCK];
    for (int k = 0; k < BLOCK; ++k) total[k] = (ACC)sums[t + k];
    STORE((T *)args->grad_bias + column + t, total, width - t < BLOCK ? (int)(width - t) : BLOCK,
          0);
  }
}
