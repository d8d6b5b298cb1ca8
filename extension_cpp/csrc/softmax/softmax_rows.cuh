// Shared by softmax and the losses on the GPU: exponentials and their sums, rows in registers with
// the plan of the norms, and the strips of the generic kernels.
#ifndef EXTENSION_CPP_SOFTMAX_ROWS_CUH
#define EXTENSION_CPP_SOFTMAX_ROWS_CUH

#include <algorithm>
#include <cmath>

#include "norm/norm_launch.cuh"

namespace softmaxes {

// ---- exponentials ----

// exp(x), with the instruction for 2^x. The relative error is at most 2^-22 + |x| * 2^-24, because
// the product with log2(e) is rounded. Results below 2^-126 are 0.
__device__ inline float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
__device__ inline double exponential(double x) { return exp(x); }

// A lower bound for log(p) where it is multiplied by p: exp(LOG_ZERO) is 0 in every dtype, and
// 0 * -inf would be NaN.
constexpr float LOG_ZERO = -1000;

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// The number to subtract before exp: the maximum, or 0 if it is -inf, because -inf - -inf is NaN.
template <typename A>
__device__ inline A finite_maximum(A x) {
  return x == -INFINITY ? A(0) : x;
}

// The factor that converts exponentials relative to the maximum `from` into exponentials relative
// to `to`. If `from` is -inf, they are all 0 (or NaN), and any factor will do.
template <typename A>
__device__ inline A rescale(A from, A to) {
  return from == -INFINITY ? A(1) : exponential(from - to);
}

// Online softmax: computes, in one pass over elements z, their maximum, sum = sum(exp(z - max)),
// and with ENTROPY moment = sum(exp(z - max) * (z - max)). The maximum skips NaN. NaN and +inf make
// the sum NaN.
template <typename A, bool ENTROPY>
struct ExpSum {
  A max = -INFINITY, sum = 0, moment = 0;

  // Makes the sums relative to the maximum `to`, which is at least max.
  __device__ void raise(A to) {
    const A factor = rescale(max, to);
    if (ENTROPY && max != -INFINITY && factor > 0) moment += sum * (max - to);
    moment *= factor;
    sum *= factor;
    max = to;
  }

  template <int N>
  __device__ void add(const A (&z)[N]) {
    A most = z[0];
#pragma unroll
    for (int j = 1; j < N; ++j) most = ::max(most, z[j]);
    if (most > max) raise(most);
    const A from = finite_maximum(max);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A distance = z[j] - from, e = exponential(distance);
      sum += e;
      if (ENTROPY) moment += e * ::max(distance, A(LOG_ZERO));
    }
  }
};

// ---- rows in registers ----

// Registers per thread of a kernel that holds a row. They limit the threads of an SM, and so its
// bytes in flight.
constexpr int row_registers(int vectors, bool is_aligned) {
  return (is_aligned ? 64 : 80) + (vectors == 8 ? 16 : 0);
}

// Stores values that RowFragment::for_each passed.
template <typename T, int M>
__device__ inline void store_at(T *row, int column, const float (&values)[M]) {
  if constexpr (M == 1) {
    row[column] = from_acc<T>(values[0]);
  } else {
    store<T, M>(row + column, values);
  }
}

// Joins the exponential sums of a cluster's CTAs. `most` and `sum` are the maximum and the sum of
// this CTA, and become those of the row.
template <typename Sum>
__device__ inline void join_cluster(const Sum &row_sum, float &most, float &sum, int turn) {
  row_sum.send_to_all({most, sum}, turn);
  const float2 part = row_sum.receive(turn);
  const bool is_cta = threadIdx.x % MAX_CLUSTER < row_sum.cluster;
  most = group_max(is_cta ? part.x : -INFINITY, MAX_CLUSTER);
  float sums[1] = {is_cta ? part.y * rescale(part.x, most) : 0};
  group_sum(sums, MAX_CLUSTER);
  sum = sums[0];
}

// The plan of a row from the norms' table (norm/norm_plan.h). `is_congruent`: inner = 1, and rows
// have the same alignment in all tensors.
inline cudaError_t plan_rows(norms::Plan &plan, dtype_t dtype, int64_t rows, int64_t cols,
                             bool reads_two, bool is_congruent) {
  norms::Device device;
  const cudaError_t error = norms::current_device(device);
  norms::Problem problem{};
  problem.form = reads_two ? norms::Form::RESIDUAL : norms::Form::PLAIN;
  problem.dtype = dtype;
  problem.rows = rows;
  problem.cols = cols;
  problem.is_congruent = is_congruent;
  if (error == cudaSuccess) plan = norms::pick(problem, device);
  return error;
}

// ---- strips ----

// A CTA processes a strip: blockDim.x inner elements of one outer index. blockDim.y threads share
// the columns of an inner element. The threads of a warp read neighbouring elements, along inner
// or, if inner is small, along cols.
constexpr int STRIP_THREADS = 256;

struct Strip {
  int64_t outer, i;  // of this thread
  bool is_there;

  __device__ Strip(int64_t strip, int64_t strips, int64_t inner)
      : outer(strip / strips), i(strip % strips * blockDim.x + threadIdx.x), is_there(i < inner) {}
};

// Joins the values of the blockDim.y threads of each inner element with join(mine, other).
template <typename A, typename Join>
__device__ inline A join_strip(A value, Join &&join) {
  __shared__ A shared[STRIP_THREADS];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  __syncthreads();  // after all reads of the previous call
  shared[thread] = value;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      shared[thread] = join(shared[thread], shared[thread + half * blockDim.x]);
    }
  }
  __syncthreads();
  return shared[threadIdx.x];
}

template <typename A, bool ENTROPY>
__device__ inline void join_strip(ExpSum<A, ENTROPY> &own) {
  const auto add = [](A a, A b) { return a + b; };
  own.raise(join_strip(own.max, [](A a, A b) { return max(a, b); }));
  own.sum = join_strip(own.sum, add);
  if (ENTROPY) own.moment = join_strip(own.moment, add);
}

// Calls f(ctas, threads, strips) with the shape of a launch over strips.
template <typename F>
cudaError_t with_strips(int64_t outer, int64_t inner, F &&f) {
  unsigned x = 1;
  while (x < 32 && x < inner) x *= 2;
  const int64_t strips = ceil_div(inner, x);
  f(static_cast<unsigned>(std::min<int64_t>(outer * strips, INT32_MAX)), dim3(x, STRIP_THREADS / x),
    strips);
  return cudaGetLastError();
}

}  // namespace softmaxes

#endif
