// Launches backward on the GPU.
#include "norm/norm_backward_pipeline.cuh"
#include "norm/norm_backward_split.cuh"

namespace norms {

cudaError_t backward(const norm_backward_args &args, const Plan &plan, cudaStream_t stream) {
  return with_backward(args, plan, [&](const auto &p, auto zero, auto norm, auto form) {
    using T = decltype(zero);
    using Norm = decltype(norm);
    using ThisForm = decltype(form);
    constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
    auto kernel = plan.is_aligned ? persistent_kernel<T, Norm, ThisForm, K, true>
                                  : persistent_kernel<T, Norm, ThisForm, K, false>;
    if (plan.kernel == Kernel::PIPELINE) kernel = pipeline_kernel<T, Norm, ThisForm, K>;
    if (plan.kernel == Kernel::SPLIT) kernel = split_kernel<T, Norm, ThisForm, 2>;
    return launch(kernel, p, plan, stream);
  });
}

}  // namespace norms
