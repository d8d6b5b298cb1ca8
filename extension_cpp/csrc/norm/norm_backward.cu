// Launches backward of the norms on the GPU. A plan (norm_plan.h) names one of the kernels, which
// are in norm_backward.cuh, norm_backward_pipeline.cuh and norm_backward_split.cuh.
#include "norm/norm_backward_pipeline.cuh"
#include "norm/norm_backward_split.cuh"

namespace norms {

template <typename T, typename Norm, typename Form>
static cudaError_t backward_of(const BackwardParams<T> &p, const Plan &plan, cudaStream_t stream) {
  constexpr int K = PERSISTENT_ELEMENTS / VECTOR<T>;
  if (plan.kernel == Kernel::SPLIT) {
    return launch(split_kernel<T, Norm, Form, 2>, p, plan, stream);
  }
  if (plan.kernel == Kernel::PIPELINE) {
    return launch(plan.is_aligned ? pipeline_kernel<T, Norm, Form, K, true>
                                  : pipeline_kernel<T, Norm, Form, K, false>,
                  p, plan, stream);
  }
  return launch(plan.is_aligned ? persistent_kernel<T, Norm, Form, K, true>
                                : persistent_kernel<T, Norm, Form, K, false>,
                p, plan, stream);
}

cudaError_t backward(const norm_backward_args &args, const Plan &plan, cudaStream_t stream) {
  return with_row_type(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const BackwardParams<T> p{geometry_of(plan, args.rows, args.cols), args};
    return with_form(args.mean != nullptr, form_of(args), [&](auto norm, auto form) {
      return backward_of<T, decltype(norm), decltype(form)>(p, plan, stream);
    });
  });
}

}  // namespace norms
