/* CPU backward kernels of layer_norm and rms_norm. norm_cpu_kernel.h includes this file. */

/* The numbers that grad_x needs from a row's sums. With g = grad_out * weight:
 *   slope = -rstd * mean_c(g * xhat),  level = -rstd * mean_c(g) */
typedef struct {
  ACC slope, level;
} NAME(slope_t);

/* The state while one part of the rows is processed (norm.h). The state is passed by value, because
 * the compiler reloads an object after every store if its address has been passed to a call.
 *
 * In the functions below, `fused` is the state of a dropout, which may have no seed. For plain
 * norms it is the constant NULL, so that they do not pay for the fused variants. Each block tests
 * which variant it has, because a loop for each variant would be much code. */
typedef struct {
  const norm_backward_args *args;
  ACC *weight_sums, *bias_sums; /* over the rows since the last flush; NULL if not needed */
  int needs, stream, drops_y;
  ahead_t x_ahead, grad_out_ahead, grad_sum_ahead;
  /* Members for the current row. */
  const T *x, *grad_out, *grad_sum;
  T *grad_x, *grad_dropped;
  NAME(row_t) row;
  NAME(slope_t) slope;
  int64_t first; /* flat index of the row's first element */
} NAME(part_t);

/* ---- one row: n columns from column c on ---- */

/* The end of backward: adds grad_sum to grad_x, stores grad_x, and stores grad_dropped. */
ALWAYS_INLINE void NAME(backward_epilogue)(ACC *restrict grad_x, NAME(part_t) part,
                                           cpu_dropout_t *fused, int64_t c, int n, int stream) {
  if (fused && part.grad_sum) {
    ACC grad_sum[BLOCK];
    prefetch_later(part.grad_sum + c, BLOCK * sizeof(T), part.grad_sum_ahead);
    NAME(load_block)(grad_sum, part.grad_sum + c, n);
    for (int k = 0; k < BLOCK; ++k) grad_x[k] += grad_sum[k];
  }
  STORE(part.grad_x + c, grad_x, n, stream);
  if (fused && part.grad_dropped) {
    NAME(dropout_block)(grad_x, fused, part.first + c);
    STORE(part.grad_dropped + c, grad_x, n, stream);
  }
}

/* Loads xhat and grad_out. If y had dropout, grad_out becomes the gradient of y before dropout.
 * rms_norm has no dropout of y. */
ALWAYS_INLINE void NAME(load_columns)(ACC *restrict xhat, ACC *restrict grad_out, NAME(part_t) part,
                                      cpu_dropout_t *fused, int64_t c, int n, int centered) {
  NAME(load_block)(xhat, part.x + c, n);
  NAME(load_block)(grad_out, part.grad_out + c, n);
  if (centered && fused && part.drops_y) NAME(dropout_block)(grad_out, fused, part.first + c);
  NAME(normalise)(xhat, part.row, centered);
}

/* First pass over a row. With g = grad_out * weight, it adds g * xhat to `products` and g to `sum`.
 * The sum is over g * xhat and not g * x, because a sum of g * x could leave float's range. */
ALWAYS_INLINE void NAME(first_pass)(ACC *restrict products, ACC *restrict sum, NAME(part_t) part,
                                    cpu_dropout_t *fused, wide_halves_t halves, int64_t c, int n,
                                    int centered, int prefetches) {
  ACC xhat[BLOCK], g[BLOCK], weight[BLOCK];
  if (prefetches) {
    prefetch_output(part.grad_x + c, BLOCK * sizeof(T));
    if (part.grad_dropped) prefetch_output(part.grad_dropped + c, BLOCK * sizeof(T));
  }
  NAME(load_wide)(weight, (const ACC *)part.args->weight, halves, c);
  NAME(load_columns)(xhat, g, part, fused, c, n, centered);
  for (int k = 0; k < BLOCK; ++k) g[k] *= weight[k];
  if (centered) {
    for (int k = 0; k < BLOCK; ++k) sum[k] += g[k];
  }
  for (int k = 0; k < BLOCK; ++k) products[k] = FMA(g[k], xhat[k], products[k]);
}

