/* Forward of layer_norm and rms_norm, and functions that backward shares with it. norm_cpu.c
 * compiles this file once per element type (for_each_dtype.h defines T, ACC, NAME, LOAD and
 * STORE). */

/* ---- wide arrays: weight, bias and the sums over rows (norm.h) ----
 *
 * Wide arrays are in column order, except for bfloat16, where all even columns come before all odd
 * ones. Each half of a block in block order is then contiguous, whatever column the block begins
 * at. The halves of the block at column c begin at wide_index(c) + lower and wide_index(c) + upper.
 * These two offsets depend only on whether c is even or odd. */

ALWAYS_INLINE int64_t NAME(wide_index)(int64_t c) { return NAME(column)(1) == 1 ? c : c / 2; }

ALWAYS_INLINE wide_halves_t NAME(wide_halves)(int64_t c, int64_t cols) {
  const int64_t odd = norm_wide_cols(cols) / 2;
  if (NAME(column)(1) == 1) return (wide_halves_t){0, BLOCK / 2};
  return c % 2 ? (wide_halves_t){odd, 1} : (wide_halves_t){0, odd};
}

/* Loads a block from a wide array. Column order needs a single loop. With two loops, gcc would
 * write the second half in several stores, for which a load of the whole block would wait. */
ALWAYS_INLINE void NAME(load_wide)(ACC *restrict v, const ACC *wide, wide_halves_t halves,
                                   int64_t c) {
  const ACC *p = wide + NAME(wide_index)(c);
  if (NAME(column)(1) == 1) {
    for (int k = 0; k < BLOCK; ++k) v[k] = p[k];
  } else {
    for (int k = 0; k < BLOCK / 2; ++k) v[k] = p[halves.lower + k];
    for (int k = 0; k < BLOCK / 2; ++k) v[BLOCK / 2 + k] = p[halves.upper + k];
  }
}

ALWAYS_INLINE void NAME(store_wide)(ACC *wide, wide_halves_t halves, int64_t c,
                                    const ACC *restrict v) {
  ACC *p = wide + NAME(wide_index)(c);
  for (int k = 0; k < BLOCK / 2; ++k) p[halves.lower + k] = v[k];
  for (int k = 0; k < BLOCK / 2; ++k) p[halves.upper + k] = v[BLOCK / 2 + k];
}

static void NAME(norm_widen)(const norm_widen_args *args, int64_t begin, int64_t end) {
  const wide_halves_t halves = NAME(wide_halves)(0, args->cols);
  /* The call that contains the last column also fills the padding. */
  const int64_t last = end == args->cols ? norm_wide_cols(end) : end;
  const ACC value = (ACC)args->value;
  for (int64_t c = begin; c < last; c += BLOCK) {
    const int n = end - c >= BLOCK ? BLOCK : end > c ? (int)(end - c) : 0;
    ACC v[BLOCK];
    if (!args->source) {
      for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? value : 0;
    } else if (args->weight_dtype == args->dtype) {
      LOAD(v, (const T *)args->source + c, n);
    } else {
      float source[BLOCK];
      load_float32(source, (const float *)args->source + c, n);
      for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)source[NAME(column)(k)];
    }
    NAME(store_wide)((ACC *)args->wide, halves, c, v);
  }
}

/* ---- loads ---- */

NOINLINE void NAME(load_part)(ACC *restrict v, const T *restrict p, int n) { LOAD(v, p, n); }

/* Loads n elements. A partial block takes a function call, which costs little and saves much
 * code. */
ALWAYS_INLINE void NAME(load_block)(ACC *restrict v, const T *restrict p, int n) {
  if (n == BLOCK) {
    LOAD(v, p, BLOCK);
  } else {
    NAME(load_part)(v, p, n);
  }
}

/* ---- normalise: used by forward and by both passes of backward ---- */

/* The numbers of a row that normalise() needs. `offset` corrects for the rounding of `mean`: it is
 * (rounded mean - exact mean) * rstd. In backward `offset` is 0, because forward stores only
 * `mean`. */
typedef struct {
  ACC mean, rstd, offset;
} NAME(row_t);

