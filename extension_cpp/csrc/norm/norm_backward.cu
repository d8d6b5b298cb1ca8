// Launches backward on the GPU; norm_backward_pipeline.cu does for wide rows.
#include "norm/norm_backward_split.cuh"

namespace norms {

cudaError_t backward(const norm_backward_args &args, const Plan &plan, cudaStream_t stream) {
  if (plan.kernel == Kernel::PIPELINE) return backward_pipeline(args, plan, stream);
  return with_backward(args, plan, [&](const auto &p, auto zero, auto norm, auto form) {
    using T = decltype(zero);
    using Norm = decltype(norm);
    using FormOf = decltype(form);
    constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
    if (plan.kernel == Kernel::SPLIT) {
      return launch(split_kernel<T, Norm, FormOf, 2>, p, plan, stream);
    }
    return launch(plan.is_aligned ? persistent_kernel<T, Norm, FormOf, K, true>
                                  : persistent_kernel<T, Norm, FormOf, K, false>,
                  p, plan, stream);
  });
}

}  // namespace norms
