/* The backward half of norm_cpu_kernel.h, which includes it. */

/* A part's sums of grad_out * xhat and of grad_out: what the last rows gave, and all before in double. */
typedef struct {
  double *weight, *bias;
  ACC *weight_rows, *bias_rows;
} NAME(sums_t);

/* grad_x = gw * rstd + xhat * slope + level, with gw = grad_out * weight. */
typedef struct {
  const T *x, *grad_out, *grad_sum;
  T *grad_x, *grad_dropped;
  ahead_t x_ahead, grad_ahead;
  ACC mean, rstd, slope, level;
  int64_t first; /* the number of the row's first element */
  cpu_dropout_t *dropout;
} NAME(grad_row_t);

ALWAYS_INLINE void NAME(products_block)(ACC *restrict products, ACC *restrict sum,
                                        const NAME(grad_row_t) * row, const fused_t *fused,
                                        const ACC *restrict weight, int64_t c, int n, int centered,
                                        int asks) {
  ACC x[BLOCK], g[BLOCK];
  if (asks) {
    prefetch_output(row->grad_x + c, BLOCK * sizeof(T));
    if (fused && row->grad_dropped) prefetch_output(row->grad_dropped + c, BLOCK * sizeof(T));
  }
  NAME(load_block)(x, row->x + c, n);
  NAME(load_block)(g, row->grad_out + c, n);
  if (fused && fused->drops_y) NAME(dropout_block)(g, row->dropout, row->first + c);
  for (int k = 0; k < BLOCK; ++k) g[k] *= weight[k];
  if (centered) {
    for (int k = 0; k < BLOCK; ++k) sum[k] += g[k];
    for (int k = 0; k < BLOCK; ++k) x[k] -= row->mean;
  }
  for (int k = 0; k < BLOCK; ++k)
    x[k] *= row->rstd; /* here and not in the sum, for that may be past float's range */
  for (int k = 0; k < BLOCK; ++k) products[k] = FMA(g[k], x[k], products[k]);
}

ALWAYS_INLINE void NAME(set_means)(NAME(grad_row_t) * row, double products, double sum,
                                   int64_t cols) {
  const double scale = -(double)row->rstd / (double)cols;
  row->slope = (ACC)(products * scale);
  row->level = (ACC)(sum * scale);
}

/* Sets slope and level of one row, or of two. */
ALWAYS_INLINE void NAME(grad_means)(const norm_backward_args *args, const fused_t *fused,
                                    NAME(grad_row_t) * a, NAME(grad_row_t) * b, int rows,
                                    int centered, int stream) {
  const int64_t cols = args->cols;
  const int asks = !stream && cols * (int64_t)sizeof(T) <= ASKED_ROW;
  const wide_place_t place = NAME(wide_place)(0, cols);
  double products[2] = {0}, sums[2] = {0};
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < FLUSH_COLS ? cols : c + FLUSH_COLS;
    ACC products_a[BLOCK] = {0}, products_b[BLOCK] = {0}, sum_a[BLOCK] = {0}, sum_b[BLOCK] = {0},
        weight[BLOCK];
    for (; c + BLOCK <= end; c += BLOCK) {
      NAME(load_wide)(weight, (const ACC *)args->weight, place, c);
      NAME(products_block)(products_a, sum_a, a, fused, weight, c, BLOCK, centered, asks);
      if (rows == 2)
        NAME(products_block)(products_b, sum_b, b, fused, weight, c, BLOCK, centered, asks);
    }
    if (c < end) {
      NAME(load_wide)(weight, (const ACC *)args->weight, place, c);
      NAME(products_block)(products_a, sum_a, a, fused, weight, c, (int)(end - c), centered, asks);
      if (rows == 2)
        NAME(products_block)
        (products_b, sum_b, b, fused, weight, c, (int)(end - c), centered, asks);
    }
    products[0] += FOLD(products_a);
    if (rows == 2) products[1] += FOLD(products_b);
    if (centered) sums[0] += FOLD(sum_a);
    if (centered && rows == 2) sums[1] += FOLD(sum_b);
    c = end;
  }
  NAME(set_means)(a, products[0], sums[0], cols);
  if (rows == 2) NAME(set_means)(b, products[1], sums[1], cols);
}

