// The CUDA kernels of index_sum. Each thread processes one element. Forward adds with atomics,
// because several rows may have the same index.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

template <typename T>
__global__ void forward_kernel(const T *x, const int64_t *index, T *out, T scale, int cols,
                               int numel) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < numel) atomicAdd(out + index[i / cols] * cols + i % cols, scale * x[i]);
}

template <typename T>
__global__ void backward_kernel(const T *grad_out, const int64_t *index, T *grad_x, T scale,
                                int cols, int numel) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < numel) grad_x[i] = scale * grad_out[index[i / cols] * cols + i % cols];
}

torch::Tensor forward_cuda(torch::Tensor x, torch::Tensor index, int64_t n, double scale) {
  const at::cuda::CUDAGuard guard(x.device());
  torch::Tensor out = torch::zeros({n, x.size(1)}, x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "index_sum", [&] {
    forward_kernel<scalar_t><<<(x.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<scalar_t>(), index.data_ptr<int64_t>(), out.data_ptr<scalar_t>(), scale,
        x.size(1), x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

torch::Tensor backward_cuda(torch::Tensor grad_out, torch::Tensor index, double scale) {
  const at::cuda::CUDAGuard guard(grad_out.device());
  torch::Tensor grad_x = torch::empty({index.size(0), grad_out.size(1)}, grad_out.options());
  AT_DISPATCH_FLOATING_TYPES(grad_out.scalar_type(), "index_sum_backward", [&] {
    backward_kernel<scalar_t>
        <<<(grad_x.numel() + 255) / 256, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
            grad_out.data_ptr<scalar_t>(), index.data_ptr<int64_t>(), grad_x.data_ptr<scalar_t>(),
            scale, grad_out.size(1), grad_x.numel());
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return grad_x;
}
