// kernel_template on the GPU, element by element. A thread processes two 16-byte vectors of each
// operand (common/cuda/pointwise.cuh).
#include "kernel_template/kernel_template.h"

#include "common/cuda/pointwise.cuh"

namespace kernel_template_kernels {

using forward_args = kernel_template_forward_args;
using backward_args = kernel_template_backward_args;

// A is the accumulation type (double for float64, else float). in[j] is operand j of the launch.
struct Forward {
  template <typename A>
  __device__ void operator()(const A (&in)[1], A (&out)[1]) const {
    const A x = in[0];
    out[0] = x * x;
  }
};

struct Backward {
  template <typename A>
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    const A grad_out = in[0], x = in[1];
    out[0] = grad_out * (2 * x);
  }
};

extern "C" int kernel_template_forward_cuda(const forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 1, 1>({args->x}, {args->y}, args->numel, Forward{}, stream);
  });
}

extern "C" int kernel_template_backward_cuda(const backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 2, 1>({args->grad_out, args->x}, {args->grad_x}, args->numel,
                                      Backward{}, stream);
  });
}

}  // namespace kernel_template_kernels