/* n elements of one row: adds to the sums over rows, writes grad_x. */
ALWAYS_INLINE void NAME(grad_block)(const NAME(grad_row_t) * row, const fused_t *fused,
                                    const ACC *restrict weight, ACC *restrict grad_weight,
                                    ACC *restrict grad_bias, int64_t c, int n, wanted_t want,
                                    int stream) {
  ACC x[BLOCK], g[BLOCK];
  prefetch_later(row->x + c, BLOCK * sizeof(T), row->x_ahead);
  prefetch_later(row->grad_out + c, BLOCK * sizeof(T), row->grad_ahead);
  NAME(load_block)(x, row->x + c, n);
  NAME(load_block)(g, row->grad_out + c, n);
  if (fused && fused->drops_y) NAME(dropout_block)(g, row->dropout, row->first + c);
  if (want.centered) {
    for (int k = 0; k < BLOCK; ++k) x[k] -= row->mean;
  }
  for (int k = 0; k < BLOCK; ++k) x[k] *= row->rstd;
  if (want.weight) {
    for (int k = 0; k < BLOCK; ++k) grad_weight[k] = FMA(g[k], x[k], grad_weight[k]);
  }
  if (want.bias) {
    for (int k = 0; k < BLOCK; ++k) grad_bias[k] += g[k];
  }
  if (want.x) {
    for (int k = 0; k < BLOCK; ++k) x[k] = FMA(x[k], row->slope, row->level);
    for (int k = 0; k < BLOCK; ++k) g[k] = FMA(g[k] * row->rstd, weight[k], x[k]);
    if (fused && row->grad_sum) {
      prefetch_later(row->grad_sum + c, BLOCK * sizeof(T), fused->grad_sum_ahead);
      NAME(load_block)(x, row->grad_sum + c, n);
      for (int k = 0; k < BLOCK; ++k) g[k] += x[k];
    }
    STORE(row->grad_x + c, g, n, stream);
    if (fused && row->grad_dropped) {
      NAME(dropout_block)(g, row->dropout, row->first + c);
      STORE(row->grad_dropped + c, g, n, stream);
    }
  }
}

/* n elements of one row or of two. */
ALWAYS_INLINE void NAME(grad_blocks)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                     const fused_t *fused, const NAME(grad_row_t) * a,
                                     const NAME(grad_row_t) * b, int rows, wide_place_t place,
                                     int64_t c, int n, wanted_t want, int stream) {
  ACC weight[BLOCK], grad_weight[BLOCK], grad_bias[BLOCK];
  if (want.x) NAME(load_wide)(weight, (const ACC *)args->weight, place, c);
  if (want.weight) NAME(load_wide)(grad_weight, sums->weight_rows, place, c);
  if (want.bias) NAME(load_wide)(grad_bias, sums->bias_rows, place, c);
  NAME(grad_block)(a, fused, weight, grad_weight, grad_bias, c, n, want, stream);
  if (rows == 2) NAME(grad_block)(b, fused, weight, grad_weight, grad_bias, c, n, want, stream);
  if (want.weight) NAME(store_wide)(sums->weight_rows, place, c, grad_weight);
  if (want.bias) NAME(store_wide)(sums->bias_rows, place, c, grad_bias);
}

static __attribute__((noinline)) void NAME(grad_part)(const norm_backward_args *args,
                                                      const NAME(sums_t) * sums,
                                                      const fused_t *fused,
                                                      const NAME(grad_row_t) * row, int64_t c,
                                                      int n, wanted_t want) {
  NAME(grad_blocks)(args, sums, fused, row, row, 1, NAME(wide_place)(c, args->cols), c, n, want, 0);
}

/* All columns of one row or of two; what is streamed begins at 64 bytes in both. The blocks read copies: what a call was given the
 * address of has to be read again after every store. */
