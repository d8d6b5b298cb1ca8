// Backward of few rows, in one kernel with two kinds of CTAs. No CTA waits for another.
//
// Row CTAs hold rows in registers, as in forward, and write grad_x. Column CTAs sum a few columns
// over all rows and write the parameters' gradients. This division needs neither partial rows nor a
// second kernel. Row and column CTAs both read x and grad_out. Because these tensors are small, the
// second read hits the L2. Column CTAs take longest, so they come first in the grid. If only grad_x
// is computed, there are only row CTAs, for any number of rows.
#ifndef EXTENSION_CPP_NORM_BACKWARD_SPLIT_CUH
#define EXTENSION_CPP_NORM_BACKWARD_SPLIT_CUH

#include "norm/norm_backward.cuh"

namespace norms {

constexpr int SPLIT_THREADS = 512;

// Sums N columns over the rows first, first + step, and so on. The loads of two rows are in flight.
template <typename Norm, Form FORM, typename T>
__device__ inline void sum_columns(const BackwardParams<T> &p, int column, int first, int step,
                                   float (&sums)[VECTOR<T>][Norm::PARAMETERS]) {
  constexpr int N = VECTOR<T>, ROWS = 2;
  for (int64_t begin = first; begin < p.rows; begin += ROWS * step) {
    Vector<T, N> x[ROWS], grad_out[ROWS];
    Statistics<float> statistics[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const int64_t row = begin + r * step;
      const bool is_row = row < p.rows;
      x[r] = load_hinted(p.x_row(row) + column, is_row, p.hint);
      grad_out[r] = load_hinted(p.grad_out_row(row) + column, is_row, p.hint);
      statistics[r] = to_statistics<T>(is_row ? load_moments(p, row) : float2{});
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      float values[N], grad[N];
      unpack<T, N>(values, x[r]);
      unpack<T, N>(grad, grad_out[r]);
      if (FORM == Form::DROPOUT_OF_Y) {
        RandomBits<N> bits[1];
        draw(bits, *p.dropout_y.seed, {(begin + r * step) * p.cols + column});
        select(grad, p.dropout_y, bits[0]);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        Norm::add(sums[j], grad[j], Norm::xhat(values[j], statistics[r]));
      }
    }
  }
}

template <typename Norm, Form FORM, typename T>
__device__ inline void split_columns(const BackwardParams<T> &p) {
  constexpr int N = VECTOR<T>, P = Norm::PARAMETERS, X = COLUMN_VECTORS, WIDTH = X * N;
  __shared__ float shared[SPLIT_THREADS / 32][P][WIDTH];
  const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int x = thread % X, column = (blockIdx.x * X + x) * N;
  float sums[N][P] = {};
  if (column < p.cols) sum_columns<Norm, FORM>(p, column, thread / X, threads / X, sums);
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
#pragma unroll
      for (int offset = 16; offset >= X; offset /= 2) {
        sums[j][i] += __shfl_xor_sync(0xffffffffu, sums[j][i], offset);
      }
      if (thread % 32 < X) shared[thread / 32][i][x * N + j] = sums[j][i];
    }
  }
  __syncthreads();
  for (int n = thread; n < P * WIDTH; n += threads) {
    const int i = n / WIDTH, c = blockIdx.x * WIDTH + n % WIDTH;
    float sum = 0;
    for (int warp = 0; warp < threads / 32; ++warp) sum += shared[warp][i][n % WIDTH];
    if (FORM == Form::DROPOUT_OF_Y) sum *= p.dropout_y.scale_float;
    if (c >= p.cols || p.gradient(i) == nullptr) continue;
    if (p.weight_dtype == DTYPE_FLOAT32) {
      static_cast<float *>(p.gradient(i))[c] = sum;
    } else {
      static_cast<T *>(p.gradient(i))[c] = from_acc<T>(sum);
    }
  }
}

template <typename T, typename Norm, Form FORM, int K>
__global__ void __maxnreg__(64) split_kernel(const __grid_constant__ BackwardParams<T> p) {
  using Rows = PersistentRows<T, Norm, FORM, K, true, false>;
  __shared__ typename Rows::Sum::Shared shared;
  if (static_cast<int64_t>(blockIdx.x) < p.column_ctas) return split_columns<Norm, FORM>(p);
  Rows rows(p, shared, blockIdx.x - p.column_ctas);
  rows.start();
  rows.process(rows.first);
}

}  // namespace norms

#endif
