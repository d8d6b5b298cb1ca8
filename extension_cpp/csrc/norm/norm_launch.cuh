// The parameters of the norms' GPU kernels, the forms of a norm, and launches with a plan.
#ifndef EXTENSION_CPP_NORM_LAUNCH_CUH
#define EXTENSION_CPP_NORM_LAUNCH_CUH

#include "common/cuda_dropout.cuh"
#include "common/cuda_row.cuh"
#include "norm/norm.h"
#include "norm/norm_math.cuh"
#include "norm/norm_plan.h"

namespace norms {

// ---- in kernels ----

// What a kernel with a plan gets besides its arguments.
struct Geometry : Plan {
  int64_t rows;
  int cols;
  float per_col;  // 1 / cols
  uint64_t hint;  // of loads (cuda_cache.cuh)
};

// The kernels' parameters: the arguments, and their rows. T is the type that args.dtype names.
template <typename T>
struct ForwardParams : Geometry, norm_forward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *residual_row(int64_t r) const {
    return static_cast<const T *>(residual) + r * residual_stride;
  }
  __device__ const void *parameter(int i) const { return i == 0 ? weight : bias; }
  __device__ bool drops_x() const { return dropout_x.seed != nullptr; }
};

template <typename T>
struct BackwardParams : Geometry, norm_backward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *grad_out_row(int64_t r) const {
    return static_cast<const T *>(grad_out) + r * grad_out_stride;
  }
  __device__ const T *grad_sum_row(int64_t r) const {
    return static_cast<const T *>(grad_sum) + r * grad_sum_stride;
  }
  __device__ void *gradient(int i) const { return i == 0 ? grad_weight : grad_bias; }
  __device__ bool drops_x() const { return grad_dropped != nullptr; }
};

// The dropout mask of a thread's elements of a row: bit 1 keeps an element.
template <int K, int N>
struct RowMask {
  uint32_t bits[K], edge;
  __device__ uint32_t at(int k) const { return k < K ? bits[k] : edge; }

  // Computes the mask if the form needs one.
  template <Form FORM, typename Params, typename Window>
  __device__ void make(const Params &p, int64_t row, const Window &window) {
    if (FORM != Form::DROPOUT_OF_Y && !(FORM == Form::RESIDUAL && p.drops_x())) return;
    const dropout_t &dropout = FORM == Form::DROPOUT_OF_Y ? p.dropout_y : p.dropout_x;
    int64_t first[K];
#pragma unroll
    for (int k = 0; k < K; ++k) first[k] = row * p.cols + window.column(k);
    keep<N>(bits, dropout, *dropout.seed, first);
    if (window.has_edge()) edge = keep_one(dropout, *dropout.seed, row * p.cols + window.edge);
  }
};

// ---- on the host ----

// Launch the kernels for rows with a plan, except the sum of partial rows. Each is in the .cu of
// its name: the compilers take longest for these files, and work on them side by side.
cudaError_t forward(const norm_forward_args &args, Form form, const Plan &plan,
                    cudaStream_t stream);
cudaError_t backward(const norm_backward_args &args, Form form, const Plan &plan,
                     cudaStream_t stream);

// The properties of the current device.
cudaError_t current_device(Device &device);

inline Geometry geometry_of(const Plan &plan, int64_t rows, int64_t cols) {
  constexpr CacheHint HINTS[] = {NO_HINT, EVICT_FIRST, EVICT_LAST};
  const uint64_t hint = HINTS[static_cast<int>(plan.priority)];
  return {plan, rows, static_cast<int>(cols), 1 / static_cast<float>(cols), hint};
}

// Calls f(vectors, aligned) with the values of a forward plan as constants: there are kernels for
// these alone.
template <typename F>
cudaError_t with_row_shape(const Plan &plan, F &&f) {
  if (!plan.is_aligned) return f(std::integral_constant<int, 4>{}, std::false_type{});
  switch (plan.vectors) {
    case 3: return f(std::integral_constant<int, 3>{}, std::true_type{});
    case 4: return f(std::integral_constant<int, 4>{}, std::true_type{});
    case 8: return f(std::integral_constant<int, 8>{}, std::true_type{});
    default: return cudaErrorInvalidValue;
  }
}

// Calls f(parameters, zero of the rows' type, norm, form) with a Norm (norm_math.cuh) and a form as
// a constant. Only layer_norm is fused with dropout of y.
template <template <typename T> class Params, typename Args, typename F>
cudaError_t with_params(const Args &args, bool is_layer_norm, Form form, const Plan &plan, F &&f) {
  return with_row_type(args.dtype, [&](auto zero) {
    const Params<decltype(zero)> p{geometry_of(plan, args.rows, args.cols), args};
    constexpr std::integral_constant<Form, Form::PLAIN> plain;
    constexpr std::integral_constant<Form, Form::RESIDUAL> residual;
    constexpr std::integral_constant<Form, Form::DROPOUT_OF_Y> dropout_of_y;
    const auto run = [&](auto norm) {
      return form == Form::RESIDUAL ? f(p, zero, norm, residual) : f(p, zero, norm, plain);
    };
    if (form == Form::DROPOUT_OF_Y) return f(p, zero, LayerNorm<float>{}, dropout_of_y);
    return is_layer_norm ? run(LayerNorm<float>{}) : run(RmsNorm<float>{});
  });
}

// A launch with at most one attribute.
struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attribute{};

  LaunchConfig(int64_t ctas, dim3 threads, cudaStream_t stream) : cudaLaunchConfig_t{} {
    gridDim = dim3(static_cast<unsigned>(ctas));
    blockDim = threads;
    this->stream = stream;
    attrs = &attribute;
  }

  // Sets the dynamic shared memory and the cluster, and allows `kernel` to have them: the same for
  // all launches, because the limits are the kernel's, and another thread could lower them.
  cudaError_t set_cluster(const void *kernel, int shared_bytes, int cluster) {
    dynamicSmemBytes = shared_bytes;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    numAttrs = 1;
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 0) {
      error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
    }
    if (error != cudaSuccess || cluster <= 8) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
};

// Not a template, so that the host code is compiled once instead of once per kernel.
inline cudaError_t launch(const void *kernel, const void *params, const Plan &plan,
                          cudaStream_t stream) {
  LaunchConfig config(plan.ctas, dim3(plan.threads, plan.rows_per_cta), stream);
  cudaError_t error = cudaSuccess;
  if (plan.cluster > 1) error = config.set_cluster(kernel, plan.shared_bytes, plan.cluster);
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
