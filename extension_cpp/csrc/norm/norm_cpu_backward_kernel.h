/* Backward of layer_norm and rms_norm: the part of norm_cpu_kernel.h that is not forward. */

/* One part of the rows. Passed by value: an object whose address a call has seen is reloaded after
 * every store. */
typedef struct {
  const norm_backward_args *args;
  /* The sums over rows: in double, and in ACC those of the last FLUSH_ROWS rows. NULL: not
   * needed. */
  double *weight, *bias;
  ACC *weight_rows, *bias_rows;
  int needs, stream;
} NAME(part_t);

typedef struct {
  const T *x, *grad_out, *grad_sum;
  T *grad_x, *grad_dropped;
  ahead_t x_ahead, grad_ahead;
  NAME(row_t) statistics;
  ACC slope, level;       /* see NAME(grad_x) */
  int64_t first;          /* index of the row's first element */
  cpu_dropout_t *dropout; /* makes the row's mask */
} NAME(grad_row_t);

ALWAYS_INLINE NAME(grad_row_t) NAME(grad_row)(NAME(part_t) part, int64_t r) {
  const norm_backward_args *args = part.args;
  return (NAME(grad_row_t)){
      .x = (const T *)args->x + r * args->x_stride,
      .grad_out = (const T *)args->grad_out + r * args->grad_out_stride,
      .grad_sum = args->grad_sum ? (const T *)args->grad_sum + r * args->grad_sum_stride : NULL,
      .grad_x = args->grad_x ? (T *)args->grad_x + r * args->cols : NULL,
      .grad_dropped = args->grad_dropped ? (T *)args->grad_dropped + r * args->cols : NULL,
      .x_ahead = row_ahead(args->x_stride, args->cols, sizeof(T), 2),
      .grad_ahead = row_ahead(args->grad_out_stride, args->cols, sizeof(T), 2),
      .statistics.mean = part.needs & CENTERED ? ((const ACC *)args->mean)[r] : 0,
      .statistics.rstd = ((const ACC *)args->rstd)[r],
      .first = r * args->cols,
  };
}

/* Gives rows a and b (b may be a) the state that makes their masks: one for both if it can hold two
 * rows, else one each. */
ALWAYS_INLINE void NAME(set_dropout)(const fused_t *fused, NAME(grad_row_t) * a,
                                     NAME(grad_row_t) * b, int64_t cols) {
  if (!fused || !fused->dropout) return;
  a->dropout = b->dropout = fused->dropout;
  const int64_t end = b->first + cols, numel = end - a->first + BLOCK;
  if (numel <= MADE_AT_ONCE - 63) {
    a->dropout->until = fused->end;
    cpu_dropout_hold(a->dropout, a->first, numel);
  } else {
    a->dropout->until = a->first + cols;
    if (b != a) b->dropout = fused->dropout + 1, b->dropout->until = end;
  }
}

/* ---- one row, n columns from column c on ---- */

/* Epilogue of backward: adds grad_sum to grad_x, stores it, and stores grad_dropped. */
ALWAYS_INLINE void NAME(backward_epilogue)(ACC *restrict grad_x, const NAME(grad_row_t) * row,
                                           const fused_t *fused, int64_t c, int n, int stream) {
  if (fused && row->grad_sum) {
    ACC grad_sum[BLOCK];
    prefetch_later(row->grad_sum + c, BLOCK * sizeof(T), fused->grad_sum_ahead);
    NAME(load_block)(grad_sum, row->grad_sum + c, n);
    for (int k = 0; k < BLOCK; ++k) grad_x[k] += grad_sum[k];
  }
  STORE(row->grad_x + c, grad_x, n, stream);
  if (fused && row->grad_dropped) {
    NAME(dropout_block)(grad_x, row->dropout, row->first + c);
    STORE(row->grad_dropped + c, grad_x, n, stream);
  }
}

/* xhat, and grad_out after the prologue: from the gradient of dropout_y(y) to the gradient of y. */
ALWAYS_INLINE void NAME(load_columns)(ACC *restrict xhat, ACC *restrict grad_out,
                                      const NAME(grad_row_t) * row, const fused_t *fused, int64_t c,
                                      int n, int centered) {
  NAME(load_block)(xhat, row->x + c, n);
  NAME(load_block)(grad_out, row->grad_out + c, n);
  if (fused && fused->drops_y) NAME(dropout_block)(grad_out, row->dropout, row->first + c);
  NAME(normalise)(xhat, row->statistics, centered, 0);
}

