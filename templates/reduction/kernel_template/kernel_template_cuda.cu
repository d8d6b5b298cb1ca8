// kernel_template on the GPU. Forward uses one CTA per row, whose threads stride over the columns.
// Backward uses one CTA per part (a range of rows). Each column belongs to one thread, which alone
// adds to the column's sum. A second kernel adds the sums of the parts in order, without atomics.
// The code loads single elements, because it is written for reading. csrc/norm has kernels for the
// same op at the speed of memory.
#include "kernel_template/kernel_template.h"

#include "common/cuda/reduce.cuh"
#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using forward_args = kernel_template_forward_args;
using backward_args = kernel_template_backward_args;

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

// weight[c]; 1 if there is no weight.
template <typename T>
static __device__ acc_t<T> weight_at(const void *weight, int64_t c) {
  return weight == nullptr ? acc_t<T>(1) : to_acc(static_cast<const T *>(weight)[c]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) forward_kernel(forward_args args) {
  using A = acc_t<T>;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T *x = static_cast<const T *>(args.x) + row * args.cols;
    T *y = static_cast<T *>(args.y) + row * args.cols;
    A sum[1] = {0};
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS)
      sum[0] += to_acc(x[c]) * to_acc(x[c]);
    block_sum<THREADS>(sum);
    const A rstd = static_cast<A>(
        1 / sqrt(static_cast<double>(sum[0]) / static_cast<double>(args.cols) + args.eps));
    if (threadIdx.x == 0) static_cast<A *>(args.rstd)[row] = rstd;
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS) {
      y[c] = from_acc<T>(to_acc(x[c]) * rstd * weight_at<T>(args.weight, c));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) backward_kernel(backward_args args) {
  using A = acc_t<T>;
  const int64_t first = blockIdx.x * args.part_rows, next = first + args.part_rows;
  const int64_t last = next < args.rows ? next : args.rows;
  double *sums = args.grad_weight ? args.partial + blockIdx.x * args.wide_cols : nullptr;
  for (int64_t c = threadIdx.x; sums && c < args.cols; c += THREADS) sums[c] = 0;
  for (int64_t row = first; row < last; ++row) {
    const T *x = static_cast<const T *>(args.x) + row * args.cols;
    const T *grad_out = static_cast<const T *>(args.grad_out) + row * args.cols;
    const A rstd = static_cast<const A *>(args.rstd)[row];
    A sum[1] = {0};
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS) {
      const A xhat = to_acc(x[c]) * rstd, g = to_acc(grad_out[c]);
      if (sums) sums[c] += static_cast<double>(g * xhat);
      sum[0] += g * weight_at<T>(args.weight, c) * xhat;
    }
    if (args.grad_x == nullptr) continue;
    block_sum<THREADS>(sum);
    const A mean = sum[0] / static_cast<A>(args.cols);
    T *grad_x = static_cast<T *>(args.grad_x) + row * args.cols;
    for (int64_t c = threadIdx.x; c < args.cols; c += THREADS) {
      const A xhat = to_acc(x[c]) * rstd, g = to_acc(grad_out[c]) * weight_at<T>(args.weight, c);
      grad_x[c] = from_acc<T>(rstd * (g - xhat * mean));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(THREADS) grad_weight_kernel(backward_args args) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (c >= args.cols) return;
  double sum = 0;
  for (int64_t part = 0; part < args.parts; ++part) sum += args.partial[part * args.wide_cols + c];
  static_cast<T *>(args.grad_weight)[c] = from_acc<T>(static_cast<acc_t<T>>(sum));
}

extern "C" int kernel_template_forward_cuda(const forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const unsigned blocks =
        static_cast<unsigned>(args->rows < MOST_BLOCKS ? args->rows : MOST_BLOCKS);
    forward_kernel<T><<<blocks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*args);
    return cudaGetLastError();
  });
}

extern "C" int kernel_template_backward_cuda(const backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const cudaStream_t on = static_cast<cudaStream_t>(stream);
    if (args->rows > 0) {  // a grid of 0 CTAs is an error
      backward_kernel<T><<<static_cast<unsigned>(args->parts), THREADS, 0, on>>>(*args);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    if (args->grad_weight == nullptr) return cudaSuccess;
    const unsigned blocks = static_cast<unsigned>(ceil_div(args->cols, THREADS));
    grad_weight_kernel<T><<<blocks, THREADS, 0, on>>>(*args);
    return cudaGetLastError();
  });
}

}  // namespace kernel_template_kernels
