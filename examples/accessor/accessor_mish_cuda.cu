// accessor_mish on the GPU. A CTA processes a row, and its threads stride over the columns, so that
// neighbouring threads access neighbouring addresses. Both loops run up to the sizes in the
// accessors, so that no index leaves the tensor.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>

namespace accessor_mish {

// In accessor_mish.cpp.
void check_input(const char *name, const at::Tensor &x);
void check_inputs(const at::Tensor &grad_out, const at::Tensor &x);

using In = at::PackedTensorAccessor32<const float, 2, at::RestrictPtrTraits>;
using Out = at::PackedTensorAccessor32<float, 2, at::RestrictPtrTraits>;

constexpr int THREADS = 256;

// ---- the arithmetic ----

static __device__ float f(float x) {
  const float e = expf(x);
  return x > 20 ? x : x * (e * (e + 2) / (e * (e + 2) + 2));
}

static __device__ float derivative(float x) {
  const float e = expf(x), denominator = e * (e + 2) + 2;
  return x > 20 ? 1 : e * ((e + 2) * denominator + 4 * x * (1 + e)) / (denominator * denominator);
}

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

// A PackedTensorAccessor32 multiplies indices by strides in 32 bits. The kernels' loop indices end
// up to one increment past the sizes, hence the margin below 2^31.
static void check_32_bits(const char *name, const at::Tensor &x) {
  const int64_t last = (x.size(0) - 1) * x.stride(0) + (x.size(1) - 1) * x.stride(1),
                most = (int64_t{1} << 31) - 65536;
  TORCH_CHECK(std::max(last, x.numel()) < most, "expected ", name, " to span fewer than ", most,
              " elements, but got ", last + 1);
}

// Returns the number of CTAs, at most 16384, which fill every GPU. A CTA may loop over several
// rows.
static int blocks(const at::Tensor &x) {
  return static_cast<int>(std::min<int64_t>(x.size(0), 16384));
}

static at::Tensor forward(const at::Tensor &x) {
  check_input("x", x);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return y;
  check_32_bits("x", x);
  forward_kernel<<<blocks(x), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.packed_accessor32<const float, 2, at::RestrictPtrTraits>(),
      y.packed_accessor32<float, 2, at::RestrictPtrTraits>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}

static at::Tensor backward(const at::Tensor &grad_out, const at::Tensor &x) {
  check_inputs(grad_out, x);
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor grad_x = at::empty(x.sizes(), x.options());
  if (x.numel() == 0) return grad_x;
  check_32_bits("grad_out", grad_out);
  check_32_bits("x", x);
  backward_kernel<<<blocks(x), THREADS, 0, c10::cuda::getCurrentCUDAStream()>>>(
      grad_out.packed_accessor32<const float, 2, at::RestrictPtrTraits>(),
      x.packed_accessor32<const float, 2, at::RestrictPtrTraits>(),
      grad_x.packed_accessor32<float, 2, at::RestrictPtrTraits>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return grad_x;
}

TORCH_LIBRARY_IMPL(accessor_mish, CUDA, m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
}

}  // namespace accessor_mish