/* Replaces x by xhat. */
ALWAYS_INLINE void NAME(normalise)(ACC *restrict x, NAME(row_t) row, int centered) {
  if (centered) {
    for (int k = 0; k < BLOCK; ++k) x[k] = FMA(x[k] - row.mean, row.rstd, row.offset);
  } else {
    for (int k = 0; k < BLOCK; ++k) x[k] *= row.rstd;
  }
}

/* ---- statistics of a row ---- */

/* Adds d = x - shift of n elements to `sum`, and d * d to `squares`. Without `centered` the shift
 * is 0 and `sum` is not used. */
ALWAYS_INLINE void NAME(moments_block)(ACC *restrict sum, ACC *restrict squares, const T *x,
                                       ACC shift, int n, int centered) {
  ACC d[BLOCK];
  NAME(load_block)(d, x, n);
  if (centered) {
    for (int k = 0; k < BLOCK; ++k) d[k] -= shift;
    if (n < BLOCK) {
      for (int k = 0; k < BLOCK; ++k) d[k] = NAME(column)(k) < n ? d[k] : 0;
    }
    for (int k = 0; k < BLOCK; ++k) sum[k] += d[k];
  }
  for (int k = 0; k < BLOCK; ++k) squares[k] = FMA(d[k], d[k], squares[k]);
}

/* Computes the moments in double, for rows whose squares leave float's range and for NaN. */
NOINLINE moments_t NAME(double_moments)(const T *x, int64_t cols, int centered) {
  double shift = 0, first = 0, second = 0;
  for (int pass = !centered; pass < 2; ++pass) {
    shift += first;
    first = second = 0;
    for (int64_t c = 0; c < cols; c += BLOCK) {
      const int n = cols - c < BLOCK ? (int)(cols - c) : BLOCK;
      ACC v[BLOCK];
      NAME(load_part)(v, x + c, n);
      for (int k = 0; k < BLOCK; ++k) {
        const double d = NAME(column)(k) < n ? (double)v[k] - shift : 0;
        first += d;
        second += d * d;
      }
    }
    first /= (double)cols;
    second /= (double)cols;
  }
  /* If the mean is infinite, `first` is NaN and `shift` is the mean. */
  return (moments_t){isnan(first) ? shift : shift + first,
                     centered ? second - first * first : second};
}

/* Returns the moments of d = x - shift. */
ALWAYS_INLINE moments_t NAME(moments)(const T *x, int64_t cols, ACC shift, int centered) {
  double total = 0, total_squares = 0;
  for (int64_t c = 0; c < cols;) {
    const int64_t end = cols - c < FLUSH_COLS ? cols : c + FLUSH_COLS;
    ACC sum[BLOCK] = {0}, squares[BLOCK] = {0};
    for (; c + BLOCK <= end; c += BLOCK)
      NAME(moments_block)(sum, squares, x + c, shift, BLOCK, centered);
    if (c < end) NAME(moments_block)(sum, squares, x + c, shift, (int)(end - c), centered);
    if (centered) total += FOLD(sum);
    total_squares += FOLD(squares);
    c = end;
  }
  const double mean = total / (double)cols;
  return (moments_t){mean, total_squares / (double)cols - mean * mean};
}

NOINLINE moments_t NAME(moments_again)(const T *x, int64_t cols, ACC shift) {
  return NAME(moments)(x, cols, shift, 1);
}

/* Returns the mean of the first block of a row. */
ALWAYS_INLINE ACC NAME(first_mean)(const T *x, int64_t cols) {
  const int n = cols < BLOCK ? (int)cols : BLOCK;
  ACC v[BLOCK];
  NAME(load_block)(v, x, n);
  return (ACC)(FOLD(v) / n);
}

/* Returns the statistics of a row. One pass computes the variance as mean(d * d) - mean(d)^2 with d
 * = x - shift, where shift is the mean of the first block. This is as exact as two passes if the
 * shift is within one standard deviation of the mean (four for half types). Otherwise a second pass
 * uses the mean as shift. */
