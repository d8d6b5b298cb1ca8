// Launches the backward kernels on the GPU.
#include "norm/norm_backward_pipeline.cuh"
#include "norm/norm_backward_split.cuh"

namespace norms {

cudaError_t backward(const norm_backward_args &args, Form form, const Plan &plan,
                     cudaStream_t stream) {
  const auto run = [&](const auto &p, auto zero, auto norm, auto constant) {
    using T = decltype(zero);
    using Norm = decltype(norm);
    constexpr Form FORM = decltype(constant)::value;
    constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
    auto kernel = plan.is_aligned ? persistent_kernel<T, Norm, FORM, K, true>
                                  : persistent_kernel<T, Norm, FORM, K, false>;
    if (plan.kernel == Kernel::PIPELINE) kernel = pipeline_kernel<T, Norm, FORM, K>;
    if (plan.kernel == Kernel::SPLIT) kernel = split_kernel<T, Norm, FORM, 2>;
    return launch(kernel, p, plan, stream);
  };
  return with_params<BackwardParams>(args, args.mean != nullptr, form, plan, run);
}

}  // namespace norms