/* Adds grad_out * xhat to the sums for grad_weight, and grad_out to the sums for grad_bias. */
ALWAYS_INLINE void NAME(add_to_sums)(NAME(part_t) part, const ACC *restrict grad_out,
                                     const ACC *restrict xhat, wide_halves_t halves, int64_t c) {
  ACC sums[BLOCK];
  if (part.needs & GRAD_WEIGHT) {
    NAME(load_wide)(sums, part.weight_sums, halves, c);
    for (int k = 0; k < BLOCK; ++k) sums[k] = FMA(grad_out[k], xhat[k], sums[k]);
    NAME(store_wide)(part.weight_sums, halves, c, sums);
  }
  if (part.needs & GRAD_BIAS) {
    NAME(load_wide)(sums, part.bias_sums, halves, c);
    for (int k = 0; k < BLOCK; ++k) sums[k] += grad_out[k];
    NAME(store_wide)(part.bias_sums, halves, c, sums);
  }
}

/* The second pass over a row adds the row to the sums over rows, and writes grad_x = grad_out *
 * weight * rstd + xhat * slope + level. */
ALWAYS_INLINE void NAME(second_pass)(NAME(part_t) part, cpu_dropout_t *fused, wide_halves_t halves,
                                     int64_t c, int n, int stream) {
  const int needs = part.needs;
  ACC xhat[BLOCK], g[BLOCK], weight[BLOCK];
  prefetch_later(part.x + c, BLOCK * sizeof(T), part.x_ahead);
  prefetch_later(part.grad_out + c, BLOCK * sizeof(T), part.grad_out_ahead);
  NAME(load_columns)(xhat, g, part, fused, c, n, needs & CENTERED);
  NAME(add_to_sums)(part, g, xhat, halves, c);
  if (!(needs & GRAD_X)) return;
  NAME(load_wide)(weight, (const ACC *)part.args->weight, halves, c);
  for (int k = 0; k < BLOCK; ++k) xhat[k] = FMA(xhat[k], part.slope.slope, part.slope.level);
  for (int k = 0; k < BLOCK; ++k) g[k] = FMA(g[k] * part.row.rstd, weight[k], xhat[k]);
  NAME(backward_epilogue)(g, part, fused, c, n, stream);
}

NOINLINE void NAME(second_part)(NAME(part_t) part, cpu_dropout_t *fused, int64_t c, int n) {
  const wide_halves_t halves = NAME(wide_halves)(c, part.args->cols);
  NAME(second_pass)(part, fused, halves, c, n, 0);
}

/* ---- one row, all columns ---- */

/* Makes the first pass over a row. */
ALWAYS_INLINE NAME(slope_t) NAME(means_of)(NAME(part_t) part, cpu_dropout_t *fused, int centered) {
  const int64_t cols = part.args->cols;
  const int prefetches = !part.stream && cols * (int64_t)sizeof(T) <= PREFETCHED_ROW;
  const wide_halves_t halves = NAME(wide_halves)(0, cols);
  double total = 0, total_products = 0;
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < FLUSH_COLS ? cols : c + FLUSH_COLS;
    ACC products[BLOCK] = {0}, sum[BLOCK] = {0};
    for (; c + BLOCK <= end; c += BLOCK)
      NAME(first_pass)(products, sum, part, fused, halves, c, BLOCK, centered, prefetches);
    const int n = (int)(end - c);
    if (n > 0) NAME(first_pass)(products, sum, part, fused, halves, c, n, centered, 0);
    total_products += FOLD(products);
    if (centered) total += FOLD(sum);
    c = end;
  }
  const double scale = -(double)part.row.rstd / (double)cols;
  return (NAME(slope_t)){(ACC)(total_products * scale), (ACC)(total * scale)};
}

/* Makes the first pass in a separate function, which the loops for all combinations of outputs
 * call. Among the fused variants, only a dropout of y changes the first pass. */
NOINLINE NAME(slope_t) NAME(grad_means)(NAME(part_t) part, cpu_dropout_t *fused) {
  if (fused && part.drops_y) return NAME(means_of)(part, fused, 1);
  if (part.needs & CENTERED) return NAME(means_of)(part, NULL, 1);
  return NAME(means_of)(part, NULL, 0);
}

