/* logcumsumexp and its gradient. scan_cpu_recurrence_kernel.h includes this file at its end.
 *
 * Let m be the maximum of the elements before x, and s the sum of exp(z - m) over all these
 * elements z but the maximum. Then x changes s to s + exp(x - m), or to (s + 1) exp(m - x) if x is
 * the new maximum. This is a linear recurrence with one exp per element. s leaves out the term of
 * the maximum, which is 1 and would hide small terms if m is near 0. A part begins without
 * elements, at m = -inf and s = -1. The elements before the part are added to each result. */

/* Returns exp(x - y) for x <= y, or 1 if rounding made x larger or both are the same infinity. */
ALWAYS_INLINE ACC NAME(exp_difference)(ACC x, ACC y) {
  const ACC d = x - y;
  return EXP_SOFTMAX(x == y || d > 0 ? 0 : d);
}

/* ---- forward ---- */

/* Computes the maxima and sums of a block. In the end m[k] is the maximum up to element k. */
ALWAYS_INLINE void NAME(sum_block)(const ACC *v, ACC *m, ACC *s, exp_sum_t *state) {
  ACC number[BLOCK], a[BLOCK];
  for (int k = 0; k < BLOCK; ++k) number[k] = v[k] == v[k] ? v[k] : -(ACC)INFINITY;
  state->max = NAME(max_block)(number, m, (ACC)state->max);
  for (int k = 0; k < BLOCK; ++k) {
    const int above = v[k] > m[k];
    const ACC high = above ? v[k] : m[k], low = above ? m[k] : v[k];
    const ACC e = NAME(exp_difference)(low, high);
    a[k] = above ? e : 1;
    s[k] = e;
    m[k] = high;
  }
  const pair_sum_t sum = NAME(recur_block)(a, s, state->sum);
  state->sum = next_state(sum, state->sum);
}

/* Computes the results of a block from the maxima and sums of the part's elements (m, s) and those
 * of the elements before the part (max_before, sum_before). */
ALWAYS_INLINE void NAME(log_block)(ACC *v, const ACC *m, const ACC *s, const ACC *max_before,
                                   const ACC *sum_before, int is_first) {
  if (is_first) {
    for (int k = 0; k < BLOCK; ++k) v[k] = m[k] + LOG1P(s[k]);
    return;
  }
  for (int k = 0; k < BLOCK; ++k) {
    const int above = m[k] > max_before[k];
    const ACC high = above ? m[k] : max_before[k], low = above ? max_before[k] : m[k];
    const ACC e = NAME(exp_difference)(low, high);
    const ACC sum = above ? FMA(sum_before[k], e, s[k] + e) : FMA(s[k], e, sum_before[k] + e);
    v[k] = high + LOG1P(sum);
  }
}

ALWAYS_INLINE exp_sum_t NAME(logcumsumexp_steps)(scan_input x, scan_output y, int64_t n,
                                                 exp_sum_t start, int only_total, int stream) {
  exp_sum_t state = NO_EXP_SUM;
  ACC max_before[BLOCK], sum_before[BLOCK];
  for (int k = 0; k < BLOCK; ++k) max_before[k] = (ACC)start.max;
  for (int k = 0; k < BLOCK; ++k) sum_before[k] = (ACC)start.sum;
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int count = n - i < BLOCK ? (int)(n - i) : BLOCK;
    ACC v[BLOCK], m[BLOCK], s[BLOCK];
    NAME(load_stride)(v, (const T *)x.data + i * x.step, x.step, count, -(ACC)INFINITY);
    NAME(sum_block)(v, m, s, &state);
    if (only_total) continue;
    NAME(log_block)(v, m, s, max_before, sum_before, start.sum < 0);
    NAME(store_stride)((T *)y.data + i * y.step, y.step, v, count, stream, 0);
  }
  return state;
}

NOINLINE exp_sum_t NAME(logcumsumexp_row)(scan_input x, scan_output y, int64_t n, exp_sum_t start,
                                          int only_total, int stream) {
  if (x.step == 1 && y.step == 1) {
    x.step = y.step = 1; /* constants for the inlined call */
    return NAME(logcumsumexp_steps)(x, y, n, start, only_total, stream);
  }
  return NAME(logcumsumexp_steps)(x, y, n, start, only_total, stream);
}

typedef struct {
  ACC max[SCAN_TILE], sum[SCAN_TILE], max_before[SCAN_TILE], sum_before[SCAN_TILE];
} NAME(exp_columns_t);

