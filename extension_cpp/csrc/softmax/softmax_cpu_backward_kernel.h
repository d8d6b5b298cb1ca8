/* Backward of softmax and log_softmax. softmax_cpu_kernel.h includes this file at its end. */

/* Adds grad_out * y to `sum`. For log_softmax it adds grad_out alone. */
ALWAYS_INLINE void NAME(product_block)(ACC *restrict sum, const T *grad_out, const T *y, int n,
                                       int is_log) {
  ACC g[BLOCK], v[BLOCK];
  LOAD(g, grad_out, n);
  if (!is_log) LOAD(v, y, n);
  if (is_log) {
    for (int k = 0; k < BLOCK; ++k) sum[k] += g[k];
  } else {
    for (int k = 0; k < BLOCK; ++k) sum[k] = FMA(g[k], v[k], sum[k]);
  }
}

/* Does the same as product_block() for the last n elements of a row. `whole` says that the row has
 * at least BLOCK elements up to its end, so that one full load suffices. */
ALWAYS_INLINE void NAME(product_last)(ACC *restrict sum, const T *grad_out, const T *y, int n,
                                      int whole, int is_log) {
  ACC product[BLOCK] = {0};
  if (!whole) {
    NAME(product_block)(sum, grad_out, y, n, is_log);
    return;
  }
  NAME(product_block)(product, grad_out + n - BLOCK, y + n - BLOCK, BLOCK, is_log);
  for (int k = 0; k < BLOCK; ++k) sum[k] += NAME(column)(k) >= BLOCK - n ? product[k] : 0;
}

/* ---- rows ---- */

ALWAYS_INLINE double NAME(product_row)(const T *grad_out, const T *y, int64_t cols, int is_log) {
  double total = 0;
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < SUM_EXP_COLS ? cols : c + SUM_EXP_COLS;
    ACC sum[BLOCK] = {0};
    for (; c + BLOCK <= end; c += BLOCK)
      NAME(product_block)(sum, grad_out + c, y + c, BLOCK, is_log);
    if (c < end) NAME(product_last)(sum, grad_out + c, y + c, (int)(end - c), end >= BLOCK, is_log);
    total += FOLD(sum);
    c = end;
  }
  return total;
}

ALWAYS_INLINE void NAME(gradient_block)(const T *grad_out, const T *y, T *grad_x, ACC sum,
                                        ahead_t ahead, int n, int is_log, int stream) {
  ACC g[BLOCK], v[BLOCK];
  prefetch_later(grad_out, BLOCK * sizeof(T), ahead);
  prefetch_later(y, BLOCK * sizeof(T), ahead);
  LOAD(g, grad_out, n);
  LOAD(v, y, n);
  for (int k = 0; k < BLOCK; ++k) g[k] = SOFTMAX_GRADIENT(g[k], v[k], sum, is_log);
  STORE(grad_x, g, n, stream);
}

NOINLINE void NAME(gradient_part)(const T *grad_out, const T *y, T *grad_x, ACC sum, int n,
                                  int is_log) {
  const ahead_t none = {0};
  NAME(gradient_block)(grad_out, y, grad_x, sum, none, n, is_log, 0);
}

ALWAYS_INLINE void NAME(gradient_row)(const T *grad_out, const T *y, T *grad_x, int64_t cols,
                                      ahead_t ahead, int is_log, int stream) {
  const row_span_t span =
      row_span(grad_x, cols, sizeof(T), stream, grad_x == grad_out || grad_x == y);
  const ACC sum = (ACC)NAME(product_row)(grad_out, y, cols, is_log);
  int64_t c = span.begin;
  if (c > 0) {
    const int64_t h = span.head;
    NAME(gradient_part)(grad_out, y, grad_x, sum, BLOCK, is_log);
    NAME(gradient_part)(grad_out + h, y + h, grad_x + h, sum, BLOCK, is_log);
  }
  for (; c + BLOCK <= cols; c += BLOCK) {
    NAME(gradient_block)
    (grad_out + c, y + c, grad_x + c, sum, ahead, BLOCK, is_log, c < span.end);
  }
  if (c == cols) return;
  if (!span.partial) c = cols - BLOCK;
  NAME(gradient_part)(grad_out + c, y + c, grad_x + c, sum, (int)(cols - c), is_log);
}