/* Makes the second pass over a row. Non-temporal stores begin at a multiple of 64 bytes. */
ALWAYS_INLINE void NAME(grad_columns)(NAME(part_t) part, cpu_dropout_t *fused) {
  const int64_t cols = part.args->cols;
  int64_t c = NAME(row_head)(part.grad_x, cols, part.stream);
  if (c > 0) NAME(second_part)(part, fused, 0, (int)c);
  const wide_halves_t halves = NAME(wide_halves)(c, cols);
  const int64_t blocks_end = cols - (cols - c) % BLOCK;
  const int dropped_aligned =
      !fused || !part.grad_dropped || (uintptr_t)(part.grad_dropped + c) % 64 == 0;
  const int aligned = part.stream && dropped_aligned && (uintptr_t)(part.grad_x + c) % 64 == 0;
  for (; c < blocks_end; c += BLOCK) NAME(second_pass)(part, fused, halves, c, BLOCK, aligned);
  if (c < cols) NAME(second_part)(part, fused, c, (int)(cols - c));
}

/* ---- rows [begin, end) ---- */

/* Processes rows for the outputs that the flags `needs` select. `needs` is a constant where
 * possible. */
ALWAYS_INLINE void NAME(rows_of)(NAME(part_t) part, int needs, cpu_dropout_t *fused, int64_t begin,
                                 int64_t end) {
  const norm_backward_args *args = part.args;
  part.needs = needs;
  for (int64_t r = begin; r < end; ++r) {
    part.first = r * args->cols;
    part.x = (const T *)args->x + r * args->x_stride;
    part.grad_out = (const T *)args->grad_out + r * args->grad_out_stride;
    part.grad_sum = args->grad_sum ? (const T *)args->grad_sum + r * args->grad_sum_stride : NULL;
    part.grad_x = args->grad_x ? (T *)args->grad_x + part.first : NULL;
    part.grad_dropped = args->grad_dropped ? (T *)args->grad_dropped + part.first : NULL;
    part.row.mean = needs & CENTERED ? ((const ACC *)args->mean)[r] : 0;
    part.row.rstd = ((const ACC *)args->rstd)[r];
    if (fused && part.drops_y) cpu_dropout_begin_row(fused, part.first, args->cols);
    if (needs & GRAD_X) part.slope = NAME(grad_means)(part, fused);
    NAME(grad_columns)(part, fused);
  }
}

/* The common combinations of outputs have loops of their own, with a constant `needs`. In the loops
 * of plain norms `fused` is the constant NULL, too. Otherwise plain norms take 30 to 40 %
 * longer. */
ALWAYS_INLINE void NAME(backward_rows)(NAME(part_t) part, cpu_dropout_t *fused, int64_t begin,
                                       int64_t end) {
  enum {
    LAYER_NORM = CENTERED | GRAD_X | GRAD_WEIGHT | GRAD_BIAS,
    LAYER_NORM_X = CENTERED | GRAD_X,
    LAYER_NORM_WEIGHTS = CENTERED | GRAD_WEIGHT | GRAD_BIAS,
    RMS_NORM = GRAD_X | GRAD_WEIGHT,
    RMS_NORM_X = GRAD_X
  };
  switch (part.needs) {
    case LAYER_NORM: NAME(rows_of)(part, LAYER_NORM, fused, begin, end); return;
    case RMS_NORM: NAME(rows_of)(part, RMS_NORM, fused, begin, end); return;
  }
  switch (fused ? 0 : part.needs) {
    case LAYER_NORM_X: NAME(rows_of)(part, LAYER_NORM_X, NULL, begin, end); return;
    case LAYER_NORM_WEIGHTS: NAME(rows_of)(part, LAYER_NORM_WEIGHTS, NULL, begin, end); return;
    case RMS_NORM_X: NAME(rows_of)(part, RMS_NORM_X, NULL, begin, end); return;
  }
  NAME(rows_of)(part, part.needs, fused, begin, end);
}

/* ---- parts of the rows, and their sums ---- */

