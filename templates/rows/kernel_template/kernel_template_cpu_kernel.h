/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). The end of a row's last block is filled
 * with zeros, which add nothing to the sum. If your reduction has a neutral element other than 0,
 * replace these zeros. */

/* The term that an element adds to its row's sum, and the term's derivative. */
ALWAYS_INLINE ACC NAME(term)(ACC x) { return x * x; }
ALWAYS_INLINE ACC NAME(derivative)(ACC x) { return 2 * x; }

static void NAME(forward_row)(const forward_args *args, int64_t row) {
  const T *x = (const T *)args->x + row * args->cols;
  ACC lanes[BLOCK] = {0}, v[BLOCK];
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    LOAD(v, x + c, block_size(c, args->cols));
    for (int k = 0; k < BLOCK; ++k) lanes[k] += NAME(term)(v[k]);
  }
  double sum = 0;
  for (int k = 0; k < BLOCK; ++k) sum += (double)lanes[k]; /* always in this order */
  v[0] = (ACC)(sum / (double)args->cols);
  STORE((T *)args->y + row, v, 1, 0);
}

static void NAME(backward_row)(const backward_args *args, int64_t row) {
  const T *x = (const T *)args->x + row * args->cols;
  T *grad_x = (T *)args->grad_x + row * args->cols;
  ACC grad_out[BLOCK], v[BLOCK];
  LOAD(grad_out, (const T *)args->grad_out + row, 1);
  const ACC factor = grad_out[0] / (ACC)args->cols;
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    LOAD(v, x + c, n);
    for (int k = 0; k < BLOCK; ++k) v[k] = factor * NAME(derivative)(v[k]);
    STORE(grad_x + c, v, n, 0);
  }
}
