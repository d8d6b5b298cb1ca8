/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD, STORE, and WIDEN and NARROW for one element). */

static void NAME(filter_row)(const filter_args *args, int64_t row) {
  const int64_t steps = args->steps, taps = args->taps, c = row % args->channels;
  const T *x = (const T *)args->x + row * steps, *weight = (const T *)args->weight + c * taps;
  T *y = (T *)args->y + row * steps;
  const ACC bias = args->bias ? (ACC)WIDEN(((const T *)args->bias)[c]) : 0;
  /* Steps with all their terms in the row are processed in blocks. Steps at an end of the row, of
   * which some terms are left out, are processed one by one. */
  const int64_t reach = taps == 0 ? 0 : taps - 1 < steps ? taps - 1 : steps;
  const int64_t first = args->reverse ? 0 : reach, last = args->reverse ? steps - reach : steps;
  int n;
  for (int64_t t = 0; t < steps; t += n) {
    n = t < first || t >= last ? 1 : block_size(t, last);
    ACC sums[BLOCK], v[BLOCK];
    for (int j = 0; j < BLOCK; ++j) sums[j] = bias;
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t s = args->reverse ? t + (taps - 1) - k : t - (taps - 1) + k;
      if (s < 0 || s >= steps) continue;
      const ACC w = (ACC)WIDEN(weight[k]);
      LOAD(v, x + s, n);
      for (int j = 0; j < BLOCK; ++j) sums[j] += w * v[j];
    }
    STORE(y + t, sums, n, 0);
  }
}

/* Returns the sum of grad_out[t] * x[t - shift] over a row, or of grad_out[t] if x is NULL. */
static double NAME(row_sum)(const T *grad_out, const T *x, int64_t shift, int64_t steps) {
  ACC lanes[BLOCK] = {0}, g[BLOCK], v[BLOCK];
  for (int64_t t = shift; t < steps; t += BLOCK) {
    const int n = block_size(t, steps);
    LOAD(g, grad_out + t, n);
    if (x) LOAD(v, x + t - shift, n);
    for (int j = 0; j < BLOCK; ++j) lanes[j] += x ? g[j] * v[j] : g[j];
  }
  double sum = 0;
  for (int j = 0; j < BLOCK; ++j) sum += (double)lanes[j]; /* always in this order */
  return sum;
}

static void NAME(channel_sums)(const sums_args *args, int64_t c) {
  const int64_t steps = args->steps, taps = args->taps;
  for (int64_t first = 0; first == 0 || first < taps; first += GROUP) {
    double sums[GROUP] = {0}, bias = 0;
    for (int64_t b = 0; b < args->batch; ++b) {
      const int64_t begin = (b * args->channels + c) * steps;
      const T *grad_out = (const T *)args->grad_out + begin, *x = (const T *)args->x + begin;
      for (int64_t k = first; args->grad_weight && k < taps && k < first + GROUP; ++k)
        sums[k - first] += NAME(row_sum)(grad_out, x, taps - 1 - k, steps);
      if (args->grad_bias && first == 0) bias += NAME(row_sum)(grad_out, NULL, 0, steps);
    }
    for (int64_t k = first; args->grad_weight && k < taps && k < first + GROUP; ++k)
      ((T *)args->grad_weight)[c * taps + k] = NARROW((ACC)sums[k - first]);
    if (args->grad_bias && first == 0) ((T *)args->grad_bias)[c] = NARROW((ACC)bias);
  }
}