ALWAYS_INLINE void NAME(grad_columns)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                      const fused_t *fused_in, const NAME(grad_row_t) * a_in,
                                      const NAME(grad_row_t) * b_in, int rows, wanted_t want,
                                      int stream) {
  const int64_t cols = args->cols;
  const fused_t fused_copy = fused_in ? *fused_in : (fused_t){0},
                *fused = fused_in ? &fused_copy : NULL;
  const NAME(grad_row_t) a_copy = *a_in, b_copy = *b_in, *a = &a_copy, *b = &b_copy;
  int64_t c = NAME(row_head)(a->grad_x, cols, stream);
  if (c > 0) NAME(grad_part)(args, sums, fused_in, a_in, 0, (int)c, want);
  if (c > 0 && rows == 2) NAME(grad_part)(args, sums, fused_in, b_in, 0, (int)c, want);
  const wide_place_t place = NAME(wide_place)(c, cols);
  const int64_t blocks_end = cols - (cols - c) % BLOCK;
  const int are_in_step = !fused || !a->grad_dropped || (uintptr_t)(a->grad_dropped + c) % 64 == 0;
  if (stream && are_in_step && (uintptr_t)(a->grad_x + c) % 64 == 0) {
    for (; c < blocks_end; c += BLOCK)
      NAME(grad_blocks)(args, sums, fused, a, b, rows, place, c, BLOCK, want, 1);
  } else {
    for (; c < blocks_end; c += BLOCK)
      NAME(grad_blocks)(args, sums, fused, a, b, rows, place, c, BLOCK, want, 0);
  }
  if (c < cols) NAME(grad_part)(args, sums, fused_in, a_in, c, (int)(cols - c), want);
  if (c < cols && rows == 2) NAME(grad_part)(args, sums, fused_in, b_in, c, (int)(cols - c), want);
}

ALWAYS_INLINE NAME(grad_row_t)
    NAME(grad_row)(const norm_backward_args *args, int64_t r, int centered) {
  return (NAME(grad_row_t)){
      .x = (const T *)args->x + r * args->x_stride,
      .grad_out = (const T *)args->grad_out + r * args->grad_out_stride,
      .grad_sum = args->grad_sum ? (const T *)args->grad_sum + r * args->grad_sum_stride : NULL,
      .grad_x = args->grad_x ? (T *)args->grad_x + r * args->cols : NULL,
      .grad_dropped = args->grad_dropped ? (T *)args->grad_dropped + r * args->cols : NULL,
      .x_ahead = row_ahead(args->x_stride, args->cols, sizeof(T), 2),
      .grad_ahead = row_ahead(args->grad_out_stride, args->cols, sizeof(T), 2),
      .mean = centered ? ((const ACC *)args->mean)[r] : 0,
      .rstd = ((const ACC *)args->rstd)[r],
      .first = r * args->cols,
  };
}

/* Rows a and b, `a` again for one row, with the masks of both at hand: two rows that one state does not make at once have one each. */
ALWAYS_INLINE void NAME(hold_rows)(const fused_t *fused, NAME(grad_row_t) * a, NAME(grad_row_t) * b,
                                   int64_t cols) {
  if (!fused->dropout) return;
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

ALWAYS_INLINE void NAME(any_row)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                 const fused_t *fused, int64_t r, const wanted_t *want,
                                 int stream) {
  NAME(grad_row_t) row = NAME(grad_row)(args, r, want->centered);
  if (fused) NAME(hold_rows)(fused, &row, &row, args->cols);
  if (want->x) NAME(grad_means)(args, fused, &row, &row, 1, want->centered, stream);
  NAME(grad_columns)(args, sums, fused, &row, &row, 1, *want, stream);
}

/* One row; what is wanted is no constant here. */
static __attribute__((noinline)) void NAME(backward_row)(const norm_backward_args *args,
                                                         const NAME(sums_t) * sums, int64_t r,
                                                         const wanted_t *want, int stream) {
  NAME(any_row)(args, sums, NULL, r, want, stream);
}