NOINLINE void NAME(logcumsumexp_columns)(scan_input x, scan_output y, const scan_item_t *item,
                                         NAME(exp_columns_t) * columns, int only_total,
                                         int stream) {
  const int is_first = item->first == 0;
  const int64_t ahead = NAME(steps_ahead)(item->width);
  for (int64_t i = 0; i < item->steps; ++i) {
    for (int c = 0; c < item->width; c += BLOCK) {
      const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
      ACC *restrict m = columns->max + c, *restrict s = columns->sum + c;
      ACC v[BLOCK];
      NAME(load_columns)
      (v, (const T *)x.data + i * x.step + c * x.inner, ahead * x.step, x.inner, n);
      for (int k = 0; k < BLOCK; ++k) {
        const int above = v[k] > m[k];
        const ACC high = above ? v[k] : m[k], low = above ? m[k] : v[k];
        const ACC e = NAME(exp_difference)(low, high);
        s[k] = above ? FMA(s[k], e, e) : s[k] + e;
        m[k] = high;
      }
      if (only_total) continue;
      NAME(log_block)(v, m, s, columns->max_before + c, columns->sum_before + c, is_first);
      NAME(store_columns)((T *)y.data + i * y.step + c * y.inner, y.inner, v, n, stream, 0);
    }
  }
}

static void NAME(logcumsumexp_start)(const void *logcumsumexp, const scan_item_t *item,
                                     scan_state_t *state) {
  (void)logcumsumexp;
  for (int k = 0; k < item->lanes; ++k) {
    state->a[k] = NO_EXP_SUM.max;
    state->b[k] = NO_EXP_SUM.sum;
  }
}

static void NAME(logcumsumexp_part)(const void *logcumsumexp, const scan_item_t *item,
                                    const scan_state_t *state, scan_state_t *total,
                                    int only_total) {
  const logcumsumexp_args *args = (const logcumsumexp_args *)logcumsumexp;
  const scan_input x = NAME(input_part)(args->x, item);
  const scan_output y = NAME(output_part)(args->y, item);
  const int stream = NAME(streams)(&args->shape, 2);
  if (args->shape.inner == 1) {
    const exp_sum_t start = {state->a[0], state->b[0]};
    const exp_sum_t sum = NAME(logcumsumexp_row)(x, y, item->steps, start, only_total,
                                                 stream && NAME(row_streams)(y));
    total->a[0] = sum.max;
    total->b[0] = sum.sum;
  } else {
    NAME(exp_columns_t) columns;
    for (int k = 0; k < item->lanes; ++k) {
      columns.max[k] = (ACC)NO_EXP_SUM.max;
      columns.sum[k] = (ACC)NO_EXP_SUM.sum;
      columns.max_before[k] = (ACC)state->a[k];
      columns.sum_before[k] = (ACC)state->b[k];
    }
    NAME(logcumsumexp_columns)
    (x, y, item, &columns, only_total, stream && NAME(tile_streams)(y));
    for (int k = 0; k < item->lanes; ++k) {
      total->a[k] = columns.max[k];
      total->b[k] = columns.sum[k];
    }
  }
  if (stream) stream_fence();
}

static void NAME(logcumsumexp)(const logcumsumexp_args *args, int64_t begin, int64_t end,
                               int only_total) {
  const scan_op_t op = {NAME(logcumsumexp_start), NAME(logcumsumexp_part), join_exp_sums};
  scan_run(op, args, &args->shape, args->shape.length, begin, end, only_total);
}

/* ---- backward: d_k = grad_out_k + exp(y_k - y_(k-1)) d_(k-1), k in the order of the kernel
 * ---- */

/* Returns exp(x - y), the weight of x in y, or 0 for y = -inf, which depends on no element. */
ALWAYS_INLINE ACC NAME(weight_in)(ACC x, ACC y) {
  const ACC d = x - y;
  return EXP_SOFTMAX(y == -(ACC)INFINITY ? y : x == y || d > 0 ? 0 : d);
}

