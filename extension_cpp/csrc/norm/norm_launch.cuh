// Host code of the norms' GPU kernels: properties of the device, and launches with a plan.
#ifndef EXTENSION_CPP_NORM_LAUNCH_CUH
#define EXTENSION_CPP_NORM_LAUNCH_CUH

#include "norm/norm_fused.cuh"
#include "norm/norm_math.cuh"
#include "norm/norm_plan.h"

namespace norms {

// Launch the kernels for element type T, except the sum of partial rows. Instantiated in
// norm_{forward,backward}_<dtype>.cu.
template <typename T>
cudaError_t forward(const norm_forward_args &args, const Plan &plan, cudaStream_t stream);
template <typename T>
cudaError_t backward(const norm_backward_args &args, const Plan &plan, cudaStream_t stream);

// The properties of the current device.
cudaError_t current_device(Device &device);

inline Form form_of(const norm_forward_args &args) {
  return args.residual != nullptr         ? Form::RESIDUAL
         : args.dropout_y.seed != nullptr ? Form::DROPOUT_OF_Y
                                          : Form::PLAIN;
}

inline Form form_of(const norm_backward_args &args) {
  return args.grad_sum != nullptr || args.grad_dropped != nullptr ? Form::RESIDUAL
         : args.dropout_y.seed != nullptr                         ? Form::DROPOUT_OF_Y
                                                                  : Form::PLAIN;
}

inline Geometry geometry_of(const Plan &plan, int64_t rows, int64_t cols) {
  const uint64_t hint = plan.priority == Hint::LAST    ? EVICT_LAST
                        : plan.priority == Hint::FIRST ? EVICT_FIRST
                                                       : NO_HINT;
  return {plan, rows, static_cast<int>(cols), 1 / static_cast<float>(cols), hint};
}

// Calls f(vectors, aligned) with the plan's values as constants. VECTORS lists the compiled ones.
template <int... VECTORS, typename F>
cudaError_t with_variant(const Plan &plan, F &&f) {
  cudaError_t error = cudaErrorInvalidValue;
  const auto call = [&](auto vectors) {
    if (plan.vectors != vectors.value) return;
    error = plan.is_aligned ? f(vectors, std::true_type{}) : f(vectors, std::false_type{});
  };
  (call(std::integral_constant<int, VECTORS>{}), ...);
  return error;
}

// Calls f(norm, form) with a Norm and a Form (norm_fused.cuh).
template <typename F>
cudaError_t with_form(bool is_layer_norm, Form form, F &&f) {
  switch (form) {
    case Form::RESIDUAL:
      return is_layer_norm ? f(LayerNorm{}, Residual{}) : f(RmsNorm{}, Residual{});
    case Form::DROPOUT_OF_Y: return f(LayerNorm{}, DropoutOfY{});
    case Form::PLAIN: break;
  }
  return is_layer_norm ? f(LayerNorm{}, Plain{}) : f(RmsNorm{}, Plain{});
}

// Not a template, so that the host code is compiled once instead of once per kernel.
inline cudaError_t launch(const void *kernel, const void *params, const Plan &plan,
                          cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(plan.ctas));
  config.blockDim = dim3(plan.threads, plan.rows_per_cta);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  config.attrs = &attribute;
  cudaError_t error = cudaSuccess;
  if (plan.shared_bytes > 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 plan.shared_bytes);
  }
  if (error == cudaSuccess && plan.cluster > 1) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
    config.numAttrs = 1;
    if (plan.cluster > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
  }
  void *parameters[] = {const_cast<void *>(params)};
  return error == cudaSuccess ? cudaLaunchKernelExC(&config, kernel, parameters) : error;
}

// Every kernel has one parameter, a struct.
template <typename Params>
cudaError_t launch(void (*kernel)(Params), const Params &params, const Plan &plan,
                   cudaStream_t stream) {
  return launch(reinterpret_cast<const void *>(kernel), &params, plan, stream);
}

}  // namespace norms

#endif
