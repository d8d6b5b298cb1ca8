/* linear_recurrence and its gradient. scan_cpu_kernel.h includes this file at its end. */

/* ---- forward ---- */

ALWAYS_INLINE pair_sum_t NAME(recur_steps)(scan_input a, scan_input b, scan_output h, int64_t n,
                                           double start, int only_total, int stream) {
  pair_sum_t sum = {1, 0};
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
    ACC v[BLOCK], w[BLOCK];
    NAME(load_stride)(v, (const T *)a.data + i * a.step, a.step, count, 1);
    NAME(load_stride)(w, (const T *)b.data + i * b.step, b.step, count, 0);
    const pair_sum_t block = NAME(recur_block)(v, w, next_state(sum, start));
    sum = compose_sums(sum, block);
    if (only_total) continue;
    NAME(store_stride)((T *)h.data + i * h.step, h.step, w, count, stream, 1);
  }
  return sum;
}

/* Scans a row. If the strides `step` of all operands are 1, they become constants, so that the
 * lanes stay in registers. For float16 this saves a third of the time. */
NOINLINE pair_sum_t NAME(recur_row)(scan_input a, scan_input b, scan_output h, int64_t n,
                                    double start, int only_total, int stream) {
  if (a.step == 1 && b.step == 1 && h.step == 1) {
    a.step = b.step = h.step = 1;
    return NAME(recur_steps)(a, b, h, n, start, only_total, stream);
  }
  return NAME(recur_steps)(a, b, h, n, start, only_total, stream);
}

/* Advances a block of columns by one step, with factors v and terms w. h is the state, and w
 * becomes the new state. (sum_a, sum_b) is the pair that composes all steps of the part so far. */
ALWAYS_INLINE void NAME(recur_step)(const ACC *v, ACC *w, ACC *restrict h, ACC *restrict sum_a,
                                    ACC *restrict sum_b, int has_sum) {
  if (has_sum) {
    for (int k = 0; k < BLOCK; ++k) sum_b[k] = FMA(v[k], sum_b[k], w[k]);
    for (int k = 0; k < BLOCK; ++k) sum_a[k] *= v[k];
  }
  for (int k = 0; k < BLOCK; ++k) w[k] = FMA(v[k], h[k], w[k]);
  for (int k = 0; k < BLOCK; ++k) h[k] = w[k];
}

/* The states of a tile of columns. */
typedef struct {
  ACC h[SCAN_TILE], a[SCAN_TILE], b[SCAN_TILE];
} NAME(columns_t);

ALWAYS_INLINE void NAME(start_columns)(NAME(columns_t) * columns, const scan_item_t *item,
                                       const scan_state_t *state) {
  for (int k = 0; k < item->lanes; ++k) {
    columns->h[k] = (ACC)state->a[k];
    columns->a[k] = 1;
    columns->b[k] = 0;
  }
}

ALWAYS_INLINE void NAME(end_columns)(const NAME(columns_t) * columns, const scan_item_t *item,
                                     scan_state_t *total) {
  for (int k = 0; k < item->lanes; ++k) {
    total->a[k] = columns->a[k];
    total->b[k] = columns->b[k];
  }
}

NOINLINE void NAME(recur_columns)(scan_input a, scan_input b, scan_output h,
                                  const scan_item_t *item, NAME(columns_t) * columns,
                                  int only_total, int stream) {
  const int has_sum = only_total || !item->is_last;
  const int64_t ahead = NAME(steps_ahead)(item->width);
  for (int64_t i = 0; i < item->steps; ++i) {
    for (int c = 0; c < item->width; c += BLOCK) {
      const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
      ACC v[BLOCK], w[BLOCK];
      NAME(load_columns)
      (v, (const T *)a.data + i * a.step + c * a.inner, ahead * a.step, a.inner, n);
      NAME(load_columns)
      (w, (const T *)b.data + i * b.step + c * b.inner, ahead * b.step, b.inner, n);
      NAME(recur_step)(v, w, columns->h + c, columns->a + c, columns->b + c, has_sum);
      if (only_total) continue;
      NAME(store_columns)((T *)h.data + i * h.step + c * h.inner, h.inner, w, n, stream, 1);
    }
  }
}

/* Sets the state before the first step to h0, or to 0 if there is none. */
ALWAYS_INLINE void NAME(start_state)(scan_input h0, const scan_item_t *item, scan_state_t *state) {
  for (int k = 0; k < item->lanes; ++k) state->a[k] = 0;
  if (h0.data == NULL) return;
  const T *p = (const T *)NAME(input_part)(h0, item).data;
  for (int c = 0; c < item->width; c += BLOCK) {
    const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
    ACC v[BLOCK];
    NAME(load_columns)(v, p + c * h0.inner, 0, h0.inner, n);
    for (int k = 0; k < BLOCK && c + k < item->lanes; ++k) state->a[c + k] = (double)v[k];
  }
}

