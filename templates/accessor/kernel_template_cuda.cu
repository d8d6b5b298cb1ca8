// kernel_template on the GPU. A CTA processes a row, and its threads stride over the columns, so
// that neighbouring threads access neighbouring addresses. Both loops run up to the sizes in the
// accessors, so that no index leaves the tensor.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/TensorAccessor.h>

#include <algorithm>
#include <cstdint>
#include <string>

namespace kernel_template {

using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// In kernel_template.cpp.
void check(bool is_right, const char *name, const std::string &expected, const std::string &got);
void check_input(const char *name, const Tensor &x);
void check_inputs(const Tensor &grad_out, const Tensor &x);

template <typename T>
using Accessor = torch::headeronly::HeaderOnlyGenericPackedTensorAccessor<
    T, 2, torch::headeronly::RestrictPtrTraits, int32_t>;
using In = Accessor<const float>;
using Out = Accessor<float>;

constexpr int THREADS = 256;

// ---- the arithmetic ----

static __device__ float f(float x) { return x * x; }
static __device__ float derivative(float x) { return 2 * x; }

__global__ void __launch_bounds__(THREADS) forward_kernel(In x, Out y) {
  for (int b = blockIdx.x; b < x.size(0); b += gridDim.x) {
    for (int d = threadIdx.x; d < x.size(1); d += THREADS) y[b][d] = f(x[b][d]);
  }
}

__global__ void __launch_bounds__(THREADS) backward_kernel(In grad_out, In x, Out grad_x) {
  for (int b = blockIdx.x; b < x.size(0); b += gridDim.x) {
    for (int d = threadIdx.x; d < x.size(1); d += THREADS)
      grad_x[b][d] = grad_out[b][d] * derivative(x[b][d]);
  }
}

// These accessors multiply indices by strides in 32 bits. The kernels' loop indices end up to one
// increment past the sizes, hence the margin below 2^31.
static In read(const char *name, const Tensor &x) {
  const int64_t last = (x.size(0) - 1) * x.stride(0) + (x.size(1) - 1) * x.stride(1),
                most = (int64_t{1} << 31) - 65536;
  check(std::max(last, x.numel()) < most, name,
        "to span fewer than " + std::to_string(most) + " elements", std::to_string(last + 1));
  return In(static_cast<const float *>(x.const_data_ptr()), x.sizes().data(), x.strides().data());
}

static Out write(const Tensor &x) {
  return Out(static_cast<float *>(x.mutable_data_ptr()), x.sizes().data(), x.strides().data());
}

// Returns the number of CTAs, at most 16384, which fill every GPU. A CTA may loop over several
// rows.
static int blocks(const Tensor &x) { return static_cast<int>(std::min<int64_t>(x.size(0), 16384)); }

static cudaStream_t stream_of(const Tensor &x) {
  void *stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

static void check_launch() {
  const cudaError_t error = cudaGetLastError();
  check(error == cudaSuccess, "the kernel", "to be launched", cudaGetErrorString(error));
}

static Tensor forward(const Tensor &x) {
  check_input("x", x);
  const DeviceGuard guard(x.get_device_index());
  const Tensor y = torch::stable::new_empty(x, x.sizes());
  if (x.numel() == 0) return y;
  forward_kernel<<<blocks(x), THREADS, 0, stream_of(x)>>>(read("x", x), write(y));
  check_launch();
  return y;
}

static Tensor backward(const Tensor &grad_out, const Tensor &x) {
  check_inputs(grad_out, x);
  const DeviceGuard guard(x.get_device_index());
  const Tensor grad_x = torch::stable::new_empty(x, x.sizes());
  if (x.numel() == 0) return grad_x;
  backward_kernel<<<blocks(x), THREADS, 0, stream_of(x)>>>(read("grad_out", grad_out), read("x", x),
                                                           write(grad_x));
  check_launch();
  return grad_x;
}

STABLE_TORCH_LIBRARY_IMPL(kernel_template, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace kernel_template
