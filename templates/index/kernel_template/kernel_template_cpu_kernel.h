/* CPU kernels of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

static void NAME(forward_row)(const forward_args *args, int64_t i) {
  const T *x = (const T *)args->x + args->index[i] * args->cols;
  T *out = (T *)args->out + i * args->cols;
  ACC v[BLOCK];
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    LOAD(v, x + c, n);
    STORE(out + c, v, n, 0);
  }
}

static void NAME(backward_row)(const backward_args *args, int64_t row) {
  const int64_t first = row > 0 ? args->ends[row - 1] : 0, last = args->ends[row];
  T *grad_x = (T *)args->grad_x + row * args->cols;
  for (int64_t c = 0; c < args->cols; c += BLOCK) {
    const int n = block_size(c, args->cols);
    double sums[BLOCK] = {0};
    ACC v[BLOCK];
    for (int64_t place = first; place < last; ++place) {
      LOAD(v, (const T *)args->grad_out + args->order[place] * args->cols + c, n);
      for (int k = 0; k < BLOCK; ++k) sums[k] += (double)v[k];
    }
    for (int k = 0; k < BLOCK; ++k) v[k] = (ACC)sums[k];
    STORE(grad_x + c, v, n, 0);
  }
}
