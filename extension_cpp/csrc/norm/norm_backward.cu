// Launches the backward kernels on the GPU.
#include "norm/norm_backward_pipeline.cuh"
#include "norm/norm_backward_split.cuh"

namespace norms {

cudaError_t backward(const norm_backward_args &args, Form form, const Plan &plan,
                     cudaStream_t stream) {
  return with_row_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const BackwardParams<T> p{geometry_of(plan, args.rows, args.cols), args};
    const bool is_layer_norm = args.mean != nullptr;
    const void *const kernel = kernel_of_norm(is_layer_norm, form, [&](auto norm, auto constant) {
      using Norm = decltype(norm);
      constexpr Form FORM = decltype(constant)::value;
      constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
      if (plan.kernel == Kernel::PIPELINE) return address(pipeline_kernel<T, Norm, FORM, K>);
      if (plan.kernel == Kernel::SPLIT) return address(split_kernel<T, Norm, FORM, 2>);
      return plan.is_aligned ? address(persistent_kernel<T, Norm, FORM, K, true>)
                             : address(persistent_kernel<T, Norm, FORM, K, false>);
    });
    return launch(kernel, &p, plan, stream);
  });
}

}  // namespace norms
