// kernel_template on the GPU, element by element. A thread processes two 16-byte vectors of each
// operand (common/cuda/pointwise.cuh). The thread reads its elements of all operands before it
// writes, so that results may overwrite operands.
#include "kernel_template/kernel_template.h"

#include "common/cuda/pointwise.cuh"

namespace kernel_template_kernels {

// A is the accumulation type (double for float64, else float). in[j] is operand j of the launch.
struct Step {
  double lr, beta;
  template <typename A>
  __device__ void operator()(const A (&in)[3], A (&out)[2]) const {
    const A param = in[0], grad = in[1], momentum = in[2];
    out[1] = static_cast<A>(beta) * momentum + grad;
    out[0] = param - static_cast<A>(lr) * out[1];
  }
};

extern "C" int kernel_template_cuda(const kernel_template_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 3, 2>({args->param, args->grad, args->momentum},
                                      {args->param_out, args->momentum_out}, args->numel,
                                      Step{args->lr, args->beta}, stream);
  });
}

}  // namespace kernel_template_kernels
