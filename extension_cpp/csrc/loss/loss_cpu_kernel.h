/* CPU kernels for the losses of rows and their gradients. loss_cpu.c compiles this file once per
 * element type (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */
#include "rows/cpu_sum_exp_kernel.h"

/* Values that a call computes once, before its first row. */
typedef struct {
  NAME(map_t) map;
  double weights; /* sum of the class weights */
  int form;       /* flags of rows/cpu_sum_exp.h */
  int stream;
} NAME(call_t);

static NAME(call_t)
    NAME(begin_call)(const loss_rows *rows, const void *grad_logits, int has_entropy) {
  const int64_t numel = rows->outer * rows->cols * rows->inner;
  const double softcap = rows->options.softcap;
  NAME(call_t)
  call = {.map = {(ACC)rows->scale, (ACC)softcap, (ACC)(softcap > 0 ? 1 / softcap : 0)}};
  call.form = (softcap > 0 ? SOFTCAP : 0) | (has_entropy ? ENTROPY : 0) |
              (rows->options.label_smoothing != 0 ? SMOOTH : 0);
  call.stream = grad_logits && grad_logits != rows->logits &&
                cpu_should_stream(2 * numel * (int64_t)sizeof(T));
  call.weights = rows->weight_sum ? (double)*(const ACC *)rows->weight_sum : (double)rows->cols;
  return call;
}

ALWAYS_INLINE ACC NAME(weight_of)(const loss_rows *rows, int64_t c) {
  return rows->weight ? ((const ACC *)rows->weight)[c] : 1;
}

/* ---- forward ---- */

/* Writes the results of row r, and returns its gradient. x points to the row's logits, which are
 * `inner` elements apart. `smooth` is the sum of w_c * (z_c - max). */
static gradient_t NAME(finish_row)(const loss_forward_args *args, const NAME(call_t) * call,
                                   int64_t r, const T *x, NAME(sums_t) sums, double smooth) {
  const loss_rows *rows = &args->rows;
  const int64_t target = rows->target[r];
  const double max = (double)sums.max, log_sum = log(sums.sum), lse = max + log_sum;
  const double grad = args->grad_logits ? (double)*(const ACC *)args->grad_scale : 0;
  ACC *saved = (ACC *)args->lse + 2 * r;
  saved[0] = (ACC)lse;
  saved[1] = (ACC)(log_sum - ((double)saved[0] - max));
  if (is_ignored(rows, target, args->entropy != NULL)) {
    ((ACC *)args->loss)[r] = 0;
    return constant_gradient(0);
  }
  if (is_outside(rows, target)) {
    ((ACC *)args->loss)[r] = (ACC)NAN;
    if (args->entropy) ((ACC *)args->entropy)[r] = (ACC)NAN;
    return constant_gradient((double)NAN);
  }
  const ACC x_target = (ACC)NAME(widen)(x[target * rows->inner]);
  /* The formula z - lse would be less exact, because lse loses digits of log_sum if max is
   * large. */
  const double z = (double)NAME(map_one)(x_target, call->map, call->form);
  const double log_prob = z - max - log_sum;
  if (args->entropy) {
    const double entropy = log_sum - sums.products / sums.sum;
    /* Rounding may give the results the wrong sign. */
    ((ACC *)args->loss)[r] = (ACC)(log_prob > 0 ? 0 : log_prob);
    ((ACC *)args->entropy)[r] = (ACC)(entropy < 0 ? 0 : entropy);
    return log_prob_gradient(rows, target, max, 1 / sums.sum, entropy, grad, 0);
  }
  const double s = rows->options.label_smoothing, weight = (double)NAME(weight_of)(rows, target);
  double loss = weight * (1 - s) * -log_prob;
  if (rows->options.z_loss != 0) loss += weight * rows->options.z_loss * lse * lse;
  if (s != 0) loss += s / (double)rows->cols * (call->weights * log_sum - smooth);
  ((ACC *)args->loss)[r] = (ACC)loss;
  return cross_entropy_gradient(rows, target, weight, call->weights, max, 1 / sums.sum, lse, grad);
}

NOINLINE NAME(sums_t) NAME(entropy_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  return NAME(row_sums)(x, cols, map, ENTROPY);
}

NOINLINE NAME(sums_t) NAME(softcap_sums)(const T *x, int64_t cols, NAME(map_t) map) {
  return NAME(row_sums)(x, cols, map, SOFTCAP);
}

/* Loads the weights of a block's columns, in block order. Lanes past the last column become 0. */
ALWAYS_INLINE void NAME(load_weight)(ACC *restrict w, const loss_rows *rows, int64_t c, int n) {
  for (int k = 0; k < BLOCK; ++k)
    w[k] = NAME(column)(k) < n ? NAME(weight_of)(rows, c + NAME(column)(k)) : 0;
}