static __attribute__((noinline)) void NAME(fused_row)(const norm_backward_args *args,
                                                      const NAME(sums_t) * sums,
                                                      const fused_t *fused, int64_t r,
                                                      const wanted_t *want, int stream) {
  NAME(any_row)(args, sums, fused, r, want, stream);
}

/* Two rows at a time; what is wanted is a constant, and one of the common cases. */
ALWAYS_INLINE void NAME(backward_pairs)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                        const fused_t *fused, int64_t begin, int64_t end,
                                        wanted_t want, int stream) {
  int64_t r = begin;
  for (; r + 2 <= end; r += 2) {
    NAME(grad_row_t)
    a = NAME(grad_row)(args, r, want.centered),
    b = NAME(grad_row)(args, r + 1, want.centered);
    if (fused) NAME(hold_rows)(fused, &a, &b, args->cols);
    if (want.x) NAME(grad_means)(args, fused, &a, &b, 2, want.centered, stream);
    NAME(grad_columns)(args, sums, fused, &a, &b, 2, want, stream);
  }
  if (r == end) return;
  if (fused) {
    NAME(fused_row)(args, sums, fused, r, &want, stream);
  } else {
    NAME(backward_row)(args, sums, r, &want, stream);
  }
}

ALWAYS_INLINE void NAME(backward_rows)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                       int64_t begin, int64_t end, wanted_t want, int pairs,
                                       int stream) {
  const int wants = 8 * want.centered + 4 * want.x + 2 * want.weight + want.bias;
  const wanted_t all = {1, 1, 1, 1}, all_of_rms = {0, 1, 1, 0};
  if (!pairs && wants == 15) {
    for (int64_t r = begin; r < end; ++r) NAME(any_row)(args, sums, NULL, r, &all, stream);
    return;
  }
  if (!pairs && wants == 6) {
    for (int64_t r = begin; r < end; ++r) NAME(any_row)(args, sums, NULL, r, &all_of_rms, stream);
    return;
  }
  switch (pairs ? wants : 0) {
    case 15: NAME(backward_pairs)(args, sums, NULL, begin, end, all, stream); return;
    case 12:
      NAME(backward_pairs)(args, sums, NULL, begin, end, (wanted_t){1, 1, 0, 0}, stream);
      return;
    case 11: NAME(backward_pairs)(args, sums, NULL, begin, end, (wanted_t){1, 0, 1, 1}, 0); return;
    case 6: NAME(backward_pairs)(args, sums, NULL, begin, end, all_of_rms, stream); return;
    case 4:
      NAME(backward_pairs)(args, sums, NULL, begin, end, (wanted_t){0, 1, 0, 0}, stream);
      return;
  }
  for (int64_t r = begin; r < end; ++r) NAME(backward_row)(args, sums, r, &want, stream);
}

/* The same for the fused forms. */
ALWAYS_INLINE void NAME(fused_rows)(const norm_backward_args *args, const NAME(sums_t) * sums,
                                    int64_t begin, int64_t end, wanted_t want, int pairs,
                                    int stream) {
  const dropout_t *dropped = args->dropout_y.seed ? &args->dropout_y : &args->dropout_x;
  cpu_dropout_t dropout[2];
  for (int k = 0; k < 2; ++k) cpu_dropout_init(&dropout[k], dropped, end * args->cols);
  const fused_t fused = {dropped->seed ? dropout : NULL, end * args->cols,
                         row_ahead(args->grad_sum_stride, args->cols, sizeof(T), 2),
                         args->dropout_y.seed != NULL};
  switch (pairs ? 8 * want.centered + 4 * want.x + 2 * want.weight + want.bias : 0) {
    case 15:
      NAME(backward_pairs)(args, sums, &fused, begin, end, (wanted_t){1, 1, 1, 1}, stream);
      return;
    case 6:
      NAME(backward_pairs)(args, sums, &fused, begin, end, (wanted_t){0, 1, 1, 0}, stream);
      return;
  }
  for (int64_t r = begin; r < end; ++r) NAME(fused_row)(args, sums, &fused, r, &want, stream);
}

