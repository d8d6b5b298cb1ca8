// Launches of kernels that hold rows in registers: the properties of the device, the parameters
// that a kernel gets from its plan (rows/plan.h), and the launch itself.
#ifndef EXTENSION_CPP_ROWS_LAUNCH_CUH
#define EXTENSION_CPP_ROWS_LAUNCH_CUH

#include <type_traits>

#include "rows/fragment.cuh"
#include "rows/plan.h"

namespace rows {

// The parameters that a kernel with a plan gets in addition to its own arguments.
struct Geometry : Plan {
  int64_t rows;
  int cols;
  float per_col;  // 1 / cols
  uint64_t hint;  // the cache hint of loads (common/cuda/cache.cuh)
};

// Returns the number of registers per thread of a kernel that holds rows in registers. It limits
// the number of threads on an SM, and therefore the bytes that the SM keeps in flight.
constexpr int row_registers(int vectors, bool is_aligned) {
  return (is_aligned ? 64 : 80) + (vectors == 8 ? 16 : 0);
}

// Returns the properties of the current device.
cudaError_t current_device(Device &device);

inline Geometry geometry_of(const Plan &plan, int64_t rows, int64_t cols) {
  constexpr CacheHint HINTS[] = {NO_HINT, EVICT_FIRST, EVICT_LAST};
  const uint64_t hint = HINTS[static_cast<int>(plan.priority)];
  return {plan, rows, static_cast<int>(cols), 1 / static_cast<float>(cols), hint};
}

// Picks the plan for the rows of a softmax or a loss, among the forward shapes of the table.
// `reads_two` says that the kernel reads two tensors. `is_congruent` says that inner = 1 and that
// row r has the same alignment in all tensors.
inline cudaError_t plan_rows(Plan &plan, dtype_t dtype, int64_t rows, int64_t cols, bool reads_two,
                             bool is_congruent) {
  Device device;
  const cudaError_t error = current_device(device);
  Problem problem{};
  problem.form = reads_two ? Form::RESIDUAL : Form::PLAIN;
  problem.dtype = dtype;
  problem.rows = rows;
  problem.cols = cols;
  problem.is_congruent = is_congruent;
  if (error == cudaSuccess) plan = pick(problem, device);
  return error;
}

// Returns a kernel, whose only parameter is a struct, as launch() takes it.
template <typename Params>
const void *address(void (*kernel)(Params)) {
  return reinterpret_cast<const void *>(kernel);
}

// Returns f(vectors, aligned), which is the address of the kernel for these two constants of a
// forward plan. Other values have no kernels.
template <Form FORM, typename F>
const void *kernel_of_shape(const Plan &plan, F &&f) {
  if (!plan.is_aligned) return f(std::integral_constant<int, 4>{}, std::false_type{});
  const void *kernel = nullptr;
  const auto try_vectors = [&](auto vectors) {
    constexpr int K = decltype(vectors)::value;
    if constexpr (has_row_kernel(FORM, K, false) || has_row_kernel(FORM, K, true)) {
      if (plan.vectors == K) kernel = f(vectors, std::true_type{});
    }
  };
  try_vectors(std::integral_constant<int, 3>{});
  try_vectors(std::integral_constant<int, 4>{});
  try_vectors(std::integral_constant<int, 6>{});
  try_vectors(std::integral_constant<int, 8>{});
  return kernel;
}

// A launch configuration with at most one attribute.
struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attribute{};

  LaunchConfig(int64_t ctas, dim3 threads, cudaStream_t stream) : cudaLaunchConfig_t{} {
    gridDim = dim3(static_cast<unsigned>(ctas));
    blockDim = threads;
    this->stream = stream;
    attrs = &attribute;
  }

  // Sets the cluster size and the dynamic shared memory, and allows `kernel` to use them. The
  // limits belong to the kernel and not to a launch. The limits are the same for all launches,
  // because otherwise another CPU thread could lower them before this launch.
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

// Launches a kernel whose only parameter is the struct at `params`. Not a template, so that this
// host code is compiled once instead of once per kernel.
inline cudaError_t launch(const void *kernel, const void *params, const Plan &plan,
                          cudaStream_t stream) {
  LaunchConfig config(plan.ctas, dim3(plan.threads, plan.rows_per_cta), stream);
  cudaError_t error = cudaSuccess;
  if (plan.cluster > 1) error = config.set_cluster(kernel, plan.shared_bytes, plan.cluster);
  void *parameters[] = {const_cast<void *>(params)};
  return error == cudaSuccess ? cudaLaunchKernelExC(&config, kernel, parameters) : error;
}

}  // namespace rows

#endif