/* First pass: the sums that grad_x needs. */
ALWAYS_INLINE void NAME(first_pass)(ACC *restrict products, ACC *restrict sum,
                                    const NAME(grad_row_t) * row, const fused_t *fused,
                                    const ACC *restrict weight, int64_t c, int n, int centered,
                                    int prefetches) {
  ACC xhat[BLOCK], g[BLOCK];
  if (prefetches) {
    prefetch_output(row->grad_x + c, BLOCK * sizeof(T));
    if (fused && row->grad_dropped) prefetch_output(row->grad_dropped + c, BLOCK * sizeof(T));
  }
  NAME(load_columns)(xhat, g, row, fused, c, n, centered);
  NAME(grad_x_sums)(products, sum, g, xhat, weight, centered);
}

/* Second pass: adds to the sums over rows, and writes grad_x. */
ALWAYS_INLINE void NAME(second_pass)(const NAME(grad_row_t) * row, const fused_t *fused,
                                     const ACC *restrict weight, ACC *restrict grad_weight,
                                     ACC *restrict grad_bias, int64_t c, int n, int needs,
                                     int stream) {
  ACC xhat[BLOCK], g[BLOCK];
  prefetch_later(row->x + c, BLOCK * sizeof(T), row->x_ahead);
  prefetch_later(row->grad_out + c, BLOCK * sizeof(T), row->grad_ahead);
  NAME(load_columns)(xhat, g, row, fused, c, n, needs & CENTERED);
  NAME(grad_weight_sums)(grad_weight, grad_bias, g, xhat, needs);
  if (needs & GRAD_X) {
    NAME(grad_x)(g, xhat, weight, row->statistics.rstd, row->slope, row->level);
    NAME(backward_epilogue)(g, row, fused, c, n, stream);
  }
}

/* ---- row a, and row b unless it is NULL: they share the loads of the weights and the loads and
 * stores of the sums over rows ---- */

/* The first pass over all columns: sets slope and level. */
ALWAYS_INLINE void NAME(means_of)(NAME(part_t) part, const fused_t *fused, NAME(grad_row_t) * a,
                                  NAME(grad_row_t) * b, int centered) {
  const int64_t cols = part.args->cols;
  const ACC *weights = part.args->weight;
  const int prefetches = !part.stream && cols * (int64_t)sizeof(T) <= PREFETCHED_ROW;
  const wide_halves_t halves = NAME(wide_halves)(0, cols);
  double products[2] = {0}, sums[2] = {0};
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < FLUSH_COLS ? cols : c + FLUSH_COLS;
    ACC products_a[BLOCK] = {0}, products_b[BLOCK] = {0}, sum_a[BLOCK] = {0}, sum_b[BLOCK] = {0},
        weight[BLOCK];
    for (; c + BLOCK <= end; c += BLOCK) {
      NAME(load_wide)(weight, weights, halves, c);
      NAME(first_pass)(products_a, sum_a, a, fused, weight, c, BLOCK, centered, prefetches);
      if (b) NAME(first_pass)(products_b, sum_b, b, fused, weight, c, BLOCK, centered, prefetches);
    }
    const int n = (int)(end - c);
    if (n > 0) {
      NAME(load_wide)(weight, weights, halves, c);
      NAME(first_pass)(products_a, sum_a, a, fused, weight, c, n, centered, prefetches);
      if (b) NAME(first_pass)(products_b, sum_b, b, fused, weight, c, n, centered, prefetches);
    }
    products[0] += FOLD(products_a);
    if (b) products[1] += FOLD(products_b);
    if (centered) sums[0] += FOLD(sum_a);
    if (centered && b) sums[1] += FOLD(sum_b);
    c = end;
  }
  for (int k = 0; k < (b ? 2 : 1); ++k) {
    NAME(grad_row_t) *row = k == 0 ? a : b;
    const double scale = -(double)row->statistics.rstd / (double)cols;
    row->slope = (ACC)(products[k] * scale);
    row->level = (ACC)(sums[k] * scale);
  }
}