ALWAYS_INLINE void NAME(gradient_rows)(const softmax_backward_args *args, int64_t begin,
                                       int64_t end, int is_log, int stream) {
  const int64_t cols = args->cols;
  const ahead_t ahead = row_ahead(cols, cols, sizeof(T));
  for (int64_t r = begin; r < end; ++r) NAME(gradient_row)
  ((const T *)args->grad_out + r * cols, (const T *)args->y + r * cols,
   (T *)args->grad_x + r * cols, cols, ahead, is_log, stream);
}

/* ---- tiles ---- */

/* Computes n inner elements over all columns. */
ALWAYS_INLINE void NAME(gradient_tile_block)(const T *grad_out, const T *y, T *grad_x, int64_t cols,
                                             int64_t inner, int n, int is_log, int stream) {
  double total[BLOCK] = {0};
  ACC sum[BLOCK], g[BLOCK], v[BLOCK];
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < SUM_EXP_TILE_COLS ? cols : c + SUM_EXP_TILE_COLS;
    for (int k = 0; k < BLOCK; ++k) sum[k] = 0;
    for (; c < end; ++c) NAME(product_block)(sum, grad_out + c * inner, y + c * inner, n, is_log);
    for (int k = 0; k < BLOCK; ++k) total[k] += (double)sum[k];
  }
  for (int k = 0; k < BLOCK; ++k) sum[k] = (ACC)total[k];
  for (int64_t i = 0; i < cols * inner; i += inner) {
    LOAD(g, grad_out + i, n);
    LOAD(v, y + i, n);
    for (int k = 0; k < BLOCK; ++k) g[k] = SOFTMAX_GRADIENT(g[k], v[k], sum[k], is_log);
    STORE(grad_x + i, g, n, stream);
  }
}

ALWAYS_INLINE void NAME(gradient_tile)(const T *grad_out, const T *y, T *grad_x, int64_t cols,
                                       int64_t inner, int width, int is_log, int stream) {
  for (int k = 0; k < width; k += BLOCK) {
    const int n = width - k < BLOCK ? width - k : BLOCK;
    const int aligned = stream && (uintptr_t)(grad_x + k) % 64 == 0;
    NAME(gradient_tile_block)
    (grad_out + k, y + k, grad_x + k, cols, inner, n, is_log, aligned);
  }
}

NOINLINE void NAME(gradient_tiles)(const softmax_backward_args *args, int64_t begin, int64_t end,
                                   int stream) {
  const int streams_columns = stream && args->inner * (int64_t)sizeof(T) % 64 == 0;
  for (int64_t item = begin; item < end; ++item) {
    int width;
    const int64_t i = NAME(tile_begin)(item, args->cols, args->inner, &width);
    const T *grad_out = (const T *)args->grad_out + i, *y = (const T *)args->y + i;
    T *grad_x = (T *)args->grad_x + i;
    if (args->is_log) {
      NAME(gradient_tile)(grad_out, y, grad_x, args->cols, args->inner, width, 1, streams_columns);
    } else {
      NAME(gradient_tile)(grad_out, y, grad_x, args->cols, args->inner, width, 0, streams_columns);
    }
  }
}

static void NAME(softmax_backward)(const softmax_backward_args *args, int64_t begin, int64_t end) {
  const int64_t bytes = 3 * args->outer * args->cols * args->inner * (int64_t)sizeof(T);
  const int stream = streams(bytes, args->grad_x, args->grad_out, args->y);
  if (args->inner > 1) {
    NAME(gradient_tiles)(args, begin, end, stream);
  } else if (args->is_log) {
    NAME(gradient_rows)(args, begin, end, 1, stream);
  } else {
    NAME(gradient_rows)(args, begin, end, 0, stream);
  }
  if (stream) stream_fence();
}