ALWAYS_INLINE NAME(row_t) NAME(row_statistics)(const T *x, int64_t cols, double eps, int centered) {
  const double reach = sizeof(T) == 2 ? 16 : 1;
  ACC shift = centered ? NAME(first_mean)(x, cols) : 0;
  moments_t m = NAME(moments)(x, cols, shift, centered);
  if (!(m.mean * m.mean <= reach * m.variance)) {
    shift += (ACC)m.mean;
    m = NAME(moments_again)(x, cols, shift);
  }
  m.mean += (double)shift;
  if (!(m.variance + eps >= 0x1p-100 && m.variance < (double)INFINITY))
    m = NAME(double_moments)(x, cols, centered);
  const double rstd = 1 / sqrt((m.variance < 0 ? 0 : m.variance) + eps);
  const ACC mean = (ACC)m.mean;
  return (NAME(row_t)){mean, (ACC)rstd, (ACC)(((double)mean - m.mean) * rstd)};
}

/* ---- beginning of forward: sum = residual + dropout_x(x) ---- */

ALWAYS_INLINE void NAME(add_block)(const norm_forward_args *args, int64_t r, ahead_t x_ahead,
                                   ahead_t residual_ahead, cpu_dropout_t *dropout, int64_t c,
                                   int n) {
  const T *x = (const T *)args->x + r * args->x_stride + c;
  const T *residual = (const T *)args->residual + r * args->residual_stride + c;
  ACC v[BLOCK], add[BLOCK];
  prefetch_later(x, BLOCK * sizeof(T), x_ahead);
  prefetch_later(residual, BLOCK * sizeof(T), residual_ahead);
  NAME(load_block)(v, x, n);
  NAME(load_block)(add, residual, n);
  if (dropout) NAME(dropout_block)(v, dropout, r * args->cols + c);
  for (int k = 0; k < BLOCK; ++k) v[k] += add[k];
  STORE((T *)args->sum + r * args->cols + c, v, n, 0);
}

/* Writes row r of sum. The norm then reads it from the caches. */
NOINLINE void NAME(add_row)(const norm_forward_args *args, int64_t r, cpu_dropout_t *dropout) {
  const int64_t cols = args->cols, blocks_end = cols - cols % BLOCK;
  const ahead_t x_ahead = row_ahead(args->x_stride, cols, sizeof(T));
  const ahead_t residual_ahead = row_ahead(args->residual_stride, cols, sizeof(T));
  int64_t c = 0;
  if (dropout) {
    for (; c < blocks_end; c += BLOCK)
      NAME(add_block)(args, r, x_ahead, residual_ahead, dropout, c, BLOCK);
  } else {
    for (; c < blocks_end; c += BLOCK)
      NAME(add_block)(args, r, x_ahead, residual_ahead, NULL, c, BLOCK);
  }
  if (c < cols) NAME(add_block)(args, r, x_ahead, residual_ahead, dropout, c, (int)(cols - c));
}

/* ---- forward ---- */

/* Writes n elements of a row of y from column c on. `dropout` is the dropout of y, or NULL. */
ALWAYS_INLINE void NAME(forward_block)(const norm_forward_args *args, const T *x, T *y,
                                       NAME(row_t) row, wide_halves_t halves, ahead_t ahead,
                                       cpu_dropout_t *dropout, int64_t c, int n, int centered,
                                       int stream) {
  ACC v[BLOCK], weight[BLOCK], bias[BLOCK];
  prefetch_later(x + c, BLOCK * sizeof(T), ahead);
  NAME(load_block)(v, x + c, n);
  NAME(load_wide)(weight, (const ACC *)args->weight, halves, c);
  NAME(normalise)(v, row, centered);
  if (centered) {
    NAME(load_wide)(bias, (const ACC *)args->bias, halves, c);
    for (int k = 0; k < BLOCK; ++k) v[k] = FMA(v[k], weight[k], bias[k]);
  } else {
    for (int k = 0; k < BLOCK; ++k) v[k] *= weight[k];
  }
  if (dropout) NAME(dropout_block)(v, dropout, y + c - (T *)args->y); /* dropout of y */
  STORE(y + c, v, n, stream);
}

