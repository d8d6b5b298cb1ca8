// Launches backward of wide rows on the GPU (norm_backward_pipeline.cuh).
#include "norm/norm_backward_pipeline.cuh"

namespace norms {

cudaError_t backward_pipeline(const norm_backward_args &args, const Plan &plan,
                              cudaStream_t stream) {
  return with_backward(args, plan, [&](const auto &p, auto zero, auto norm, auto form) {
    using T = decltype(zero);
    using Norm = decltype(norm);
    using FormOf = decltype(form);
    constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
    return launch(pipeline_kernel<T, Norm, FormOf, K>, p, plan, stream);
  });
}

}  // namespace norms
