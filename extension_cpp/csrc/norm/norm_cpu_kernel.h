/* Compiled once per element type by norm_cpu.c (common/for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

/* ---- wide arrays: weight, bias and the sums over rows (norm_cpu.c says how they lie) ---- */

/* In column order by one loop: of two, gcc copies the second in pieces, and who then reads them as one waits for all. */
ALWAYS_INLINE void NAME(load_wide)(ACC *restrict v, const ACC *wide, wide_place_t place,
                                   int64_t c) {
  const ACC *p = wide + NAME(wide_index)(c);
  if (NAME(column)(1) == 1) {
    for (int k = 0; k < BLOCK; ++k) v[k] = p[k];
  } else {
    for (int k = 0; k < BLOCK / 2; ++k) v[k] = p[place.lower + k];
    for (int k = 0; k < BLOCK / 2; ++k) v[BLOCK / 2 + k] = p[place.upper + k];
  }
}

ALWAYS_INLINE void NAME(store_wide)(ACC *wide, wide_place_t place, int64_t c,
                                    const ACC *restrict v) {
  ACC *p = wide + NAME(wide_index)(c);
  if (NAME(column)(1) == 1) {
    for (int k = 0; k < BLOCK; ++k) p[k] = v[k];
  } else {
    for (int k = 0; k < BLOCK / 2; ++k) p[place.lower + k] = v[k];
    for (int k = 0; k < BLOCK / 2; ++k) p[place.upper + k] = v[BLOCK / 2 + k];
  }
}

static void NAME(norm_widen)(const norm_widen_args *args, int64_t begin, int64_t end) {
  const wide_place_t place = NAME(wide_place)(0, args->cols);
  /* Whoever has the last column fills the padding too. */
  const int64_t last = end == args->cols ? norm_wide_cols(end) : end;
  for (int64_t c = begin; c < last; c += BLOCK) {
    const int n = end - c >= BLOCK ? BLOCK : end > c ? (int)(end - c) : 0;
    ACC v[BLOCK];
    for (int k = 0; k < BLOCK; ++k) v[k] = NAME(column)(k) < n ? (ACC)args->value : 0;
    if (args->source && args->weight_dtype == args->dtype) {
      LOAD(v, (const T *)args->source + c, n);
    } else if (args->source) {
      float source[BLOCK];
      load_float32(source, (const float *)args->source + c, n);
      for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)source[NAME(column)(k)];
    }
    NAME(store_wide)((ACC *)args->wide, place, c, v);
  }
}

/* ---- loads ---- */

static __attribute__((noinline)) void NAME(load_part)(ACC *restrict v, const T *restrict p, int n) {
  LOAD(v, p, n);
}

/* n elements; less than a block through a function, which costs little there and saves most of the code's size. */
ALWAYS_INLINE void NAME(load_block)(ACC *restrict v, const T *restrict p, int n) {
  if (n == BLOCK) {
    LOAD(v, p, BLOCK);
  } else {
    NAME(load_part)(v, p, n);
  }
}

/* ---- forward ---- */

/* Adds n elements' d = x - shift to `sum` and d * d to `squares`; what is not `centered` has no shift and no sum. */
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

typedef struct {
  double first, second; /* the means of d and of d * d */
} NAME(moments_t);

ALWAYS_INLINE NAME(moments_t) NAME(moments)(const T *x, int64_t cols, ACC shift, int centered) {
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
  return (NAME(moments_t)){total / (double)cols, total_squares / (double)cols};
}

/* What turns a row of x into xhat: (x - mean) * rstd + offset, where `offset` makes up for the rounding of `mean`. */
typedef struct {
  ACC mean, rstd, offset;
} NAME(row_t);

/* Mean and variance in double, for rows whose squares leave float's range. */
static __attribute__((noinline)) void NAME(double_moments)(const T *x, int64_t cols, int centered,
                                                           double *mean, double *variance) {
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
  *mean = isnan(first) ? shift : shift + first;
  *variance = centered ? second - first * first : second;
}

/* The variance in one pass, as the mean of d * d less the square of d's mean, for d = x - shift with the mean of the first
 * block as shift. As exact as two passes while the shift is within a deviation or, for halves, four from the mean;
 * where it is not, and where there are NaNs, there is a second pass, which shifts by the mean. */
ALWAYS_INLINE NAME(row_t) NAME(row_statistics)(const T *x, int64_t cols, double eps, int centered) {
  const double reach = sizeof(T) == 2 ? 16 : 1;
  double mean = 0, variance;
  if (centered) {
    ACC shift = (ACC)NAME(moments)(x, cols < BLOCK ? cols : BLOCK, 0, 1).first;
    NAME(moments_t) m = NAME(moments)(x, cols, shift, 1);
    variance = m.second - m.first * m.first;
    if (!(m.first * m.first <= reach * variance)) {
      shift = (ACC)NAME(moments)(x, cols, 0, 1).first;
      m = NAME(moments)(x, cols, shift, 1);
      variance = m.second - m.first * m.first;
    }
    mean = isnan(m.first) ? (double)shift : (double)shift + m.first; /* an infinite mean stays */
  } else {
    variance = NAME(moments)(x, cols, 0, 0).second;
  }
  if (sizeof(ACC) == 4 && !(variance + eps >= 0x1p-100 && variance < (double)INFINITY)) {
    NAME(double_moments)(x, cols, centered, &mean, &variance);
  }
  const double rstd = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
  const ACC rounded = (ACC)mean;
  return (NAME(row_t)){rounded, (ACC)rstd, (ACC)(((double)rounded - mean) * rstd)};
}