NOINLINE pair_sum_t NAME(logcumsumexp_row_backward)(const logcumsumexp_backward_args *args,
                                                    const scan_item_t *item, double start,
                                                    int only_total) {
  const scan_input x = NAME(input_part)(args->x, item), y = NAME(input_part)(args->y, item);
  const scan_input g = NAME(input_part)(args->grad_out, item);
  const scan_output grad_x = NAME(output_part)(args->grad_x, item);
  const int stream = NAME(streams)(&args->shape, 4) && NAME(row_streams)(grad_x);
  pair_sum_t sum = {1, 0};
  for (int64_t i = 0; i < item->steps; i += BLOCK) {
    const int count = item->steps - i < BLOCK ? (int)(item->steps - i) : BLOCK;
    ACC a[BLOCK], d[BLOCK], v[BLOCK], w[BLOCK];
    NAME(load_stride)(w, (const T *)y.data + i * y.step, y.step, count, 0);
    NAME(load_earlier)(a, y, i, count, item->first == 0, INFINITY, 0);
    for (int k = 0; k < BLOCK; ++k) a[k] = NAME(weight_in)(w[k], a[k]);
    NAME(load_stride)(d, (const T *)g.data + i * g.step, g.step, count, 0);
    const pair_sum_t block = NAME(recur_block)(a, d, next_state(sum, start));
    sum = compose_sums(sum, block);
    if (only_total) continue;
    NAME(load_stride)(v, (const T *)x.data + i * x.step, x.step, count, 0);
    for (int k = 0; k < BLOCK; ++k) d[k] *= NAME(weight_in)(v[k], w[k]);
    NAME(store_stride)((T *)grad_x.data + i * grad_x.step, grad_x.step, d, count, stream, 0);
  }
  return sum;
}

NOINLINE void NAME(logcumsumexp_columns_backward)(const logcumsumexp_backward_args *args,
                                                  const scan_item_t *item,
                                                  NAME(columns_t) * columns, int only_total) {
  const scan_input x = NAME(input_part)(args->x, item), y = NAME(input_part)(args->y, item);
  const scan_input g = NAME(input_part)(args->grad_out, item);
  const scan_output grad_x = NAME(output_part)(args->grad_x, item);
  const int stream = NAME(streams)(&args->shape, 4) && NAME(tile_streams)(grad_x);
  const int64_t ahead = NAME(steps_ahead)(item->width);
  for (int64_t i = 0; i < item->steps; ++i) {
    const int is_first = i == 0 && item->first == 0;
    for (int c = 0; c < item->width; c += BLOCK) {
      const int n = item->width - c < BLOCK ? item->width - c : BLOCK;
      const T *of_y = (const T *)y.data + i * y.step + c * y.inner;
      ACC a[BLOCK], d[BLOCK], v[BLOCK], w[BLOCK];
      NAME(load_columns)(w, of_y, ahead * y.step, y.inner, n);
      NAME(load_stride)(a, is_first ? of_y : of_y - y.step, y.inner, n, 0);
      for (int k = 0; k < BLOCK; ++k) a[k] = NAME(weight_in)(w[k], a[k]);
      NAME(load_columns)
      (d, (const T *)g.data + i * g.step + c * g.inner, ahead * g.step, g.inner, n);
      NAME(recur_step)(a, d, columns->h + c, columns->a + c, columns->b + c, 1);
      if (only_total) continue;
      NAME(load_columns)
      (v, (const T *)x.data + i * x.step + c * x.inner, ahead * x.step, x.inner, n);
      for (int k = 0; k < BLOCK; ++k) d[k] *= NAME(weight_in)(v[k], w[k]);
      NAME(store_columns)
      ((T *)grad_x.data + i * grad_x.step + c * grad_x.inner, grad_x.inner, d, n, stream, 0);
    }
  }
}

static void NAME(logcumsumexp_backward_part)(const void *backward, const scan_item_t *item,
                                             const scan_state_t *state, scan_state_t *total,
                                             int only_total) {
  const logcumsumexp_backward_args *args = (const logcumsumexp_backward_args *)backward;
  if (args->shape.inner == 1) {
    const pair_sum_t sum = NAME(logcumsumexp_row_backward)(args, item, state->a[0], only_total);
    total->a[0] = sum.a;
    total->b[0] = sum.b;
  } else {
    NAME(columns_t) columns;
    NAME(start_columns)(&columns, item, state);
    NAME(logcumsumexp_columns_backward)(args, item, &columns, only_total);
    NAME(end_columns)(&columns, item, total);
  }
  if (NAME(streams)(&args->shape, 4)) stream_fence();
}

static void NAME(logcumsumexp_backward)(const logcumsumexp_backward_args *args, int64_t begin,
                                        int64_t end, int only_total) {
  const scan_op_t op = {NAME(zero_start), NAME(logcumsumexp_backward_part), join_pairs};
  scan_run(op, args, &args->shape, args->shape.length, begin, end, only_total);
}