/* Writes a partial block. Not inlined, because loads and stores of n < BLOCK elements take much
 * code. */
NOINLINE void NAME(forward_part)(const norm_forward_args *args, const T *x, T *y,
                                 const NAME(row_t) * row, cpu_dropout_t *dropout, int64_t c,
                                 int n) {
  const wide_halves_t halves = NAME(wide_halves)(c, args->cols);
  NAME(forward_block)(args, x, y, *row, halves, (ahead_t){0}, dropout, c, n, args->centered, 0);
}

/* Returns the number of elements up to a multiple of 64 bytes, or 0 if aligned stores do not
 * pay. */
ALWAYS_INLINE int64_t NAME(row_head)(const T *p, int64_t cols, int pays) {
  const int64_t head = elements_to_line(p, sizeof(T));
  return pays && head < cols ? head : 0;
}

ALWAYS_INLINE void NAME(forward_row)(const norm_forward_args *args, const T *x, int64_t r,
                                     ahead_t ahead, cpu_dropout_t *dropout, int centered,
                                     int stream) {
  const int64_t cols = args->cols;
  T *y = (T *)args->y + r * cols;
  const NAME(row_t) row = NAME(row_statistics)(x, cols, args->eps, centered);
  if (args->mean) ((ACC *)args->mean)[r] = row.mean;
  if (args->rstd) ((ACC *)args->rstd)[r] = row.rstd;
  /* In float32, stores that straddle cache lines take most of rms_norm's time, so the row's first
   * elements are written separately. For half types this costs more than it saves. */
  int64_t c = NAME(row_head)(y, cols, stream || (sizeof(T) >= 4 && cols >= 512));
  if (c > 0) NAME(forward_part)(args, x, y, &row, dropout, 0, (int)c);
  const wide_halves_t halves = NAME(wide_halves)(c, cols);
  const int64_t blocks_end = cols - (cols - c) % BLOCK;
  /* There are two loops, because with a branch in each block layer_norm takes up to 9 % longer. */
  if (stream && (uintptr_t)(y + c) % 64 == 0) {
    for (; c < blocks_end; c += BLOCK)
      NAME(forward_block)(args, x, y, row, halves, ahead, dropout, c, BLOCK, centered, 1);
  } else {
    for (; c < blocks_end; c += BLOCK)
      NAME(forward_block)(args, x, y, row, halves, ahead, dropout, c, BLOCK, centered, 0);
  }
  if (c < cols) NAME(forward_part)(args, x, y, &row, dropout, c, (int)(cols - c));
}

ALWAYS_INLINE void NAME(forward_rows)(const norm_forward_args *args, int64_t begin, int64_t end,
                                      cpu_dropout_t *dropout_x, cpu_dropout_t *dropout_y,
                                      int centered) {
  const int64_t tensors = args->residual ? 4 : 2;
  const int stream = cpu_should_stream(tensors * args->rows * args->cols * (int64_t)sizeof(T));
  const T *x = args->residual ? args->sum : args->x;
  const int64_t x_stride = args->residual ? args->cols : args->x_stride;
  const ahead_t ahead = row_ahead(args->residual ? 0 : x_stride, args->cols, sizeof(T));
  for (int64_t r = begin; r < end; ++r) {
    if (args->residual) NAME(add_row)(args, r, args->dropout_x.seed ? dropout_x : NULL);
    NAME(forward_row)(args, x + r * x_stride, r, ahead, dropout_y, centered, stream);
  }
  if (stream) stream_fence();
}

static void NAME(norm_forward)(const norm_forward_args *args, int64_t begin, int64_t end) {
  cpu_dropout_t dropout;
  cpu_dropout_init(&dropout, args->residual ? &args->dropout_x : &args->dropout_y,
                   end * args->cols);
  if (args->dropout_y.seed) {
    NAME(forward_rows)(args, begin, end, NULL, &dropout, 1);
  } else if (args->centered) {
    NAME(forward_rows)(args, begin, end, &dropout, NULL, 1);
  } else {
    NAME(forward_rows)(args, begin, end, &dropout, NULL, 0);
  }
}

#include "norm/norm_cpu_backward_kernel.h"
