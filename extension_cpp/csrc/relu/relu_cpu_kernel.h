/* CPU kernels of relu. relu_cpu.c compiles this file once per element type (for_each_dtype.h
 * defines T, ACC, NAME, LOAD and STORE). */

ALWAYS_INLINE void NAME(relu_forward_block)(const relu_forward_args *args, int64_t i, int n,
                                            int stream) {
  ACC x[BLOCK];
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = x[k] < 0 ? 0 : x[k];
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(relu_forward)(const relu_forward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(relu_forward_block), args, begin, end, (T *)args->y + begin, stream);
}

ALWAYS_INLINE void NAME(relu_backward_block)(const relu_backward_args *args, int64_t i, int n,
                                             int stream) {
  ACC grad_out[BLOCK], y[BLOCK];
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(y, (const T *)args->y + i, n);
  for (int k = 0; k < BLOCK; ++k) y[k] = y[k] <= 0 ? 0 : grad_out[k];
  STORE((T *)args->grad_x + i, y, n, stream);
}

static void NAME(relu_backward)(const relu_backward_args *args, int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->numel * (int64_t)sizeof(T));
  FOR_BLOCKS(NAME(relu_backward_block), args, begin, end, (T *)args->grad_x + begin, stream);
}
