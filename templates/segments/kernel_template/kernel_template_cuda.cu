// kernel_template on the GPU. `lanes` threads process a segment, or in backward a row, in vectors
// of 16 bytes if every row begins at a multiple of 16 bytes. A CTA processes several segments or
// rows if they are short. Forward: each thread owns columns and adds the rows of the segment in
// their order, with four rows in flight and without atomics. Segments of very different length
// leave threads idle. Backward: a thread finds its row's segment by bisection of offsets, which the
// caches hold.
#include "kernel_template/kernel_template.h"

#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using forward_args = kernel_template_forward_args;
using backward_args = kernel_template_backward_args;

constexpr int THREADS = 256;
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) forward_kernel(forward_args args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t s = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; s < args.segments; s += step) {
    const int64_t begin = args.offsets[s] > 0 ? args.offsets[s] : 0;
    const int64_t end = args.offsets[s + 1] < args.rows ? args.offsets[s + 1] : args.rows;
    for (int64_t c = threadIdx.x * N; c < args.cols; c += blockDim.x * N) {
      const T *x = static_cast<const T *>(args.x) + c;
      double sums[N] = {0};
#pragma unroll 4
      for (int64_t row = begin; row < end; ++row) {
        acc_t<T> v[N];
        load<T, N>(v, x + row * args.cols);
        for (int k = 0; k < N; ++k) sums[k] += static_cast<double>(v[k]);
      }
      acc_t<T> total[N];
      for (int k = 0; k < N; ++k) total[k] = static_cast<acc_t<T>>(sums[k]);
      store<T, N>(static_cast<T *>(args.out) + s * args.cols + c, total);
    }
  }
}

// Returns the segment of a row, or -1 or args.segments if the row is in none.
static __device__ int64_t segment_of(const backward_args &args, int64_t row) {
  int64_t low = -1, high = args.segments + 1;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (args.offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) backward_kernel(backward_args args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; row < args.rows; row += step) {
    const int64_t s = segment_of(args, row);
    const bool is_segment = s >= 0 && s < args.segments;
    const T *grad_out = static_cast<const T *>(args.grad_out) + (is_segment ? s : 0) * args.cols;
    T *grad_x = static_cast<T *>(args.grad_x) + row * args.cols;
    for (int64_t c = threadIdx.x * N; c < args.cols; c += blockDim.x * N) {
      acc_t<T> v[N] = {0};
      if (is_segment) load<T, N>(v, grad_out + c);
      store<T, N>(grad_x + c, v);
    }
  }
}

// Calls f with a zero of the type, the number of elements in a vector, the grid and the CTA, for
// `items` segments or rows of `cols` elements. A vector has 16 bytes if all rows of both tensors
// begin at a multiple of 16 bytes, and one element otherwise.
template <typename F>
static cudaError_t with_grid(dtype_t dtype, int64_t items, int64_t cols, const void *a,
                             const void *b, F f) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto vector) {
      int lanes = 1;
      while (lanes < THREADS && lanes * decltype(vector)::value < cols) lanes *= 2;
      const dim3 threads(lanes, THREADS / lanes);
      const int64_t blocks = ceil_div(items, threads.y);
      f(zero, vector, static_cast<unsigned>(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS), threads);
      return cudaGetLastError();
    };
    const uintptr_t ends = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                           static_cast<uintptr_t>(cols) * sizeof(T);
    if (ends % 16 == 0) return launch(std::integral_constant<int, 16 / sizeof(T)>{});
    return launch(std::integral_constant<int, 1>{});
  });
}

extern "C" int kernel_template_forward_cuda(const forward_args *args, void *stream) {
  return with_grid(args->dtype, args->segments, args->cols, args->x, args->out,
                   [&](auto zero, auto vector, unsigned blocks, dim3 threads) {
                     forward_kernel<decltype(zero), decltype(vector)::value>
                         <<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
                   });
}

extern "C" int kernel_template_backward_cuda(const backward_args *args, void *stream) {
  return with_grid(args->dtype, args->rows, args->cols, args->grad_out, args->grad_x,
                   [&](auto zero, auto vector, unsigned blocks, dim3 threads) {
                     backward_kernel<decltype(zero), decltype(vector)::value>
                         <<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
                   });
}

}  // namespace kernel_template_kernels
