// The formulas of the norms on the GPU. All kernels use them, including the fallback. A is the
// accumulation type: double for float64, and float otherwise.
//
// PARAMETERS is 1 for rms_norm (weight) and 2 for layer_norm (weight, bias). Backward computes
// PARAMETERS sums over each row, and PARAMETERS sums over each column. The column sums are the
// gradients of the parameters.
#ifndef EXTENSION_CPP_NORM_MATH_CUH
#define EXTENSION_CPP_NORM_MATH_CUH

#include "common/cuda/dropout.cuh"
#include "rows/fragment.cuh"

namespace norms {

using namespace rows;

// The statistics of a row: xhat = (x - mean) * rstd + offset. `offset` corrects the rounding of
// `mean`. Forward does not store `offset`.
template <typename A>
struct Statistics {
  A mean, rstd, offset;
};

__device__ inline float reciprocal_root(float x) { return rsqrtf(x); }
__device__ inline double reciprocal_root(double x) { return 1 / sqrt(x); }

template <typename A>
struct RmsNorm {
  static constexpr int PARAMETERS = 1;

  // Returns the statistics of a row. for_each(f) calls f(x) for the elements of the row that this
  // thread owns. `first` is one of these elements, or NULL. row_sum is a RowSum. columns(r) is the
  // number of columns of CTA r in a cluster.
  template <typename ForEach, typename RowSum, typename Columns>
  __device__ static Statistics<A> statistics(const ForEach &for_each, const A *,
                                             const RowSum &row_sum, int &turn, const Columns &,
                                             A per_col, A eps) {
    A squares[1] = {0};
    for_each([&](A x) { squares[0] += x * x; });
    row_sum.sum_cta(squares, turn++);
    if (row_sum.cluster > 1) {
      row_sum.send_to_all({static_cast<float>(squares[0]), 0}, turn);
      row_sum.collect(squares, turn++);
    }
    return {0, reciprocal_root(squares[0] * per_col + eps), 0};
  }

  __device__ static A xhat(A x, const Statistics<A> &row) { return x * row.rstd; }

  __device__ static A y(A xhat, A weight, A) { return xhat * weight; }

  // Adds an element to the sums of its column, with grad = grad_out, or to the sums of its row,
  // with grad = g = grad_out * rstd * weight.
  __device__ static void add(A (&sums)[1], A grad, A xhat) { sums[0] += grad * xhat; }

  // `means` holds the row's sums / cols.
  __device__ static A grad_x(A g, A xhat, const A (&means)[1]) { return g - xhat * means[0]; }
};

template <typename A>
struct LayerNorm {
  static constexpr int PARAMETERS = 2;

  // Returns the statistics of a row. Each CTA computes the mean of its columns, and then the sum of
  // squared deviations from this mean. The CTAs join both in one exchange (Chan, Golub and LeVeque
  // 1983). If `first` is given, a thread reads its elements only once: it sums the deviations from
  // `first`, and moves these sums to the mean. Fewer than 7 bits of the sum of squares cancel then,
  // because a thread owns at most 64 elements. That is enough for half types.
  template <typename ForEach, typename RowSum, typename Columns>
  __device__ static Statistics<A> statistics(const ForEach &for_each, const A *first,
                                             const RowSum &row_sum, int &turn,
                                             const Columns &columns, A per_col, A eps) {
    const bool is_cluster = row_sum.cluster > 1;
    const A per_element =
        is_cluster ? 1 / static_cast<A>(max(static_cast<int>(columns(row_sum.rank)), 1)) : per_col;
    A sum[1] = {0}, deviations[2] = {0, 0}, count = 0;
    const auto add_deviations = [&](A center) {
      int elements = 0;
      for_each([&](A x) {
        const A deviation = x - center;
        deviations[0] += deviation;
        deviations[1] += deviation * deviation;
        ++elements;
      });
      count = static_cast<A>(elements);
    };
    if (first == nullptr) {
      for_each([&](A x) { sum[0] += x; });
    } else {
      add_deviations(*first);
      sum[0] = count * *first + deviations[0];
    }
    row_sum.sum_cta(sum, turn++);
    Moments moments{sum[0] * per_element, 0, 0};
    if (first == nullptr) {
      add_deviations(moments.mean);
    } else {
      const A distance = *first - moments.mean, before = deviations[0];
      deviations[0] += count * distance;
      // An infinite sum of squares stays infinite, because the correction could make it NaN.
      if (!isinf(deviations[1])) deviations[1] += distance * (before + deviations[0]);
    }
    row_sum.sum_cta(deviations, turn++);
    moments.add(deviations, per_element);
    if (is_cluster) {
      const float mean = static_cast<float>(moments.mean);
      row_sum.send_to_all({mean, static_cast<float>(moments.squares)}, turn);
      row_sum.send_to_all({static_cast<float>(moments.excess), 0}, turn + 1);
      const float2 first = row_sum.receive(turn), second = row_sum.receive(turn + 1);
      turn += 2;
      const A count = static_cast<A>(columns(threadIdx.x % MAX_CLUSTER));
      moments = join({first.x, second.x, first.y}, count, per_col);
    }
    const A variance = moments.squares * per_col;
    const A rstd = reciprocal_root((variance < 0 ? A(0) : variance) + eps);
    return {moments.mean, rstd, moments.excess * rstd};
  }

  // The moments of a set of elements. `excess` is the rounding error of `mean`. `squares` is the
  // sum of squared deviations from the mean.
  struct Moments {
    A mean, excess, squares;

    // Corrects the moments. deviations[0] is the sum of the deviations from `mean`, and
    // deviations[1] the sum of their squares. If that sum is infinite, `squares` stays infinite,
    // because the correction could make it NaN.
    __device__ void add(const A (&deviations)[2], A per_element) {
      const A shift = deviations[0] * per_element, before = mean;
      mean += shift;
      excess = (mean - before) - shift;
      squares = isinf(deviations[1]) ? deviations[1] : deviations[1] - deviations[0] * shift;
    }
  };

  // Joins the moments of 16 neighbouring lanes, each of `count` elements. join() uses `excess`,
  // because the rounding of the means matters if they are large compared with the deviations.
  __device__ static Moments join(const Moments &part, A count, A per_element) {
    Moments all{__shfl_sync(0xffffffffu, part.mean, 0), 0, 0};
    const A distance = count > 0 ? (part.mean - all.mean) - part.excess : A(0);
    A deviations[2] = {count * distance, part.squares};
    deviations[1] += deviations[0] * distance;
    group_sum(deviations, MAX_CLUSTER);
    all.add(deviations, per_element);
    return all;
  }

  __device__ static A xhat(A x, const Statistics<A> &row) {
    return (x - row.mean) * row.rstd + row.offset;
  }

  __device__ static A y(A xhat, A weight, A bias) { return xhat * weight + bias; }

  __device__ static void add(A (&sums)[2], A grad, A xhat) {
    sums[0] += grad * xhat;
    sums[1] += grad;
  }

  __device__ static A grad_x(A g, A xhat, const A (&means)[2]) {
    return (g - means[1]) - xhat * means[0];
  }
};

// Returns g = grad_out * rstd * weight. With dropout of y, `rstd` includes its scale. The product
// is rounded, because if it were fused with the subtraction of the mean of g, a row of one column
// would not give exactly 0. grad_out is first multiplied by rstd, because a tiny gradient times a
// small weight may underflow.
template <typename A>
__device__ inline A weighted(A grad_out, A rstd, A weight) {
  return rounded_product(grad_out * rstd, weight);
}

}  // namespace norms

#endif
