// relu on the GPU, element by element. A thread processes two 16-byte vectors of each operand
// (common/cuda/pointwise.cuh).
#include "common/cuda/pointwise.cuh"
#include "relu/relu.h"

struct ReluForward {
  template <typename A>
  __device__ void operator()(const A (&in)[1], A (&out)[1]) const {
    out[0] = in[0] < A(0) ? A(0) : in[0];
  }
};

struct ReluBackward {
  template <typename A>
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    out[0] = in[1] <= A(0) ? A(0) : in[0];
  }
};

extern "C" int relu_forward_cuda(const relu_forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    return pointwise::launch<decltype(zero), 1, 1>({args->x}, {args->y}, args->numel, ReluForward{},
                                                   stream);
  });
}

extern "C" int relu_backward_cuda(const relu_backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    return pointwise::launch<decltype(zero), 2, 1>({args->grad_out, args->y}, {args->grad_x},
                                                   args->numel, ReluBackward{}, stream);
  });
}
