/* Compiled once per element type by scale_bias_relu_cpu.c (common/for_each_dtype.h defines T, ACC,
 * NAME, LOAD and STORE). */

/* n elements from flat index i on. They lie in one row, from column c on. */
ALWAYS_INLINE void NAME(forward_block)(const scale_bias_relu_forward_args *args, int64_t i,
                                       int64_t c, int n, int stream) {
  const ACC scale = (ACC)args->scale;
  ACC x[BLOCK], bias[BLOCK];
  READ(x, (const T *)args->x + i, n);
  LOAD(bias, (const T *)args->bias + c, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = FMA(x[k], scale, bias[k]);
  for (int k = 0; k < BLOCK; ++k) x[k] = x[k] < 0 ? 0 : x[k];
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(scale_bias_relu_forward)(const scale_bias_relu_forward_args *args, int64_t begin,
                                          int64_t end) {
  const int64_t cols = args->cols;
  const int stream = cpu_should_stream(2 * args->rows * cols * (int64_t)sizeof(T));
  for (int64_t i = begin, c = begin % cols; i < end; c = 0) {
    const int64_t row_end = i + (cols - c) < end ? i + (cols - c) : end;
    /* A row of odd width may begin anywhere. The elements before the next multiple of 64 bytes are
     * stored apart, so that the rest can be streamed. */
    const int64_t head = (int64_t)((64 - (uintptr_t)((T *)args->y + i) % 64) % 64 / sizeof(T));
    if (stream && head > 0 && head < row_end - i) {
      NAME(forward_block)(args, i, c, (int)head, 0);
      i += head;
      c += head;
    }
    const int64_t blocks_end = row_end - (row_end - i) % BLOCK;
    if (stream && (uintptr_t)((T *)args->y + i) % 64 == 0) {
      for (; i < blocks_end; i += BLOCK, c += BLOCK) NAME(forward_block)(args, i, c, BLOCK, 1);
    } else {
      for (; i < blocks_end; i += BLOCK, c += BLOCK) NAME(forward_block)(args, i, c, BLOCK, 0);
    }
    if (i < row_end) NAME(forward_block)(args, i, c, (int)(row_end - i), 0);
    i = row_end;
  }
  if (stream) stream_fence();
}

/* What a backward item keeps for its tile of columns, in block order. */
typedef struct {
  ACC bias[TILE];
  ACC sums[TILE];
} NAME(tile_t);

/* n elements from flat index i on, from the tile's column t on. */
ALWAYS_INLINE void NAME(backward_block)(const scale_bias_relu_backward_args *args,
                                        NAME(tile_t) *restrict tile, int64_t i, int64_t t, int n,
                                        int want_x, int want_bias, int stream) {
  const ACC scale = (ACC)args->scale;
  ACC x[BLOCK], g[BLOCK];
  READ(x, (const T *)args->x + i, n);
  READ(g, (const T *)args->grad_out + i, n);
  for (int k = 0; k < BLOCK; ++k) g[k] = FMA(x[k], scale, tile->bias[t + k]) <= 0 ? 0 : g[k];
  if (want_bias) {
    for (int k = 0; k < BLOCK; ++k) tile->sums[t + k] += g[k];
  }
  if (want_x) {
    for (int k = 0; k < BLOCK; ++k) g[k] *= scale;
    STORE((T *)args->grad_x + i, g, n, stream);
  }
}

/* `width` elements of one row. */
ALWAYS_INLINE void NAME(backward_row)(const scale_bias_relu_backward_args *args,
                                      NAME(tile_t) *restrict tile, int64_t i, int64_t width,
                                      int want_x, int want_bias, int stream) {
  const int64_t blocks_end = width / BLOCK * BLOCK;
  if (stream && (uintptr_t)((T *)args->grad_x + i) % 64 == 0) {
    for (int64_t t = 0; t < blocks_end; t += BLOCK)
      NAME(backward_block)(args, tile, i + t, t, BLOCK, want_x, want_bias, 1);
  } else {
    for (int64_t t = 0; t < blocks_end; t += BLOCK)
      NAME(backward_block)(args, tile, i + t, t, BLOCK, want_x, want_bias, 0);
  }
  if (blocks_end < width) {
    NAME(backward_block)
    (args, tile, i + blocks_end, blocks_end, (int)(width - blocks_end), want_x, want_bias, 0);
  }
}

static void NAME(scale_bias_relu_backward)(const scale_bias_relu_backward_args *args,
                                           int64_t item) {
  const int64_t tiles = scale_bias_relu_tiles(args->cols),
                part_rows = scale_bias_relu_part_rows(args->rows, args->cols);
  const int64_t column = item % tiles * TILE, first = item / tiles * part_rows;
  const int64_t width = args->cols - column < TILE ? args->cols - column : TILE;
  const int64_t last = first + part_rows < args->rows ? first + part_rows : args->rows;
  const int stream =
      args->grad_x && cpu_should_stream(3 * args->rows * args->cols * (int64_t)sizeof(T));
  double *restrict partial = args->grad_bias ? args->partial + item * TILE : NULL;
  NAME(tile_t) tile;
  for (int64_t t = 0; t < width; t += BLOCK) {
    LOAD(tile.bias + t, (const T *)args->bias + column + t,
         width - t < BLOCK ? (int)(width - t) : BLOCK);
  }
  for (int64_t t = 0; args->grad_bias && t < TILE; ++t) partial[t] = 0;
  for (int64_t r = first; r < last;) {
    const int64_t flush = r + FLUSH_ROWS < last ? r + FLUSH_ROWS : last;
    memset(tile.sums, 0, sizeof tile.sums);
    for (; r < flush; ++r) {
      const int64_t i = r * args->cols + column;
      if (!args->grad_bias)
        NAME(backward_row)(args, &tile, i, width, 1, 0, stream);
      else if (!args->grad_x)
        NAME(backward_row)(args, &tile, i, width, 0, 1, 0);
      else
        NAME(backward_row)(args, &tile, i, width, 1, 1, stream);
    }
    for (int64_t t = 0; args->grad_bias && t < TILE; ++t) partial[t] += (double)tile.sums[t];
  }
  if (stream) stream_fence();
}

static void NAME(scale_bias_relu_grad_bias)(const scale_bias_relu_backward_args *args,
                                            int64_t tile) {
  const int64_t tiles = scale_bias_relu_tiles(args->cols),
                parts = scale_bias_relu_parts(args->rows, args->cols);
  const int64_t column = tile * TILE,
                width = args->cols - column < TILE ? args->cols - column : TILE;
  double sums[TILE] = {0};
  for (int64_t part = 0; part < parts; ++part) {
    const double *partial = args->partial + (part * tiles + tile) * TILE;
    for (int64_t t = 0; t < TILE; ++t) sums[t] += partial[t];
  }
  for (int64_t t = 0; t < width; t += BLOCK) {
    ACC total[BLOCK];
    for (int k = 0; k < BLOCK; ++k) total[k] = (ACC)sums[t + k];
    STORE((T *)args->grad_bias + column + t, total, width - t < BLOCK ? (int)(width - t) : BLOCK,
          0);
  }
}