/* Returns the sums over a part's rows in double, for grad_weight and then for grad_bias. */
ALWAYS_INLINE double *NAME(sums_of)(const norm_backward_args *args, int64_t part) {
  return (double *)(void *)((char *)args->partial + part * norm_partial_part(args));
}

/* Adds the sums of the most recent rows to the sums in double. The first call for a part of the
 * rows stores them instead. */
ALWAYS_INLINE void NAME(flush_sums)(double *restrict sums, const ACC *restrict recent,
                                    int64_t count, int first) {
  if (first) {
    for (int64_t i = 0; i < count; ++i) sums[i] = (double)recent[i];
  } else {
    for (int64_t i = 0; i < count; ++i) sums[i] += (double)recent[i];
  }
}

static void NAME(norm_backward)(const norm_backward_args *args, int64_t number) {
  const int64_t part_rows = norm_part_rows(args->rows, args->cols), first = number * part_rows;
  const int64_t last = first + part_rows < args->rows ? first + part_rows : args->rows;
  const int64_t wide = norm_wide_cols(args->cols), count = norm_weight_gradients(args) * wide;
  const int64_t tensors = 3 + (args->grad_sum != NULL) + (args->grad_dropped != NULL);
  const int64_t bytes = tensors * args->rows * args->cols * (int64_t)sizeof(T);
  const int is_fused = args->grad_sum || args->grad_dropped || args->dropout_y.seed;
  double *sums = NAME(sums_of)(args, number);
  ACC *recent = (ACC *)(void *)(sums + count); /* sums over the last FLUSH_ROWS rows */
  const NAME(part_t) part = {
      .args = args,
      .weight_sums = args->grad_weight ? recent : NULL,
      .bias_sums = args->grad_bias ? recent + count - wide : NULL,
      .needs = (args->mean ? CENTERED : 0) | (args->grad_x ? GRAD_X : 0) |
               (args->grad_weight ? GRAD_WEIGHT : 0) | (args->grad_bias ? GRAD_BIAS : 0),
      .stream = args->grad_x && cpu_should_stream(bytes),
      .drops_y = args->dropout_y.seed != NULL,
      .x_ahead = row_ahead(args->x_stride, args->cols, sizeof(T)),
      .grad_out_ahead = row_ahead(args->grad_out_stride, args->cols, sizeof(T)),
      .grad_sum_ahead = row_ahead(args->grad_sum_stride, args->cols, sizeof(T)),
  };
  cpu_dropout_t fused;
  cpu_dropout_init(&fused, part.drops_y ? &args->dropout_y : &args->dropout_x, last * args->cols);
  for (int64_t r = first; r < last; r += FLUSH_ROWS) {
    const int64_t end = r + FLUSH_ROWS < last ? r + FLUSH_ROWS : last;
    if (count > 0) memset(recent, 0, (size_t)count * sizeof(ACC));
    if (is_fused) {
      NAME(backward_rows)(part, &fused, r, end);
    } else {
      NAME(backward_rows)(part, NULL, r, end);
    }
    NAME(flush_sums)(sums, recent, count, r == first);
  }
  if (part.stream) stream_fence();
}

/* Adds the sums of all parts for one tile of columns, and stores the result. `offset` selects the
 * sums of grad_weight or of grad_bias. */
static void NAME(add_parts)(const norm_backward_args *args, int64_t tile, int64_t offset,
                            void *out) {
  const int64_t parts = norm_parts(args->rows, args->cols), begin = tile * NORM_TILE;
  const int64_t end = args->cols - begin < NORM_TILE ? args->cols : begin + NORM_TILE;
  const wide_halves_t halves = NAME(wide_halves)(0, args->cols);
  double total[NORM_TILE] = {0};
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t c = begin; c < end; c += BLOCK) {
      const double *p = NAME(sums_of)(args, part) + offset + NAME(wide_index)(c);
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + k] += p[halves.lower + k];
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + BLOCK / 2 + k] += p[halves.upper + k];
    }
  }
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
  const int64_t offset = (norm_weight_gradients(args) - 1) * norm_wide_cols(args->cols);
  if (args->grad_weight) NAME(add_parts)(args, tile, 0, args->grad_weight);
  if (args->grad_bias) NAME(add_parts)(args, tile, offset, args->grad_bias);
}
