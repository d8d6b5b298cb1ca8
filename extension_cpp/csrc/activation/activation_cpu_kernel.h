/* CPU kernels of silu and gelu. activation_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). */
#include "activation/activation_cpu_math.h"

ALWAYS_INLINE void NAME(forward_block)(activation_t kind, const activation_forward_args *args,
                                       int64_t i, int n, int stream) {
  ACC x[BLOCK];
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = NAME(activation_value)(kind, x[k]);
  STORE((T *)args->y + i, x, n, stream);
}

ALWAYS_INLINE void NAME(forward)(activation_t kind, const activation_forward_args *args,
                                 int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(2 * args->numel * (int64_t)sizeof(T));
#define BLOCK_OF_KIND(args, i, n, stream) NAME(forward_block)(kind, args, i, n, stream)
  FOR_LONG_BLOCKS(BLOCK_OF_KIND, args, begin, end, (T *)args->y + begin, stream);
#undef BLOCK_OF_KIND
}

static void NAME(activation_forward)(const activation_forward_args *args, int64_t begin,
                                     int64_t end){
    DISPATCH_ACTIVATION(args->kind, NAME(forward), args, begin, end)}

ALWAYS_INLINE void NAME(backward_block)(activation_t kind, const activation_backward_args *args,
                                        int64_t i, int n, int stream) {
  ACC grad_out[BLOCK], x[BLOCK];
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k) x[k] = grad_out[k] * NAME(activation)(kind, x[k]).first;
  STORE((T *)args->grad_x + i, x, n, stream);
}

ALWAYS_INLINE void NAME(backward)(activation_t kind, const activation_backward_args *args,
                                  int64_t begin, int64_t end) {
  const int stream = cpu_should_stream(3 * args->numel * (int64_t)sizeof(T));
#define BLOCK_OF_KIND(args, i, n, stream) NAME(backward_block)(kind, args, i, n, stream)
  FOR_LONG_BLOCKS(BLOCK_OF_KIND, args, begin, end, (T *)args->grad_x + begin, stream);
#undef BLOCK_OF_KIND
}

static void NAME(activation_backward)(const activation_backward_args *args, int64_t begin,
                                      int64_t end){
    DISPATCH_ACTIVATION(args->kind, NAME(backward), args, begin, end)}

ALWAYS_INLINE
    void NAME(double_backward_block)(activation_t kind, const activation_double_backward_args *args,
                                     int64_t i, int n, int stream) {
  ACC grad_grad_x[BLOCK], grad_out[BLOCK], x[BLOCK];
  READ(grad_grad_x, (const T *)args->grad_grad_x + i, n);
  READ(grad_out, (const T *)args->grad_out + i, n);
  READ(x, (const T *)args->x + i, n);
  for (int k = 0; k < BLOCK; ++k)
    x[k] = grad_grad_x[k] * grad_out[k] * NAME(activation)(kind, x[k]).second;
  STORE((T *)args->grad_x + i, x, n, stream);
}

ALWAYS_INLINE void NAME(double_backward)(activation_t kind,
                                         const activation_double_backward_args *args, int64_t begin,
                                         int64_t end) {
  const int stream = cpu_should_stream(4 * args->numel * (int64_t)sizeof(T));
#define BLOCK_OF_KIND(args, i, n, stream) NAME(double_backward_block)(kind, args, i, n, stream)
  FOR_LONG_BLOCKS(BLOCK_OF_KIND, args, begin, end, (T *)args->grad_x + begin, stream);
#undef BLOCK_OF_KIND
}

static void NAME(activation_double_backward)(const activation_double_backward_args *args,
                                             int64_t begin, int64_t end) {
  DISPATCH_ACTIVATION(args->kind, NAME(double_backward), args, begin, end)
}
