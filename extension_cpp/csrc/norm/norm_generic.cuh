// The fallback kernels of the norms on the GPU, for float64, for tensors of different alignment,
// and for rows wider than a cluster can hold. They load single elements, and load a row again in
// each pass. blockDim.x threads process a row. sum_partials_kernel also serves the other kernels.
#ifndef EXTENSION_CPP_NORM_GENERIC_CUH
#define EXTENSION_CPP_NORM_GENERIC_CUH

#include "norm/norm_launch.cuh"

namespace norms {

// Returns element c of a weight or bias, or `missing` if `data` is NULL.
template <typename T>
__device__ inline acc_t<T> parameter(const void *data, bool is_float, int64_t c, int missing) {
  if (data == nullptr) return missing;
  if (is_float) return static_cast<const float *>(data)[c];
  return to_acc(static_cast<const T *>(data)[c]);
}

// Applies dropout to x, which is element i of a tensor.
template <typename A>
__device__ inline A drop_element(A x, const dropout_t &dropout, int64_t i) {
  A one[1] = {x};
  if (dropout.seed != nullptr) drop(one, dropout, draw_one(*dropout.seed, i));
  return one[0];
}

template <typename T, typename Norm>
__global__ void __launch_bounds__(256)
    generic_forward_kernel(const __grid_constant__ norm_forward_args p) {
  using A = acc_t<T>;
  using Sum = RowSum<A, 2>;
  __shared__ typename Sum::Shared shared;
  Sum row_sum(shared, 1, 0);
  int turn = 0;
  const A per_col = 1 / static_cast<A>(p.cols);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.rows;
       first += step) {
    const int64_t row = first + threadIdx.y, cols = row < p.rows ? p.cols : 0;
    const T *x = static_cast<const T *>(p.x) + row * p.x_stride;
    if (p.residual != nullptr) {
      const T *const residual = static_cast<const T *>(p.residual) + row * p.residual_stride;
      T *const sum = static_cast<T *>(p.sum) + row * p.cols;
      for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
        const A dropped = drop_element(to_acc(x[c]), p.dropout_x, row * p.cols + c);
        sum[c] = from_acc<T>(dropped + to_acc(residual[c]));
      }
      x = sum;  // no barrier is needed, because each thread reads what it wrote
    }
    const Statistics<A> statistics = Norm::statistics(
        [&](auto &&f) {
          for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) f(to_acc(x[c]));
        },
        nullptr, row_sum, turn, [&](int) { return p.cols; }, per_col, static_cast<A>(p.eps));
    if (threadIdx.x == 0 && row < p.rows && p.rstd != nullptr) {
      if (p.mean != nullptr) static_cast<A *>(p.mean)[row] = statistics.mean;
      static_cast<A *>(p.rstd)[row] = statistics.rstd;
    }
    const bool is_float = p.weight_dtype == DTYPE_FLOAT32;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
      const A weight = parameter<T>(p.weight, is_float, c, 1);
      const A bias = parameter<T>(p.bias, is_float, c, 0);
      const A y = Norm::y(Norm::xhat(to_acc(x[c]), statistics), weight, bias);
      static_cast<T *>(p.y)[row * p.cols + c] =
          from_acc<T>(drop_element(y, p.dropout_y, row * p.cols + c));
    }
  }
}

// The inputs of backward for one row, and the values computed from them for column c.
template <typename T, typename Norm>
struct GenericRow {
  using A = acc_t<T>;
  const norm_backward_args &p;
  const int64_t row;
  const T *x = static_cast<const T *>(p.x) + row * p.x_stride;
  const T *grad_out = static_cast<const T *>(p.grad_out) + row * p.grad_out_stride;
  const Statistics<A> statistics = {p.mean == nullptr ? A(0) : static_cast<const A *>(p.mean)[row],
                                    static_cast<const A *>(p.rstd)[row], 0};

  __device__ A xhat(int64_t c) const { return Norm::xhat(to_acc(x[c]), statistics); }
  __device__ A grad(int64_t c) const {
    return drop_element(to_acc(grad_out[c]), p.dropout_y, row * p.cols + c);
  }
  __device__ A g(int64_t c) const {
    const A weight = parameter<T>(p.weight, p.weight_dtype == DTYPE_FLOAT32, c, 1);
    return weighted(grad(c), statistics.rstd, weight);
  }
};

