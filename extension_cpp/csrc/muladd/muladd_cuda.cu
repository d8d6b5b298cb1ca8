// muladd on the GPU, element by element. A thread processes two 16-byte vectors of each operand
// (common/cuda/pointwise.cuh).
#include "common/cuda/pointwise.cuh"
#include "muladd/muladd.h"

template <typename A>
struct MuladdForward {
  A c;
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const { out[0] = fma(in[0], in[1], c); }
};

struct MuladdBackward {
  template <typename A>
  __device__ void operator()(const A (&in)[3], A (&out)[2]) const {
    out[0] = in[0] * in[2];  // grad_a = grad_out * b
    out[1] = in[0] * in[1];  // grad_b = grad_out * a
  }
};

extern "C" int muladd_forward_cuda(const muladd_forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const MuladdForward<acc_t<T>> f{static_cast<acc_t<T>>(args->c)};
    return pointwise::launch<T, 2, 1>({args->a, args->b}, {args->out}, args->numel, f, stream);
  });
}

extern "C" int muladd_backward_cuda(const muladd_backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    return pointwise::launch<decltype(zero), 3, 2>({args->grad_out, args->a, args->b},
                                                   {args->grad_a, args->grad_b}, args->numel,
                                                   MuladdBackward{}, stream);
  });
}
