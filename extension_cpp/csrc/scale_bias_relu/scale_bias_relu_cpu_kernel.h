/* CPU kernels of scale_bias_relu. scale_bias_relu_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */

/* Processes n elements of one row. The first has flat index i and column c. */
ALWAYS_INLINE void NAME(forward_block)(const scale_bias_relu_forward_args *args, int64_t i,
                                       int64_t c, int n, int stream) {
  const ACC scale = (ACC)args->scale;
  ACC x[BLOCK], bias[BLOCK];
  READ(x, (const T *)args->x + i, n);
  LOAD(bias, (const T *)args->bias + c, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = FMA(x[k], scale, bias[k]);
  for (int k = 0; k < BLOCK; ++k) x[k] = x[k] < 0 ? 0 : x[k];
  STORE((T *)args->y + i, x, n, stream);
}

static void NAME(scale_bias_relu_forward)(const scale_bias_relu_forward_args *args, int64_t begin,
                                          int64_t end) {
  const int64_t cols = args->cols;
  const int stream = cpu_should_stream(2 * args->rows * cols * (int64_t)sizeof(T));
  FOR_ROW_BLOCKS(NAME(forward_block), args, begin, end, cols, (T *)args->y, stream);
}

ALWAYS_INLINE ACC NAME(column_term)(const scale_bias_relu_backward_args *args, int kind, ACC x,
                                    ACC grad_out, ACC bias) {
  (void)kind;
  return FMA(x, (ACC)args->scale, bias) <= 0 ? 0 : grad_out;
}

ALWAYS_INLINE ACC NAME(column_value)(const scale_bias_relu_backward_args *args, int kind,
                                     ACC term) {
  (void)kind;
  return term * (ACC)args->scale;
}

#define COLUMN_SUMS_ARGS scale_bias_relu_backward_args
#include "common/cpu/column_sums_kernel.h"
#undef COLUMN_SUMS_ARGS

static void NAME(scale_bias_relu_backward)(const scale_bias_relu_backward_args *args,
                                           int64_t item) {
  NAME(column_sums)(args, 0, item);
}

static void NAME(scale_bias_relu_grad_bias)(const scale_bias_relu_backward_args *args,
                                            int64_t tile) {
  NAME(column_sums_total)(args, tile);
}