/* A part's sums in the scratch. */
ALWAYS_INLINE NAME(sums_t) NAME(part_sums)(const norm_backward_args *args, int64_t part) {
  const int64_t wide = norm_wide_cols(args->cols);
  const int64_t part_bytes = norm_partial_part(args);
  NAME(sums_t) sums = {0};
  char *next = (char *)args->partial + part * part_bytes;
  if (args->grad_weight)
    sums.weight = (double *)(void *)next, next += wide * (int64_t)sizeof(double);
  if (args->grad_bias) sums.bias = (double *)(void *)next, next += wide * (int64_t)sizeof(double);
  if (args->grad_weight)
    sums.weight_rows = (ACC *)(void *)next, next += wide * (int64_t)sizeof(ACC);
  if (args->grad_bias) sums.bias_rows = (ACC *)(void *)next;
  return sums;
}

ALWAYS_INLINE void NAME(flush_sums)(double *restrict sums, ACC *restrict rows, int64_t wide,
                                    int first) {
  if (!sums) return;
  if (first) {
    for (int64_t i = 0; i < wide; ++i) sums[i] = (double)rows[i];
  } else {
    for (int64_t i = 0; i < wide; ++i) sums[i] += (double)rows[i];
  }
}

static void NAME(norm_backward)(const norm_backward_args *args, int64_t part) {
  const int64_t part_rows = norm_part_rows(args->rows, args->cols),
                wide = norm_wide_cols(args->cols);
  const int64_t first = part * part_rows,
                last = first + part_rows < args->rows ? first + part_rows : args->rows;
  const int64_t tensors = 3 + (args->grad_sum != NULL) + (args->grad_dropped != NULL);
  const int stream =
      args->grad_x && cpu_should_stream(tensors * args->rows * args->cols * (int64_t)sizeof(T));
  const int fused = args->grad_sum || args->grad_dropped || args->dropout_y.seed;
  const NAME(sums_t) sums = NAME(part_sums)(args, part);
  const wanted_t want = {args->mean != NULL, args->grad_x != NULL, args->grad_weight != NULL,
                         args->grad_bias != NULL};
  /* Two rows are streamed together only where both can begin at 64 bytes in the same column. */
  const int pairs =
      PAIRS && sizeof(ACC) == 4 && (!stream || args->cols * (int64_t)sizeof(T) % 64 == 0);
  for (int64_t r = first; r < last; r += FLUSH_ROWS) {
    const int64_t end = r + FLUSH_ROWS < last ? r + FLUSH_ROWS : last;
    if (want.weight) memset(sums.weight_rows, 0, (size_t)wide * sizeof(ACC));
    if (want.bias) memset(sums.bias_rows, 0, (size_t)wide * sizeof(ACC));
    if (fused) {
      NAME(fused_rows)(args, &sums, r, end, want, pairs, stream);
    } else {
      NAME(backward_rows)(args, &sums, r, end, want, pairs, stream);
    }
    NAME(flush_sums)(sums.weight, sums.weight_rows, wide, r == first);
    NAME(flush_sums)(sums.bias, sums.bias_rows, wide, r == first);
  }
  if (stream) stream_fence();
}

/* Adds the parts' sums for one tile of columns and stores them. */
ALWAYS_INLINE void NAME(add_parts)(const norm_backward_args *args, int64_t tile, int bias) {
  const int64_t parts = norm_parts(args->rows, args->cols), begin = tile * NORM_TILE;
  const int64_t end = args->cols - begin < NORM_TILE ? args->cols : begin + NORM_TILE;
  const wide_place_t place = NAME(wide_place)(0, args->cols);
  double total[NORM_TILE] = {0};
  for (int64_t part = 0; part < parts; ++part) {
    const NAME(sums_t) sums = NAME(part_sums)(args, part);
    for (int64_t c = begin; c < end; c += BLOCK) {
      const double *p = (bias ? sums.bias : sums.weight) + NAME(wide_index)(c);
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + k] += p[place.lower + k];
      for (int k = 0; k < BLOCK / 2; ++k) total[c - begin + BLOCK / 2 + k] += p[place.upper + k];
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