static void NAME(recurrence_start)(const void *recurrence, const scan_item_t *item,
                                   scan_state_t *state) {
  NAME(start_state)(((const linear_recurrence_args *)recurrence)->h0, item, state);
}

static void NAME(recurrence_part)(const void *recurrence, const scan_item_t *item,
                                  const scan_state_t *state, scan_state_t *total, int only_total) {
  const linear_recurrence_args *args = (const linear_recurrence_args *)recurrence;
  const scan_input a = NAME(input_part)(args->a, item), b = NAME(input_part)(args->b, item);
  const scan_output h = NAME(output_part)(args->h, item);
  const int stream = NAME(streams)(&args->shape, 3);
  if (args->shape.inner == 1) {
    const pair_sum_t sum = NAME(recur_row)(a, b, h, item->steps, state->a[0], only_total,
                                           stream && NAME(row_streams)(h));
    total->a[0] = sum.a;
    total->b[0] = sum.b;
  } else {
    NAME(columns_t) columns;
    NAME(start_columns)(&columns, item, state);
    NAME(recur_columns)(a, b, h, item, &columns, only_total, stream && NAME(tile_streams)(h));
    NAME(end_columns)(&columns, item, total);
  }
  if (stream) stream_fence();
}

static void NAME(recurrence_narrow)(const linear_recurrence_args *args, int64_t begin,
                                    int64_t end) {
  for (int64_t o = begin; o < end; ++o) {
    const scan_item_t item = {.shape = &args->shape, .outer = o};
    const scan_input a = NAME(input_part)(args->a, &item), b = NAME(input_part)(args->b, &item);
    const scan_output h = NAME(output_part)(args->h, &item);
    ACC state[SCAN_NARROW] = {0};
    if (args->h0.data != NULL) {
      const scan_input h0 = NAME(input_part)(args->h0, &item);
      for (int64_t i = 0; i < args->shape.inner; ++i)
        state[i] = (ACC)NAME(widen)(((const T *)h0.data)[i * h0.inner]);
    }
    for (int64_t k = 0; k < args->shape.length; ++k) {
      const T *of_a = (const T *)a.data + k * a.step, *of_b = (const T *)b.data + k * b.step;
      T *to = (T *)h.data + k * h.step;
      for (int64_t i = 0; i < args->shape.inner; ++i) {
        const ACC factor = (ACC)NAME(widen)(of_a[i * a.inner]);
        state[i] = FMA(factor, state[i], (ACC)NAME(widen)(of_b[i * b.inner]));
        to[i * h.inner] = NAME(narrow)(state[i]);
      }
    }
  }
}

static void NAME(recurrence)(const linear_recurrence_args *args, int64_t begin, int64_t end,
                             int only_total) {
  if (scan_is_narrow(&args->shape)) {
    NAME(recurrence_narrow)(args, begin, end);
    return;
  }
  const scan_op_t op = {NAME(recurrence_start), NAME(recurrence_part), join_pairs};
  scan_run(op, args, &args->shape, args->shape.length, begin, end, only_total);
}

/* ---- backward: u_k = grad_h_k + a_(k-1) u_(k-1), with k in the order of the kernel ---- */

/* Fills a block with `before` and then the first elements of x, so that lane k holds element k - 1.
 * Lanes from n on become `rest`. */
NOINLINE const T *NAME(gather_first)(T *restrict block, scan_input x, int n, ACC before, ACC rest) {
  block[0] = NAME(narrow)(before);
  for (int k = 1; k < BLOCK; ++k)
    block[k] = k < n ? ((const T *)x.data)[(k - 1) * x.step] : NAME(narrow)(rest);
  return block;
}

/* Loads the block of x that begins at step i - 1. The value before the first step of a line is
 * `before`. */
ALWAYS_INLINE void NAME(load_earlier)(ACC *v, scan_input x, int64_t i, int n, int is_first,
                                      ACC before, ACC rest) {
  T block[BLOCK];
  const T *from = (const T *)x.data + (i - 1) * x.step;
  int64_t step = x.step;
  if (i == 0 && is_first) {
    from = NAME(gather_first)(block, x, n, before, rest);
    step = 1;
    n = BLOCK;
  }
  NAME(load_stride)(v, from, step, n, rest);
}

/* Loads the block of x at steps i + 1 and later. The value after the last step of a line is
 * `end`. */
