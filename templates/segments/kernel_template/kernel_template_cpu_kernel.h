/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

static void NAME(forward_segment)(const forward_args *args, int64_t s) {
  T *out = (T *)args->out + s * args->cols;
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    double sums[BLOCK] = {0};
    ACC v[BLOCK];
    for (int64_t row = args->offsets[s]; row < args->offsets[s + 1]; ++row) {
      LOAD(v, (const T *)args->x + row * args->cols + c, n);
      for (int k = 0; k < BLOCK; ++k) sums[k] += (double)v[k];
    }
    for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)sums[k];
    STORE(out + c, v, n, 0);
  }
}

static void NAME(backward_row)(const backward_args *args, int64_t row) {
  const int64_t s = segment_of(args, row);
  T *grad_x = (T *)args->grad_x + row * args->cols;
  ACC v[BLOCK] = {0};
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    if (s >= 0 && s < args->segments) LOAD(v, (const T *)args->grad_out + s * args->cols + c, n);
    STORE(grad_x + c, v, n, 0);
  }
}
