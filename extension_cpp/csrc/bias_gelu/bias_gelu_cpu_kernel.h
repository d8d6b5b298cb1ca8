/* CPU kernels of bias_gelu. bias_gelu_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */
#include "activation/activation_cpu_math.h"

/* Processes n elements of one row. The first has flat index i and column c. */
ALWAYS_INLINE void NAME(forward_block)(activation_t kind, const bias_gelu_forward_args *args,
                                       int64_t i, int64_t c, int n, int stream) {
  ACC x[BLOCK], bias[BLOCK];
  READ(x, (const T *)args->x + i, n);
  LOAD(bias, (const T *)args->bias + c, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = NAME(activation_value)(kind, x[k] + bias[k]);
  STORE((T *)args->y + i, x, n, stream);
}

ALWAYS_INLINE void NAME(forward)(activation_t kind, const bias_gelu_forward_args *args,
                                 int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->rows * args->cols * (int64_t)sizeof(T));
#define BLOCK_OF_KIND(args, i, c, n, stream) NAME(forward_block)(kind, args, i, c, n, stream)
  FOR_ROW_BLOCKS(BLOCK_OF_KIND, args, begin, end, args->cols, (T *)args->y, stream);
#undef BLOCK_OF_KIND
}

static void NAME(bias_gelu_forward)(const bias_gelu_forward_args *args, int64_t begin, int64_t end){
    DISPATCH_ACTIVATION(args->kind, NAME(forward), args, begin, end)}

ALWAYS_INLINE ACC NAME(column_term)(const bias_gelu_backward_args *args, int kind, ACC x,
                                    ACC grad_out, ACC bias) {
  (void)args;
  return grad_out * NAME(activation)((activation_t)kind, x + bias).first;
}

ALWAYS_INLINE ACC NAME(column_value)(const bias_gelu_backward_args *args, int kind, ACC term) {
  (void)args, (void)kind;
  return term;
}

#define COLUMN_SUMS_ARGS bias_gelu_backward_args
#include "common/cpu/column_sums_kernel.h"
#undef COLUMN_SUMS_ARGS

static void NAME(bias_gelu_backward)(const bias_gelu_backward_args *args, int64_t item) {
  if (args->kind == GELU)
    NAME(column_sums)(args, GELU, item);
  else
    NAME(column_sums)(args, GELU_TANH, item);
}