ALWAYS_INLINE void NAME(load_later)(ACC *v, scan_input x, int64_t i, int n, int is_end, ACC end) {
  NAME(load_stride)(v, (const T *)x.data + (i + 1) * x.step, x.step, n - is_end, end);
}

NOINLINE pair_sum_t NAME(recur_row_backward)(const linear_recurrence_backward_args *args,
                                             const scan_item_t *item, double start, ACC h0,
                                             int only_total) {
  const scan_input a = NAME(input_part)(args->a, item), h = NAME(input_part)(args->h, item);
  const scan_input g = NAME(input_part)(args->grad_h, item);
  const scan_output grad_a = NAME(output_part)(args->grad_a, item);
  const scan_output grad_b = NAME(output_part)(args->grad_b, item);
  const int stream =
      NAME(streams)(&args->shape, 5) && NAME(row_streams)(grad_a) && NAME(row_streams)(grad_b);
  pair_sum_t sum = {1, 0};
  for (int64_t i = 0; i < item->steps; i += BLOCK) {
    const int count = item->steps - i < BLOCK ? (int)(item->steps - i) : BLOCK;
    const int is_end = item->is_last && i + count == item->steps;
    ACC v[BLOCK], u[BLOCK];
    NAME(load_earlier)(v, a, i, count, item->first == 0, 0, 1);
    NAME(load_stride)(u, (const T *)g.data + i * g.step, g.step, count, 0);
    const pair_sum_t block = NAME(recur_block)(v, u, next_state(sum, start));
    sum = compose_sums(sum, block);
    if (only_total) continue;
    NAME(load_later)(v, h, i, count, is_end, h0);
    for (int k = 0; k < BLOCK; ++k) v[k] *= u[k];
    NAME(store_stride)((T *)grad_a.data + i * grad_a.step, grad_a.step, v, count, stream, 1);
    NAME(store_stride)((T *)grad_b.data + i * grad_b.step, grad_b.step, u, count, stream, 1);
  }
  return sum;
}

/* Loads h at step i + 1 for n columns from c on. After the last step (is_end) it loads h0. */
ALWAYS_INLINE void NAME(later_columns)(ACC *v, scan_input h, const ACC *h0, int64_t i, int c, int n,
                                       int64_t ahead, int is_end) {
  if (is_end) {
    for (int k = 0; k < BLOCK; ++k) v[k] = h0[c + k];
  } else {
    NAME(load_columns)
    (v, (const T *)h.data + (i + 1) * h.step + c * h.inner, ahead * h.step, h.inner, n);
  }
}

NOINLINE void NAME(recur_columns_backward)(const linear_recurrence_backward_args *args,
                                           const scan_item_t *item, NAME(columns_t) * columns,
                                           const ACC *h0, int only_total) {
  const scan_input a = NAME(input_part)(args->a, item), h = NAME(input_part)(args->h, item);
  const scan_input g = NAME(input_part)(args->grad_h, item);
  const scan_output grad_a = NAME(output_part)(args->grad_a, item);
  const scan_output grad_b = NAME(output_part)(args->grad_b, item);
  const int stream =
      NAME(streams)(&args->shape, 5) && NAME(tile_streams)(grad_a) && NAME(tile_streams)(grad_b);
  const int64_t ahead = NAME(steps_ahead)(item->width);
  const int has_sum = only_total || !item->is_last;
  for (int64_t i = 0; i < item->steps; ++i) {
    const int is_end = item->is_last && i + 1 == item->steps;
    for (int c = 0; c < item->width; c += BLOCK) {
      const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
      ACC v[BLOCK], u[BLOCK];
      if (i == 0 && item->first == 0) {
        for (int k = 0; k < BLOCK; ++k) v[k] = 0;
      } else {
        NAME(load_columns)
        (v, (const T *)a.data + (i - 1) * a.step + c * a.inner, ahead * a.step, a.inner, n);
      }
      NAME(load_columns)
      (u, (const T *)g.data + i * g.step + c * g.inner, ahead * g.step, g.inner, n);
      NAME(recur_step)(v, u, columns->h + c, columns->a + c, columns->b + c, has_sum);
      if (only_total) continue;
      NAME(later_columns)(v, h, h0, i, c, n, ahead, is_end);
      for (int k = 0; k < BLOCK; ++k) v[k] *= u[k];
      NAME(store_columns)
      ((T *)grad_a.data + i * grad_a.step + c * grad_a.inner, grad_a.inner, v, n, stream, 1);
      NAME(store_columns)
      ((T *)grad_b.data + i * grad_b.step + c * grad_b.inner, grad_b.inner, u, n, stream, 1);
    }
  }
}