/* The first pass in a function of its own, which every combination of outputs calls. */
NOINLINE void NAME(grad_means)(NAME(part_t) part, const fused_t *fused, NAME(grad_row_t) * a,
                               NAME(grad_row_t) * b) {
  const int centered = part.needs & CENTERED;
  if (fused && b) {
    centered ? NAME(means_of)(part, fused, a, b, 1) : NAME(means_of)(part, fused, a, b, 0);
  } else if (fused) {
    NAME(means_of)(part, fused, a, NULL, centered);
  } else if (b) {
    centered ? NAME(means_of)(part, NULL, a, b, 1) : NAME(means_of)(part, NULL, a, b, 0);
  } else {
    centered ? NAME(means_of)(part, NULL, a, NULL, 1) : NAME(means_of)(part, NULL, a, NULL, 0);
  }
}

/* The second pass over n columns. */
ALWAYS_INLINE void NAME(grad_block)(NAME(part_t) part, const fused_t *fused,
                                    const NAME(grad_row_t) * a, const NAME(grad_row_t) * b,
                                    wide_halves_t halves, int64_t c, int n, int stream) {
  const int needs = part.needs;
  ACC weight[BLOCK], grad_weight[BLOCK], grad_bias[BLOCK];
  if (needs & GRAD_X) NAME(load_wide)(weight, (const ACC *)part.args->weight, halves, c);
  if (needs & GRAD_WEIGHT) NAME(load_wide)(grad_weight, part.weight_rows, halves, c);
  if (needs & GRAD_BIAS) NAME(load_wide)(grad_bias, part.bias_rows, halves, c);
  NAME(second_pass)(a, fused, weight, grad_weight, grad_bias, c, n, needs, stream);
  if (b) NAME(second_pass)(b, fused, weight, grad_weight, grad_bias, c, n, needs, stream);
  if (needs & GRAD_WEIGHT) NAME(store_wide)(part.weight_rows, halves, c, grad_weight);
  if (needs & GRAD_BIAS) NAME(store_wide)(part.bias_rows, halves, c, grad_bias);
}

NOINLINE void NAME(grad_part)(NAME(part_t) part, const fused_t *fused, const NAME(grad_row_t) * row,
                              int64_t c, int n) {
  const wide_halves_t halves = NAME(wide_halves)(c, part.args->cols);
  NAME(grad_block)(part, fused, row, NULL, halves, c, n, 0);
}

/* The second pass over all columns. Streamed stores begin at a multiple of 64 bytes in both rows.
 * The blocks read local copies, see part_t. */
ALWAYS_INLINE void NAME(grad_columns)(NAME(part_t) part, const fused_t *fused_in,
                                      const NAME(grad_row_t) * a_in,
                                      const NAME(grad_row_t) * b_in) {
  const int64_t cols = part.args->cols;
  const fused_t fused_copy = fused_in ? *fused_in : (fused_t){0},
                *fused = fused_in ? &fused_copy : NULL;
  const NAME(grad_row_t) a_copy = *a_in, b_copy = b_in ? *b_in : a_copy, *a = &a_copy,
                         *b = b_in ? &b_copy : NULL;
  int64_t c = NAME(row_head)(a->grad_x, cols, part.stream);
  if (c > 0) NAME(grad_part)(part, fused_in, a_in, 0, (int)c);
  if (c > 0 && b) NAME(grad_part)(part, fused_in, b_in, 0, (int)c);
  const wide_halves_t halves = NAME(wide_halves)(c, cols);
  const int64_t blocks_end = cols - (cols - c) % BLOCK;
  const int dropped_aligned =
      !fused || !a->grad_dropped || (uintptr_t)(a->grad_dropped + c) % 64 == 0;
  const int aligned = part.stream && dropped_aligned && (uintptr_t)(a->grad_x + c) % 64 == 0;
  for (; c < blocks_end; c += BLOCK) NAME(grad_block)(part, fused, a, b, halves, c, BLOCK, aligned);
  if (c < cols) NAME(grad_part)(part, fused_in, a_in, c, (int)(cols - c));
  if (c < cols && b) NAME(grad_part)(part, fused_in, b_in, c, (int)(cols - c));
}

/* ---- rows [begin, end) ---- */

ALWAYS_INLINE void NAME(one_row)(NAME(part_t) part, const fused_t *fused, int64_t r) {
  NAME(grad_row_t) a = NAME(grad_row)(part, r);
  NAME(set_dropout)(fused, &a, &a, part.args->cols);
  if (part.needs & GRAD_X) NAME(grad_means)(part, fused, &a, NULL);
  NAME(grad_columns)(part, fused, &a, NULL);
}