/* Returns the sum of w_c * (z_c - max). */
NOINLINE double NAME(smooth_sum)(const loss_rows *rows, const T *x, ACC max, NAME(map_t) map,
                                 int form) {
  double total = 0;
  ACC sum[BLOCK] = {0}, shift[BLOCK];
  for (int k = 0; k < BLOCK; ++k) shift[k] = max;
  for (int64_t c = 0; c < rows->cols; c += BLOCK) {
    const int n = rows->cols - c < BLOCK ? (int)(rows->cols - c) : BLOCK;
    ACC v[BLOCK], w[BLOCK];
    NAME(load_zeros)(v, x + c, n);
    NAME(map_block)(v, map, shift, form);
    NAME(load_weight)(w, rows, c, n);
    for (int k = 0; k < BLOCK; ++k) sum[k] = FMA(w[k], v[k], sum[k]);
    if (c % SUM_EXP_COLS != SUM_EXP_COLS - BLOCK && c + BLOCK < rows->cols) continue;
    total += FOLD(sum);
    for (int k = 0; k < BLOCK; ++k) sum[k] = 0;
  }
  return total;
}

/* ---- gradient of a row, for forward and for backward ---- */

/* Replaces x by z - shift. With SOFTCAP the function also sets slope to dz/dx. dz/dx is computed
 * from tanh and not from z, because (z - shift) + shift has lost digits of z. */
ALWAYS_INLINE void NAME(map_with_slope)(ACC *restrict x, ACC *restrict slope, NAME(map_t) map,
                                        const ACC *restrict shift, int form) {
  if (!(form & SOFTCAP)) {
    NAME(map_block)(x, map, shift, form);
    return;
  }
  for (int k = 0; k < BLOCK; ++k) {
    const ACC tanh = TANH(x[k] * map.inverse);
    slope[k] = FMA(-tanh, tanh, (ACC)1);
    x[k] = map.softcap * tanh - shift[k];
  }
}

/* Computes n columns of a row's gradient, beginning with column c. With form = 0 (no flags), exp
 * takes most of the time. */