/* n elements of a row from column c on; `dropout` NULL: none. */
ALWAYS_INLINE void NAME(forward_block)(const norm_forward_args *args, const T *x, T *y,
                                       NAME(row_t) row, wide_place_t place, ahead_t ahead,
                                       cpu_dropout_t *dropout, int64_t c, int n, int centered,
                                       int stream) {
  ACC v[BLOCK], weight[BLOCK], bias[BLOCK];
  prefetch_later(x + c, BLOCK * sizeof(T), ahead);
  NAME(load_block)(v, x + c, n);
  NAME(load_wide)(weight, (const ACC *)args->weight, place, c);
  if (centered) {
    NAME(load_wide)(bias, (const ACC *)args->bias, place, c);
    for (int k = 0; k < BLOCK; ++k) v[k] = FMA(v[k] - row.mean, row.rstd, row.offset);
    for (int k = 0; k < BLOCK; ++k) v[k] = FMA(v[k], weight[k], bias[k]);
  } else {
    for (int k = 0; k < BLOCK; ++k) v[k] = v[k] * row.rstd * weight[k];
  }
  if (dropout) NAME(dropout_block)(v, dropout, y + c - (T *)args->y);
  STORE(y + c, v, n, stream);
}

/* Part of a block: a function of its own, since loads and stores of a variable width are long. */
static __attribute__((noinline)) void NAME(forward_part)(const norm_forward_args *args, const T *x,
                                                         T *y, const NAME(row_t) * row,
                                                         cpu_dropout_t *dropout, int64_t c, int n) {
  NAME(forward_block)
  (args, x, y, *row, NAME(wide_place)(c, args->cols), (ahead_t){0}, dropout, c, n, args->centered,
   0);
}

/* Elements up to the next 64 bytes from p on, where the rest of a row can be streamed; 0 if that is no gain. */
ALWAYS_INLINE int64_t NAME(row_head)(const T *p, int64_t cols, int gains) {
  const int64_t head = (int64_t)((64 - (uintptr_t)p % 64) % 64 / sizeof(T));
  return gains && head < cols ? head : 0;
}

ALWAYS_INLINE void NAME(forward_row)(const norm_forward_args *args, const T *x, int64_t r,
                                     ahead_t ahead, cpu_dropout_t *dropout, int centered,
                                     int stream) {
  const int64_t cols = args->cols;
  T *y = (T *)args->y + r * cols;
  const NAME(row_t) row = NAME(row_statistics)(x, cols, args->eps, centered);
  if (args->mean) ((ACC *)args->mean)[r] = row.mean;
  if (args->rstd) ((ACC *)args->rstd)[r] = row.rstd;
  /* Stores that split cache lines are most of rms_norm's time in float32; for half types the head costs more. */
  int64_t c = NAME(row_head)(y, cols, stream || (sizeof(T) >= 4 && cols >= 512));
  if (c > 0) NAME(forward_part)(args, x, y, &row, dropout, 0, (int)c);
  const wide_place_t place = NAME(wide_place)(c, cols);
  const int64_t blocks_end = cols - (cols - c) % BLOCK;
  if (stream && (uintptr_t)(y + c) % 64 == 0) {
    for (; c < blocks_end; c += BLOCK) {
      NAME(forward_block)(args, x, y, row, place, ahead, dropout, c, BLOCK, centered, 1);
    }
  } else {
    for (; c < blocks_end; c += BLOCK) {
      NAME(forward_block)(args, x, y, row, place, ahead, dropout, c, BLOCK, centered, 0);
    }
  }
  if (c < cols) NAME(forward_part)(args, x, y, &row, dropout, c, (int)(cols - c));
}

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

/* sum's row r, which the norm then reads from the caches. */
static __attribute__((noinline)) void NAME(add_row)(const norm_forward_args *args, int64_t r,
                                                    cpu_dropout_t *dropout) {
  const int64_t cols = args->cols, blocks_end = cols - cols % BLOCK;
  const ahead_t x_ahead = row_ahead(args->x_stride, cols, sizeof(T), 1);
  const ahead_t residual_ahead = row_ahead(args->residual_stride, cols, sizeof(T), 1);
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

ALWAYS_INLINE void NAME(forward_rows)(const norm_forward_args *args, int64_t begin, int64_t end,
                                      cpu_dropout_t *dropout_y, int centered) {
  const int64_t tensors = args->residual ? 4 : 2;
  const int stream = cpu_should_stream(tensors * args->rows * args->cols * (int64_t)sizeof(T));
  const T *x = args->residual ? args->sum : args->x;
  const int64_t x_stride = args->residual ? args->cols : args->x_stride;
  const ahead_t ahead = row_ahead(args->residual ? 0 : x_stride, args->cols, sizeof(T), 1);
  cpu_dropout_t dropout_x;
  cpu_dropout_init(&dropout_x, &args->dropout_x, end * args->cols);
  for (int64_t r = begin; r < end; ++r) {
    if (args->residual) NAME(add_row)(args, r, args->dropout_x.seed ? &dropout_x : NULL);
    NAME(forward_row)(args, x + r * x_stride, r, ahead, dropout_y, centered, stream);
  }
  if (stream) stream_fence();
}

static void NAME(norm_forward)(const norm_forward_args *args, int64_t begin, int64_t end) {
  cpu_dropout_t dropout_y;
  cpu_dropout_init(&dropout_y, &args->dropout_y, end * args->cols);
  if (args->dropout_y.seed) {
    NAME(forward_rows)(args, begin, end, &dropout_y, 1);
  } else if (args->centered) {
    NAME(forward_rows)(args, begin, end, NULL, 1);
  } else {
    NAME(forward_rows)(args, begin, end, NULL, 0);
  }
}

#include "norm/norm_cpu_backward_kernel.h"
