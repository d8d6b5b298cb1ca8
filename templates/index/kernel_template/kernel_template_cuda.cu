// kernel_template on the GPU. Forward: `lanes` threads copy a row, in vectors of 16 bytes if every
// row begins at a multiple of 16 bytes. A CTA copies several rows if they are short. Backward: one
// CTA per row of grad_x searches the whole index for its row, 1024 values at a time, and adds the
// rows of grad_out that it finds, in their order. The CTA therefore reads the index, which stays in
// the L2, once for every 256 vectors of columns. (For a table of millions of rows, sort the index.)
#include "kernel_template/kernel_template.h"

#include <cmath>

#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using forward_args = kernel_template_forward_args;
using backward_args = kernel_template_backward_args;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int EACH = 4;                            // index values that a thread loads at once
constexpr int64_t MOST_BLOCKS = INT64_C(1) << 30;  // gridDim.x is at most 2^31 - 1

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) forward_kernel(forward_args args) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  for (; i < args.count; i += step) {
    const int64_t row = args.index[i];
    const bool is_row = row >= 0 && row < args.rows;
    const T *x = static_cast<const T *>(args.x) + (is_row ? row : 0) * args.cols;
    T *out = static_cast<T *>(args.out) + i * args.cols;
    for (int64_t c = threadIdx.x * N; c < args.cols; c += blockDim.x * N) {
      acc_t<T> v[N];
      if (is_row) {
        load<T, N>(v, x + c);
      } else {
        for (int k = 0; k < N; ++k) v[k] = static_cast<acc_t<T>>(NAN);
      }
      store<T, N>(out + c, v);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) backward_kernel(backward_args args) {
  // One bit for each of the loaded index values. The bit is set if the value is the CTA's row.
  __shared__ unsigned found[EACH * WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    for (int64_t tile = 0; tile < args.cols; tile += THREADS * N) {
      const int64_t c = tile + threadIdx.x * N;
      double sums[N] = {0};
      for (int64_t first = 0; first < args.count; first += EACH * THREADS) {
        bool any = false;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const int64_t i = first + e * THREADS + threadIdx.x;
          const bool is_row = i < args.count && args.index[i] == row;
          const unsigned bits = __ballot_sync(0xffffffffu, is_row);
          if (lane == 0) found[e * WARPS + warp] = bits;
          any = any || is_row;
        }
        // If no thread has found the row, none reads `found`, so no second barrier is needed.
        if (!__syncthreads_or(any)) continue;
        for (int w = 0; w < EACH * WARPS; ++w) {
          for (unsigned bits = found[w]; bits != 0 && c < args.cols; bits &= bits - 1) {
            const int64_t i = first + w * 32 + __ffs(bits) - 1;  // the lowest remaining bit
            acc_t<T> g[N];
            load<T, N>(g, static_cast<const T *>(args.grad_out) + i * args.cols + c);
            for (int k = 0; k < N; ++k) sums[k] += static_cast<double>(g[k]);
          }
        }
        __syncthreads();  // waits for all reads before the next values are stored
      }
      acc_t<T> total[N];
      for (int k = 0; k < N; ++k) total[k] = static_cast<acc_t<T>>(sums[k]);
      if (c < args.cols) store<T, N>(static_cast<T *>(args.grad_x) + row * args.cols + c, total);
    }
  }
}

// Calls f with a zero of the type and the number of elements in a vector. A vector has 16 bytes if
// all rows of both tensors begin at a multiple of 16 bytes, and one element otherwise.
template <typename F>
static cudaError_t with_vectors(dtype_t dtype, int64_t cols, const void *a, const void *b, F f) {
  return with_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const uintptr_t ends = reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) |
                           static_cast<uintptr_t>(cols) * sizeof(T);
    if (ends % 16 == 0) return f(zero, std::integral_constant<int, 16 / sizeof(T)>{});
    return f(zero, std::integral_constant<int, 1>{});
  });
}

static unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>(rows < MOST_BLOCKS ? rows : MOST_BLOCKS);
}

extern "C" int kernel_template_forward_cuda(const forward_args *args, void *stream) {
  return with_vectors(args->dtype, args->cols, args->x, args->out, [&](auto zero, auto vector) {
    constexpr int N = decltype(vector)::value;
    int lanes = 1;
    while (lanes < THREADS && lanes * N < args->cols) lanes *= 2;
    const dim3 threads(lanes, THREADS / lanes);
    const unsigned blocks = blocks_for(ceil_div(args->count, threads.y));
    forward_kernel<decltype(zero), N>
        <<<blocks, threads, 0, static_cast<cudaStream_t>(stream)>>>(*args);
    return cudaGetLastError();
  });
}

extern "C" int kernel_template_backward_cuda(const backward_args *args, void *stream) {
  const void *g = args->grad_out;
  return with_vectors(args->dtype, args->cols, g, args->grad_x, [&](auto zero, auto vector) {
    constexpr int N = decltype(vector)::value;
    backward_kernel<decltype(zero), N>
        <<<blocks_for(args->rows), THREADS, 0, static_cast<cudaStream_t>(stream)>>>(*args);
    return cudaGetLastError();
  });
}

}  // namespace kernel_template_kernels