/* Rows with any combination of outputs: part.needs is not a constant here. The plain norms have a
 * loop of their own, in which fused is a constant: else they take 30 to 40 % longer. */
NOINLINE void NAME(any_rows)(NAME(part_t) part, const fused_t *fused, int64_t begin, int64_t end) {
  if (fused) {
    for (int64_t r = begin; r < end; ++r) NAME(one_row)(part, fused, r);
  } else {
    for (int64_t r = begin; r < end; ++r) NAME(one_row)(part, NULL, r);
  }
}

/* A loop for one combination of outputs, `needs`, a constant; two rows at a time with `pairs`. */
ALWAYS_INLINE void NAME(rows_of)(NAME(part_t) part, int needs, const fused_t *fused, int64_t begin,
                                 int64_t end, int pairs) {
  int64_t r = begin;
  part.needs = needs;
  if (!pairs) {
    for (; r < end; ++r) NAME(one_row)(part, fused, r);
    return;
  }
  for (; r + 2 <= end; r += 2) {
    NAME(grad_row_t) a = NAME(grad_row)(part, r), b = NAME(grad_row)(part, r + 1);
    NAME(set_dropout)(fused, &a, &b, part.args->cols);
    if (needs & GRAD_X) NAME(grad_means)(part, fused, &a, &b);
    NAME(grad_columns)(part, fused, &a, &b);
  }
  NAME(any_rows)(part, fused, r, end);
}

/* The common combinations of outputs have loops of their own. */
ALWAYS_INLINE void NAME(backward_rows)(NAME(part_t) part, const fused_t *fused, int64_t begin,
                                       int64_t end, int pairs) {
  enum {
    LAYER_NORM = CENTERED | GRAD_X | GRAD_WEIGHT | GRAD_BIAS,
    RMS_NORM = GRAD_X | GRAD_WEIGHT
  };
  enum { LAYER_NORM_X = CENTERED | GRAD_X, RMS_NORM_X = GRAD_X };
  enum { LAYER_NORM_WEIGHTS = CENTERED | GRAD_WEIGHT | GRAD_BIAS };
  switch (pairs || !fused ? part.needs : 0) {
    case LAYER_NORM: NAME(rows_of)(part, LAYER_NORM, fused, begin, end, pairs); return;
    case RMS_NORM: NAME(rows_of)(part, RMS_NORM, fused, begin, end, pairs); return;
  }
  switch (pairs && !fused ? part.needs : 0) {
    case LAYER_NORM_X: NAME(rows_of)(part, LAYER_NORM_X, NULL, begin, end, 1); return;
    case RMS_NORM_X: NAME(rows_of)(part, RMS_NORM_X, NULL, begin, end, 1); return;
    case LAYER_NORM_WEIGHTS: NAME(rows_of)(part, LAYER_NORM_WEIGHTS, NULL, begin, end, 1); return;
  }
  NAME(any_rows)(part, fused, begin, end);
}

/* The fused forms, any of them. */
ALWAYS_INLINE void NAME(fused_rows)(NAME(part_t) part, int64_t begin, int64_t end, int pairs) {
  const norm_backward_args *args = part.args;
  const int64_t last = end * args->cols;
  const int drops_y = args->dropout_y.seed != NULL;
  const dropout_t *dropped = drops_y ? &args->dropout_y : &args->dropout_x;
  cpu_dropout_t dropout[2];
  for (int k = 0; k < 2; ++k) cpu_dropout_init(&dropout[k], dropped, last);
  const ahead_t grad_sum_ahead = row_ahead(args->grad_sum_stride, args->cols, sizeof(T), 2);
  const fused_t fused = {dropped->seed ? dropout : NULL, last, grad_sum_ahead, drops_y};
  NAME(backward_rows)(part, &fused, begin, end, pairs);
}

/* ---- parts of the rows, and their sums ---- */

ALWAYS_INLINE NAME(part_t) NAME(part_of)(const norm_backward_args *args, int64_t part) {
  const int64_t wide = norm_wide_cols(args->cols);
  double *sums = (double *)(void *)((char *)args->partial + part * norm_partial_part(args));
  ACC *rows = (ACC *)(void *)(sums + norm_weight_gradients(args) * wide);
  const int64_t bias = args->grad_weight ? wide : 0; /* where the sums for grad_bias begin */
  return (NAME(part_t)){
      .args = args,
      .weight = args->grad_weight ? sums : NULL,
      .bias = args->grad_bias ? sums + bias : NULL,
      .weight_rows = args->grad_weight ? rows : NULL,
      .bias_rows = args->grad_bias ? rows + bias : NULL,
      .needs = (args->mean ? CENTERED : 0) | (args->grad_x ? GRAD_X : 0) |
               (args->grad_weight ? GRAD_WEIGHT : 0) | (args->grad_bias ? GRAD_BIAS : 0),
  };
}