template <typename T, typename Norm>
__global__ void __launch_bounds__(256)
    generic_rows_kernel(const __grid_constant__ norm_backward_args p) {
  using A = acc_t<T>;
  using Sum = RowSum<A, 2>;
  constexpr int P = Norm::PARAMETERS;
  __shared__ typename Sum::Shared shared;
  Sum row_sum(shared, 1, 0);
  int turn = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < p.rows;
       first += step) {
    const int64_t row = first + threadIdx.y, cols = row < p.rows ? p.cols : 0;
    const GenericRow<T, Norm> in{p, row < p.rows ? row : 0};
    A sums[P] = {};
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
      Norm::add(sums, in.g(c), in.xhat(c));
    }
    row_sum.sum_cta(sums, turn++);
#pragma unroll
    for (int i = 0; i < P; ++i) sums[i] /= static_cast<A>(p.cols);
    const T *const grad_sum = static_cast<const T *>(p.grad_sum) + row * p.grad_sum_stride;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
      const int64_t at = row * p.cols + c;
      A grad_x = Norm::grad_x(in.g(c), in.xhat(c), sums);
      if (p.grad_sum != nullptr) grad_x += to_acc(grad_sum[c]);
      static_cast<T *>(p.grad_x)[at] = from_acc<T>(grad_x);
      if (p.grad_dropped == nullptr) continue;
      static_cast<T *>(p.grad_dropped)[at] = from_acc<T>(drop_element(grad_x, p.dropout_x, at));
    }
  }
}

// CTA (i, j) sums the 32 columns that begin with column 32 * i, over the `chunk` rows that begin
// with row j * chunk. It writes the sums to partial row j.
template <typename T, typename Norm>
__global__ void __launch_bounds__(COLUMNS_X *COLUMNS_Y)
    generic_columns_kernel(const __grid_constant__ norm_backward_args p, int64_t chunk) {
  using A = acc_t<T>;
  constexpr int P = Norm::PARAMETERS;
  __shared__ A shared[COLUMNS_Y][COLUMNS_X][P];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * COLUMNS_X + threadIdx.x;
  const int64_t begin = blockIdx.y * chunk, end = min(begin + chunk, p.rows);
  A sums[P] = {};
  for (int64_t row = begin + threadIdx.y; row < end && c < p.cols; row += COLUMNS_Y) {
    const GenericRow<T, Norm> in{p, row};
    Norm::add(sums, in.grad(c), in.xhat(c));
  }
#pragma unroll
  for (int i = 0; i < P; ++i) shared[threadIdx.y][threadIdx.x][i] = sums[i];
  __syncthreads();
  if (threadIdx.y > 0 || c >= p.cols) return;
  A *out = static_cast<A *>(p.partial) + blockIdx.y * p.cols + c;
  const void *const wanted[2] = {p.grad_weight, p.grad_bias};
#pragma unroll
  for (int i = 0; i < P; ++i) {
    if (wanted[i] == nullptr) continue;
    for (int y = 1; y < COLUMNS_Y; ++y) sums[i] += shared[y][threadIdx.x][i];
    *out = sums[i];
    out += gridDim.y * p.cols;
  }
}

constexpr int PARTIALS_X = 32, PARTIALS_Y = 16;

// Adds up the partial rows, of shape (parts, cols) for each output. The order of the additions
// depends only on `parts`. The grid begins with the CTAs for the output `first`; `second` follows.
template <typename A, typename W>
__global__ void __launch_bounds__(PARTIALS_X *PARTIALS_Y)
    sum_partials_kernel(const A *partial, W *first, W *second, int64_t parts, int64_t cols) {
  __shared__ double shared[PARTIALS_Y][PARTIALS_X];
  // This kernel may start before the previous one has ended (programmatic dependent launch), so it
  // must wait until `partial` has been written.
  if (HAS_CLUSTERS) asm volatile("griddepcontrol.wait;" ::: "memory");
  const int64_t ctas = (cols + PARTIALS_X - 1) / PARTIALS_X;
  const int64_t c = blockIdx.x % ctas * PARTIALS_X + threadIdx.x;
  if (blockIdx.x >= ctas) partial += parts * cols;
  double sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += PARTIALS_Y) {
      sum += partial[part * cols + c];
    }
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= cols) return;
  for (int y = 1; y < PARTIALS_Y; ++y) sum += shared[y][threadIdx.x];
  (blockIdx.x < ctas ? first : second)[c] = from_acc<W>(static_cast<acc_t<W>>(sum));
}

}  // namespace norms

#endif