/* Stores grad_h0 = a_0 u_0 for the columns of an item, in the kernel's last step. u: (lanes). */
ALWAYS_INLINE void NAME(store_grad_h0)(const linear_recurrence_backward_args *args,
                                       const scan_item_t *item, const ACC *u) {
  const scan_input a = NAME(input_part)(args->a, item);
  const scan_output out = NAME(output_part)(args->grad_h0, item);
  for (int c = 0; c < item->width; c += BLOCK) {
    const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
    const T *from = (const T *)a.data + (item->steps - 1) * a.step + c * a.inner;
    ACC v[BLOCK];
    NAME(load_columns)(v, from, 0, a.inner, n);
    for (int k = 0; k < BLOCK; ++k) v[k] *= c + k < item->lanes ? u[c + k] : 0;
    NAME(store_columns)((T *)out.data + c * out.inner, out.inner, v, n, 0, 1);
  }
}

static void NAME(recurrence_backward_part)(const void *backward, const scan_item_t *item,
                                           const scan_state_t *state, scan_state_t *total,
                                           int only_total) {
  const linear_recurrence_backward_args *args = (const linear_recurrence_backward_args *)backward;
  NAME(columns_t) columns;
  scan_state_t initial;
  ACC h0[SCAN_TILE];
  NAME(start_state)(args->h0, item, &initial);
  for (int k = 0; k < item->lanes; ++k) h0[k] = (ACC)initial.a[k];
  NAME(start_columns)(&columns, item, state);
  if (args->shape.inner == 1) {
    const pair_sum_t sum = NAME(recur_row_backward)(args, item, state->a[0], h0[0], only_total);
    total->a[0] = sum.a;
    total->b[0] = sum.b;
    columns.h[0] = (ACC)next_state(sum, state->a[0]);
  } else {
    NAME(recur_columns_backward)(args, item, &columns, h0, only_total);
    NAME(end_columns)(&columns, item, total);
  }
  if (item->is_last && args->grad_h0.data != NULL && !only_total)
    NAME(store_grad_h0)(args, item, columns.h);
  if (NAME(streams)(&args->shape, 5)) stream_fence();
}

static void NAME(recurrence_backward_narrow)(const linear_recurrence_backward_args *args,
                                             int64_t begin, int64_t end) {
  const int64_t last = args->shape.length - 1;
  for (int64_t o = begin; o < end; ++o) {
    const scan_item_t item = {.shape = &args->shape, .outer = o};
    const scan_input a = NAME(input_part)(args->a, &item), h = NAME(input_part)(args->h, &item);
    const scan_input g = NAME(input_part)(args->grad_h, &item);
    const scan_output grad_a = NAME(output_part)(args->grad_a, &item);
    const scan_output grad_b = NAME(output_part)(args->grad_b, &item);
    scan_input h0 = args->h0;
    scan_output grad_h0 = args->grad_h0;
    if (h0.data != NULL) {
      h0 = NAME(input_part)(h0, &item);
      grad_h0 = NAME(output_part)(grad_h0, &item);
    }
    for (int64_t i = 0; i < args->shape.inner; ++i) {
      const T *of_a = (const T *)a.data + i * a.inner, *of_g = (const T *)g.data + i * g.inner;
      const T *of_h = (const T *)h.data + i * h.inner;
      T *to_a = (T *)grad_a.data + i * grad_a.inner, *to_b = (T *)grad_b.data + i * grad_b.inner;
      const ACC end = h0.data == NULL ? 0 : (ACC)NAME(widen)(((const T *)h0.data)[i * h0.inner]);
      ACC factor = 0, u = 0;
      for (int64_t k = 0; k <= last; ++k) {
        const ACC h_before = k < last ? (ACC)NAME(widen)(of_h[(k + 1) * h.step]) : end;
        u = FMA(factor, u, (ACC)NAME(widen)(of_g[k * g.step]));
        factor = (ACC)NAME(widen)(of_a[k * a.step]);
        to_a[k * grad_a.step] = NAME(narrow)(u * h_before);
        to_b[k * grad_b.step] = NAME(narrow)(u);
      }
      if (h0.data != NULL) ((T *)grad_h0.data)[i * grad_h0.inner] = NAME(narrow)(factor * u);
    }
  }
}

static void NAME(recurrence_backward)(const linear_recurrence_backward_args *args, int64_t begin,
                                      int64_t end, int only_total) {
  if (scan_is_narrow(&args->shape)) {
    NAME(recurrence_backward_narrow)(args, begin, end);
    return;
  }
  const scan_op_t op = {NAME(zero_start), NAME(recurrence_backward_part), join_pairs};
  scan_run(op, args, &args->shape, args->shape.length, begin, end, only_total);
}

#include "scan/scan_cpu_logcumsumexp_kernel.h"
