// Entry points of the norms on the GPU. The plan for the problem and the device (rows/plan.h) names
// the kernel. This file also launches the fallback kernels and the sum of partial rows.
#include <utility>

#include "norm/norm_generic.cuh"

namespace norms {

// Returns whether each row r is aligned like element r * cols of an aligned contiguous tensor.
static bool is_congruent(const Problem &p, const void *data, int64_t stride) {
  return data == nullptr ||
         (is_aligned(data) && (p.rows == 1 || (stride - p.cols) % vector_elements(p.dtype) == 0));
}

static Form form_of(bool has_residual, const dropout_t &dropout_y) {
  if (has_residual) return Form::RESIDUAL;
  return dropout_y.seed != nullptr ? Form::DROPOUT_OF_Y : Form::PLAIN;
}

static Problem problem_of(const norm_forward_args &args) {
  const Form form = form_of(args.residual != nullptr, args.dropout_y);
  Problem p{false, form, args.dtype, args.rows, args.cols};
  p.is_congruent = is_congruent(p, args.x, args.x_stride) && is_congruent(p, args.y, p.cols) &&
                   is_congruent(p, args.residual, args.residual_stride) &&
                   is_congruent(p, args.sum, p.cols) && is_aligned(args.weight) &&
                   is_aligned(args.bias);
  return p;
}

static Problem problem_of(const norm_backward_args &args) {
  const bool has_residual = args.grad_sum != nullptr || args.grad_dropped != nullptr;
  Problem p{true, form_of(has_residual, args.dropout_y), args.dtype, args.rows, args.cols};
  p.is_congruent = is_congruent(p, args.x, args.x_stride) &&
                   is_congruent(p, args.grad_out, args.grad_out_stride) &&
                   is_congruent(p, args.grad_x, p.cols) &&
                   is_congruent(p, args.grad_sum, args.grad_sum_stride) &&
                   is_congruent(p, args.grad_dropped, p.cols) && is_aligned(args.weight);
  p.wants_x = args.grad_x != nullptr;
  p.wants_parameters = norm_weight_gradients(&args) > 0;
  p.drops_x = args.grad_dropped != nullptr;
  return p;
}

// ---- the fallback ----

static cudaError_t generic_forward(const norm_forward_args &args, const Plan &plan,
                                   cudaStream_t stream) {
  return with_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = args.centered ? generic_forward_kernel<T, LayerNorm<acc_t<T>>>
                                      : generic_forward_kernel<T, RmsNorm<acc_t<T>>>;
    return launch(address(kernel), &args, plan, stream);
  });
}

static cudaError_t generic_backward(const norm_backward_args &args, const Plan &plan,
                                    cudaStream_t stream) {
  return with_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    const bool is_layer_norm = args.mean != nullptr;
    if (args.grad_x != nullptr && args.rows > 0) {
      const auto kernel = is_layer_norm ? generic_rows_kernel<T, LayerNorm<acc_t<T>>>
                                        : generic_rows_kernel<T, RmsNorm<acc_t<T>>>;
      const cudaError_t error = launch(address(kernel), &args, plan, stream);
      if (error != cudaSuccess) return error;
    }
    if (plan.parts == 0 || norm_weight_gradients(&args) == 0) return cudaSuccess;
    const auto kernel = is_layer_norm ? generic_columns_kernel<T, LayerNorm<acc_t<T>>>
                                      : generic_columns_kernel<T, RmsNorm<acc_t<T>>>;
    const dim3 ctas(static_cast<unsigned>(ceil_div(args.cols, COLUMNS_X)), plan.parts);
    const int64_t chunk = ceil_div(args.rows, plan.parts);
    kernel<<<ctas, dim3(COLUMNS_X, COLUMNS_Y), 0, stream>>>(args, chunk);
    return cudaGetLastError();
  });
}

// ---- partial rows ----

template <typename A, typename W>
static cudaError_t sum_partials(const norm_backward_args &args, const Plan &plan,
                                const Device &device, cudaStream_t stream) {
  void *outputs[2] = {args.grad_weight, args.grad_bias};
  if (outputs[0] == nullptr) std::swap(outputs[0], outputs[1]);
  const int64_t ctas = ceil_div(args.cols, PARTIALS_X) * norm_weight_gradients(&args);
  LaunchConfig config(ctas, dim3(PARTIALS_X, PARTIALS_Y), stream);
  config.attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  config.attribute.val.programmaticStreamSerializationAllowed = 1;
  // Code for architectures before sm_90 cannot wait for the previous kernel, and must not start
  // early.
  config.numAttrs = device.has_sm_90_code ? 1 : 0;
  return cudaLaunchKernelEx(&config, sum_partials_kernel<A, W>,
                            static_cast<const A *>(args.partial), static_cast<W *>(outputs[0]),
                            static_cast<W *>(outputs[1]), plan.parts, args.cols);
}

}  // namespace norms

extern "C" int norm_forward_cuda(const norm_forward_args *args, void *stream) {
  using namespace norms;
  const auto on = static_cast<cudaStream_t>(stream);
  Device device;
  const cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const Problem problem = problem_of(*args);
  const Plan plan = pick(problem, device);
  if (plan.kernel == Kernel::GENERIC) return generic_forward(*args, plan, on);
  return forward(*args, problem.form, plan, on);
}

extern "C" int64_t norm_partial_cuda(const norm_backward_args *args) {
  using namespace norms;
  Device device;
  if (current_device(device) != cudaSuccess) return 0;  // the launch reports the error
  const Plan plan = pick(problem_of(*args), device);
  const int64_t size = args->dtype == DTYPE_FLOAT64 ? sizeof(double) : sizeof(float);
  return norm_weight_gradients(args) * plan.parts * args->cols * size;
}

extern "C" int norm_backward_cuda(const norm_backward_args *args, void *stream) {
  using namespace norms;
  const auto on = static_cast<cudaStream_t>(stream);
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const Problem problem = problem_of(*args);
  const Plan plan = pick(problem, device);
  error = plan.kernel == Kernel::GENERIC ? generic_backward(*args, plan, on)
                                         : backward(*args, problem.form, plan, on);
  const bool has_partials = problem.wants_parameters && plan.kernel != Kernel::SPLIT;
  if (error != cudaSuccess || !has_partials) return error;
  if (args->dtype == DTYPE_FLOAT64) return sum_partials<double, double>(*args, plan, device, on);
  return with_row_type(args->weight_dtype, [&](auto zero) {
    return sum_partials<float, decltype(zero)>(*args, plan, device, on);
  });
}