/* Adds the sums of the last rows to those in double, or, the first time, stores them there. */
ALWAYS_INLINE void NAME(flush_sums)(double *restrict sums, ACC *restrict rows, int64_t wide,
                                    int first) {
  if (!sums) return;
  if (first) {
    for (int64_t i = 0; i < wide; ++i) sums[i] = (double)rows[i];
  } else {
    for (int64_t i = 0; i < wide; ++i) sums[i] += (double)rows[i];
  }
}

static void NAME(norm_backward)(const norm_backward_args *args, int64_t number) {
  NAME(part_t) part = NAME(part_of)(args, number);
  const int64_t part_rows = norm_part_rows(args->rows, args->cols), first = number * part_rows;
  const int64_t last = first + part_rows < args->rows ? first + part_rows : args->rows;
  const int64_t wide = norm_wide_cols(args->cols), row_bytes = args->cols * (int64_t)sizeof(T);
  const int64_t tensors = 3 + (args->grad_sum != NULL) + (args->grad_dropped != NULL);
  const int fused = args->grad_sum || args->grad_dropped || args->dropout_y.seed;
  part.stream = args->grad_x && cpu_should_stream(tensors * args->rows * row_bytes);
  /* Two rows can be streamed together only if both reach 64 bytes in the same column. */
  const int pairs = PAIRS && sizeof(ACC) == 4 && (!part.stream || row_bytes % 64 == 0);
  for (int64_t r = first; r < last; r += FLUSH_ROWS) {
    const int64_t end = r + FLUSH_ROWS < last ? r + FLUSH_ROWS : last;
    if (part.weight) memset(part.weight_rows, 0, (size_t)wide * sizeof(ACC));
    if (part.bias) memset(part.bias_rows, 0, (size_t)wide * sizeof(ACC));
    if (fused) {
      NAME(fused_rows)(part, r, end, pairs);
    } else {
      NAME(backward_rows)(part, NULL, r, end, pairs);
    }
    NAME(flush_sums)(part.weight, part.weight_rows, wide, r == first);
    NAME(flush_sums)(part.bias, part.bias_rows, wide, r == first);
  }
  if (part.stream) stream_fence();
}

/* Adds the parts' sums for one tile of columns and stores them: grad_weight, or with `bias`
 * grad_bias. */
ALWAYS_INLINE void NAME(add_parts)(const norm_backward_args *args, int64_t tile, int bias) {
  const int64_t parts = norm_parts(args->rows, args->cols), begin = tile * NORM_TILE;
  const int64_t end = args->cols - begin < NORM_TILE ? args->cols : begin + NORM_TILE;
  const wide_halves_t halves = NAME(wide_halves)(0, args->cols);
  double total[NORM_TILE] = {0};
  for (int64_t part = 0; part < parts; ++part) {
    const NAME(part_t) sums = NAME(part_of)(args, part);
    for (int64_t c = begin; c < end; c += BLOCK) {
      const double *p = (bias ? sums.bias : sums.weight) + NAME(wide_index)(c);
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + k] += p[halves.lower + k];
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + BLOCK / 2 + k] += p[halves.upper + k];
    }
  }
  void *out = bias ? args->grad_bias : args->grad_weight;
  for (int64_t c = begin; c < end; c += BLOCK) {
    const int n = end - c < BLOCK ? (int)(end - c) : BLOCK;
    if (args->weight_dtype == args->dtype) {
      ACC v[BLOCK];
      for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)total[c - begin + k];
      STORE((T *)out + c, v, n, 0);
    } else {
      float v[BLOCK];
      for (int k = 0; k < BLOCK; ++k) v[NAME(column)(k)] = (float)total[c - begin + k];
      store_float32((float *)out + c, v, n, 0);
    }
  }
}

static void NAME(norm_grad_weight)(const norm_backward_args *args, int64_t tile) {
  if (args->grad_weight) NAME(add_parts)(args, tile, 0);
  if (args->grad_bias) NAME(add_parts)(args, tile, 1);
}
