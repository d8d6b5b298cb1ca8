// Exponentials and their sums on the GPU, for softmax and the losses.
#ifndef EXTENSION_CPP_ROWS_EXP_SUM_CUH
#define EXTENSION_CPP_ROWS_EXP_SUM_CUH

#include <cmath>

#include "rows/fragment.cuh"

namespace rows {

// Returns exp(x), computed with the hardware's instruction for 2^x. The relative error is at most
// 2^-22 + 1.25 |x| 2^-24, because the constant log2(e) and its product with x are rounded. Results
// below 2^-126 are 0.
__device__ inline float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
  return y;
}
__device__ inline double exponential(double x) { return exp(x); }

// A lower bound for log(p) where a kernel computes p log(p). exp(LOG_ZERO) is 0 in every dtype, and
// the bound avoids 0 * -inf, which is NaN.
constexpr float LOG_ZERO = -1000;

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Returns the number to subtract before exp: x, or 0 if x is -inf, because -inf - -inf is NaN.
template <typename A>
__device__ inline A finite_maximum(A x) {
  return x == -INFINITY ? A(0) : x;
}

// Returns the factor that converts exponentials relative to the maximum `from` into exponentials
// relative to `to`. If `from` is -inf, the exponentials are all 0 or NaN, and any factor will do.
template <typename A>
__device__ inline A rescale(A from, A to) {
  return from == -INFINITY ? A(1) : exponential(from - to);
}

template <typename A, bool ENTROPY>
struct Moment {
  A moment = 0;
};
template <typename A>
struct Moment<A, false> {
  static constexpr A moment = 0;
};

// Online softmax. In one pass over elements z, ExpSum computes their maximum, sum = sum(exp(z -
// max)), and with ENTROPY also moment = sum(exp(z - max) * (z - max)). A NaN does not become the
// maximum. NaN and +inf make the sum NaN.
template <typename A, bool ENTROPY>
struct ExpSum : Moment<A, ENTROPY> {
  A max = -INFINITY, sum = 0;

  // Makes the sums relative to the maximum `to`, which must be at least max.
  __device__ void raise(A to) {
    const A factor = rescale(max, to);
    if constexpr (ENTROPY) {
      if (max != -INFINITY && factor > 0) this->moment += sum * (max - to);
      this->moment *= factor;
    }
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
      if constexpr (ENTROPY) this->moment += e * ::max(distance, A(LOG_ZERO));
    }
  }

  // Adds the elements that `other` has summed.
  __device__ void join(ExpSum other) {
    const A most = ::max(max, other.max);
    raise(most);
    other.raise(most);
    sum += other.sum;
    if constexpr (ENTROPY) this->moment += other.moment;
  }
};

// Joins the exponential sums of the CTAs of a cluster. `most` and `sum` are the maximum and the sum
// of this CTA, and are replaced by those of the row. `turn` is the number of the exchange (RowSum).
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

}  // namespace rows

#endif
