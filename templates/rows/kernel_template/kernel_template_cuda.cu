// kernel_template on the GPU: one CTA per row, whose threads stride over the columns. The code,
// written for reading, loads single elements. csrc/norm has kernels at the speed of memory.
#include "kernel_template/kernel_template.h"

#include "common/cuda/reduce.cuh"
#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using forward_args = kernel_template_forward_args;
using backward_args = kernel_template_backward_args;

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

// The term that an element adds to its row's sum, and the term's derivative.
template <typename A>
__device__ A term(A x) {
  return x * x;
}

template <typename A>
__device__ A derivative(A x) {
  return 2 * x;
}

template <typename T>
__global__ void __launch_bounds__(THREADS) forward_kernel(forward_args args) {
  using A = acc_t<T>;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T *x = static_cast<const T *>(args.x) + row * args.cols;
    A sum[1] = {0};
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS) sum[0] += term(to_acc(x[c]));
    block_sum<THREADS>(sum);
    if (threadIdx.x == 0) {
      const double mean = static_cast<double>(sum[0]) / static_cast<double>(args.cols);
      static_cast<T *>(args.y)[row] = from_acc<T>(static_cast<A>(mean));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_kernel(backward_args args) {
  using A = acc_t<T>;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T *x = static_cast<const T *>(args.x) + row * args.cols;
    T *grad_x = static_cast<T *>(args.grad_x) + row * args.cols;
    const A grad_out = to_acc(static_cast<const T *>(args.grad_out)[row]);
    const A factor = grad_out / static_cast<A>(args.cols);
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS) {
      grad_x[c] = from_acc<T>(factor * derivative(to_acc(x[c])));
    }
  }
}

static unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>(rows < MOST_BLOCKS ? rows : MOST_BLOCKS);
}

extern "C" int kernel_template_forward_cuda(const forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    forward_kernel<T><<<blocks_for(args->rows), THREADS, 0, on>>>(*args);
    return cudaGetLastError();
  });
}

extern "C" int kernel_template_backward_cuda(const backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    backward_kernel<T><<<blocks_for(args->rows), THREADS, 0, on>>>(*args);
    return cudaGetLastError();
  });
}

}  // namespace kernel_template_kernels