ALWAYS_INLINE void NAME(gradient_block)(const loss_rows *rows, const T *x, T *out, gradient_t g,
                                        NAME(map_t) map, int64_t c, int n, int form, int stream) {
  const ACC factor = (ACC)g.factor;
  ACC v[BLOCK], slope[BLOCK], shift[BLOCK];
  for (int k = 0; k < BLOCK; ++k) shift[k] = (ACC)g.shift;
  LOAD(v, x + c, n);
  NAME(map_with_slope)(v, slope, map, shift, form);
  if (form & ENTROPY) {
    const ACC entropy_factor = (ACC)g.entropy_factor, entropy = (ACC)g.entropy;
    for (int k = 0; k < BLOCK; ++k) {
      const ACC d = v[k] < EXP_ZERO(v[k]) ? EXP_ZERO(v[k]) : v[k];
      v[k] = NAME(exp_value)(d) * FMA(entropy_factor, d + entropy, factor);
    }
  } else {
    for (int k = 0; k < BLOCK; ++k) v[k] = NAME(exp_value)(v[k]) * factor;
  }
  if (form & SMOOTH) {
    ACC w[BLOCK];
    NAME(load_weight)(w, rows, c, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = FMA(-(ACC)g.smooth, w[k], v[k]);
  }
  if (form & TARGET) {
    const int64_t at = g.target - c;
    for (int k = 0; k < BLOCK; ++k) v[k] -= NAME(column)(k) == at ? (ACC)g.at_target : 0;
  }
  if (form & SOFTCAP) {
    for (int k = 0; k < BLOCK; ++k) v[k] *= slope[k];
  }
  STORE(out + c, v, n, stream);
}

/* Computes the gradient of a block of columns that contains the target, or of a partial block. */
NOINLINE void NAME(gradient_part)(const loss_rows *rows, const T *x, T *out, const gradient_t *g,
                                  NAME(map_t) map, int64_t c, int n, int form) {
  NAME(gradient_block)(rows, x, out, *g, map, c, n, form | TARGET, 0);
}

NOINLINE void NAME(plain_row)(const loss_rows *rows, const T *x, T *out, const gradient_t *g,
                              NAME(map_t) map, int stream) {
  const gradient_t row = *g;
  const int64_t cols = rows->cols;
  const row_span_t span = row_span(out, cols, sizeof(T), stream, x == out);
  int64_t c = span.begin;
  if (c > 0) {
    NAME(gradient_part)(rows, x, out, g, map, 0, BLOCK, 0);
    NAME(gradient_part)(rows, x, out, g, map, span.head, BLOCK, 0);
  }
  const int64_t target_block = row.target < c ? -1 : c + (row.target - c) / BLOCK * BLOCK;
  for (; c + BLOCK <= cols; c += BLOCK) {
    if (c == target_block) {
      NAME(gradient_part)(rows, x, out, g, map, c, BLOCK, 0);
    } else {
      NAME(gradient_block)(rows, x, out, row, map, c, BLOCK, 0, c < span.end);
    }
  }
  if (c == cols) return;
  if (!span.partial) c = cols - BLOCK;
  NAME(gradient_part)(rows, x, out, g, map, c, (int)(cols - c), 0);
}

NOINLINE void NAME(form_row)(const loss_rows *rows, const T *x, T *out, const gradient_t *g,
                             NAME(map_t) map, int form) {
  for (int64_t c = 0; c < rows->cols; c += BLOCK) {
    const int n = rows->cols - c < BLOCK ? (int)(rows->cols - c) : BLOCK;
    NAME(gradient_part)(rows, x, out, g, map, c, n, form);
  }
}

NOINLINE void NAME(fill_row)(T *out, int64_t cols, ACC value) {
  ACC v[BLOCK];
  for (int k = 0; k < BLOCK; ++k) v[k] = value;
  for (int64_t c = 0; c < cols; c += BLOCK)
    STORE(out + c, v, cols - c < BLOCK ? (int)(cols - c) : BLOCK, 0);
}

static void NAME(row_gradient)(const loss_rows *rows, const T *x, T *out, gradient_t g,
                               const NAME(call_t) * call, int form) {
  if (g.target < 0) {
    NAME(fill_row)(out, rows->cols, (ACC)g.factor);
  } else if (form) {
    NAME(form_row)(rows, x, out, &g, call->map, form);
  } else {
    NAME(plain_row)(rows, x, out, &g, call->map, call->stream);
  }
}

/* ---- rows ---- */

static void NAME(forward_row)(const loss_forward_args *args, const NAME(call_t) * call, int64_t r) {
  const loss_rows *rows = &args->rows;
  const T *x = (const T *)rows->logits + r * rows->outer_stride;
  const NAME(sums_t) sums = call->form & ENTROPY   ? NAME(entropy_sums)(x, rows->cols, call->map)
                            : call->form & SOFTCAP ? NAME(softcap_sums)(x, rows->cols, call->map)
                                                   : NAME(plain_sums)(x, rows->cols, call->map);
  double smooth = 0;
  if (call->form & SMOOTH)
    smooth = NAME(smooth_sum)(rows, x, sums.max, call->map, call->form & SOFTCAP);
  const gradient_t g = NAME(finish_row)(args, call, r, x, sums, smooth);
  if (args->grad_logits) {
    T *out = (T *)args->grad_logits + r * rows->cols;
    NAME(row_gradient)(rows, x, out, g, call, call->form & ~ENTROPY);
  }
}

/* Returns the gradient of row r, computed from the values that forward saved. */
static gradient_t NAME(backward_gradient)(const loss_backward_args *args, const NAME(call_t) * call,
                                          int64_t r) {
  const loss_rows *rows = &args->rows;
  const int64_t target = rows->target[r];
  if (is_ignored(rows, target, args->entropy != NULL)) return constant_gradient(0);
  if (is_outside(rows, target)) return constant_gradient((double)NAN);
  const ACC *lse = (const ACC *)args->lse + 2 * r;
  /* exp(z - shift) uses the rounded lse. The factor `inverse` corrects for its rounding error. */
  const double shift = (double)lse[0], rest = (double)lse[1], inverse = exp(-rest);
  const double total = args->total ? (double)*(const ACC *)args->total : 1;
  const double grad = number(args->grad_dtype, args->grad_loss, r * args->grad_stride) / total;
  if (args->entropy) {
    const double entropy = (double)((const ACC *)args->entropy)[r];
    return log_prob_gradient(rows, target, shift, inverse, entropy - rest, grad,
                             number(args->grad_dtype, args->grad_entropy, r));
  }
  return cross_entropy_gradient(rows, target, (double)NAME(weight_of)(rows, target), call->weights,
                                shift, inverse, shift + rest, grad);
}

#include "loss/loss_cpu_tile_kernel.h"

static void NAME(loss_forward)(const loss_forward_args *args, int64_t begin, int64_t end) {
  const NAME(call_t) call = NAME(begin_call)(&args->rows, args->grad_logits, args->entropy != NULL);
  for (int64_t item = begin; item < end; ++item) {
    if (args->rows.inner == 1) {
      NAME(forward_row)(args, &call, item);
    } else {
      NAME(forward_tile)(args, &call, item);
    }
  }
  if (call.stream) stream_fence();
}

static void NAME(loss_backward)(const loss_backward_args *args, int64_t begin, int64_t end) {
  const loss_rows *rows = &args->rows;
  const NAME(call_t) call = NAME(begin_call)(rows, args->grad_logits, args->entropy != NULL);
  for (int64_t item = begin; item < end; ++item) {
    if (rows->inner == 1) {
      NAME(row_gradient)
      (rows, (const T *)rows->logits + item * rows->outer_stride,
       (T *)args->grad_logits + item * rows->cols, NAME(backward_gradient)(args, &call, item),
       &call, call.form);
    } else {
      NAME(backward_tile)(args, &call, item);
    }
  }
  if (call.stream) stream_fence();
}

ALWAYS_INLINE void NAME(loss_scale_block)(const loss_scale_args *args, int64_t i, int n,
                                          int stream) {
  const ACC factor = *(const ACC *)args->factor;
  ACC x[BLOCK];
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] *= factor;
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(loss_scale)(const loss_scale_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(loss_scale_block), args, begin, end, (T *)args->y + begin, stream);
}
