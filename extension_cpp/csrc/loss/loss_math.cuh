// The formulas of loss.h on the GPU: the logit z, the results of a row, and the gradient. A is
// double for float64, and float otherwise.
#ifndef EXTENSION_CPP_LOSS_MATH_CUH
#define EXTENSION_CPP_LOSS_MATH_CUH

#include "loss/loss.h"
#include "rows/exp_sum.cuh"
#include "rows/strips.cuh"

namespace losses {

using namespace rows;

// The variants of the kernels. PLAIN is cross_entropy without softcap and smoothing, GENERAL is
// cross_entropy with either, and ENTROPY is token_log_probs.
enum Mode { PLAIN, GENERAL, ENTROPY };

// Returns tanh(x). The absolute error is about 1e-7, which is enough for z. tanhf is more accurate
// near 0, but compiles to ten times as much code.
__device__ inline float hyperbolic_tangent(float x) {
  return copysignf(1 - 2 / (exponential(2 * fabsf(x)) + 1), x);
}
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }

// Returns x * y. The compiler does not fuse this product with an addition. If it did so in only one
// of two places, the same z would have two values.
__device__ inline float rounded(float x, float y) { return __fmul_rn(x, y); }
__device__ inline double rounded(double x, double y) { return __dmul_rn(x, y); }

// The map from x to z, and its slope dz/dx at z, which only GENERAL uses.
template <Mode MODE, typename A>
struct Logit {
  A scale, softcap;

  __device__ explicit Logit(const loss_rows &p)
      : scale(static_cast<A>(p.scale)), softcap(static_cast<A>(p.options.softcap)) {}
  __device__ A z(A x) const {
    if (MODE == PLAIN) return x;
    if (MODE == ENTROPY || softcap == 0) return rounded(x, scale);
    return rounded(softcap, hyperbolic_tangent(x / softcap));
  }
  __device__ A slope(A z) const { return softcap == 0 ? scale : 1 - (z / softcap) * (z / softcap); }
};

// Returns the weight of class c.
template <typename A>
__device__ inline A class_weight(const loss_rows &p, int64_t c) {
  return p.weight == nullptr ? A(1) : static_cast<const A *>(p.weight)[c];
}

// Returns W, the sum of the class weights.
template <typename A>
__device__ inline A weight_sum(const loss_rows &p) {
  return p.weight_sum == nullptr ? static_cast<A>(p.cols) : *static_cast<const A *>(p.weight_sum);
}

// Returns label_smoothing / cols.
template <typename A>
__device__ inline A smoothing(const loss_rows &p) {
  return static_cast<A>(p.options.label_smoothing / static_cast<double>(p.cols));
}

// A row's target: a class, ignored, or outside the classes.
struct Target {
  int64_t c;
  bool is_ignored, is_class;

  __device__ Target(const loss_rows &p, int64_t r, bool can_ignore)
      : c(p.target[r]),
        is_ignored(can_ignore && c == p.options.ignore_index),
        is_class(c >= 0 && c < p.cols) {}
};

// Returns the origin for label smoothing, which sums z - origin. The origin is the row's first
// logit z, because the other logits are near it, or 0 if z is not finite.
template <typename A>
__device__ inline A smoothing_origin(A z) {
  return isfinite(z) ? z : A(0);
}

// Writes the results of row r. z is the target's logit. The exponentials are relative to `from`.
// exp(log_sum) is their sum, and `moment` is the mean of z_c - from with the exponentials as
// weights. smooth is sum(w_c * (z_c - origin)).
template <Mode MODE, typename A>
__device__ inline void write_results(const loss_forward_args &p, int64_t r, const Target &target,
                                     A z, A from, A log_sum, A moment, A smooth, A origin) {
  const loss_rows &rows = p.rows;
  const A lse = from + log_sum;
  A *const saved = static_cast<A *>(p.lse) + 2 * r;
  saved[0] = lse;
  saved[1] = static_cast<A>(log_sum - (static_cast<double>(lse) - from));
  A loss = NAN;
  if (target.is_ignored) {
    loss = 0;
  } else if (target.is_class && MODE == ENTROPY) {
    loss = (z - from) - log_sum;
    if (loss > 0) loss = 0;  // rounding may make it positive
  } else if (target.is_class) {
    const A s = static_cast<A>(rows.options.label_smoothing);
    loss = class_weight<A>(rows, target.c) *
           ((1 - s) * (log_sum - (z - from)) + static_cast<A>(rows.options.z_loss) * lse * lse);
    if (MODE == GENERAL) {
      loss += smoothing<A>(rows) * (weight_sum<A>(rows) * (log_sum + (from - origin)) - smooth);
    }
  }
  static_cast<A *>(p.loss)[r] = loss;
  if (MODE == ENTROPY) {
    const A entropy = target.is_class ? log_sum - moment : A(NAN);
    static_cast<A *>(p.entropy)[r] = entropy < 0 ? A(0) : entropy;  // rounding may make it negative
  }
}

// The gradient of a row:
//   dz_c = p_c * (of_p + of_p_log_p * log(p_c)) + [c = t] * of_target - of_weight * w_c
template <typename A>
struct RowGradient {
  A of_p, of_p_log_p, of_target, of_weight;
  // log(p_c) = (z_c - from) - log_sum; in backward, from + log_sum is the saved lse
  A from, log_sum;
  int64_t target;
  bool is_zero;

  // Sets the gradient of cross_entropy, times g.
  __device__ void set(const loss_rows &p, const Target &row, A g) {
    const A s = static_cast<A>(p.options.label_smoothing), lse = from + log_sum;
    const A w = row.is_class ? class_weight<A>(p, row.c) : A(NAN);
    const A smooth = s > 0 ? smoothing<A>(p) : A(0);
    of_p = g * (w * (1 - s + 2 * static_cast<A>(p.options.z_loss) * lse) +
                (s > 0 ? smooth * weight_sum<A>(p) : A(0)));
    of_p_log_p = 0;
    of_target = -g * w * (1 - s);
    of_weight = g * smooth;
    target = row.c;
    is_zero = row.is_ignored;
    if (is_zero) of_target = 0;
  }

  // Sets the gradient of token_log_probs, times g and g_entropy, and times dz/dx, which is `scale`.
  __device__ void set_entropy(const loss_rows &p, const Target &row, A entropy, A g, A g_entropy) {
    const A scale = static_cast<A>(p.scale);
    of_p = row.is_class ? scale * (-g - g_entropy * entropy) : A(NAN);
    of_p_log_p = -scale * g_entropy;
    of_target = scale * g;
    of_weight = 0;
    target = row.c;
    is_zero = false;
  }

  // Replaces the logits x of M columns, beginning with column c, by their gradient.
  template <Mode MODE, int M>
  __device__ void apply(A (&x)[M], const loss_rows &p, const Logit<MODE, A> &logit,
                        int64_t c) const {
    const int64_t distance = target - c;
    const int at = distance >= 0 && distance < M ? static_cast<int>(distance) : -1;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      const A z = logit.z(x[j]), log_p = (z - from) - log_sum;
      A factor = of_p;
      if (MODE == ENTROPY) factor += of_p_log_p * max(log_p, A(LOG_ZERO));
      A grad = exponential(log_p) * factor;
      if (MODE == GENERAL) {
        if (of_weight != 0) grad -= of_weight * class_weight<A>(p, c + j);
        if (j == at) grad += of_target;
        grad *= logit.slope(z);
      }
      x[j] = is_zero ? A(0) : grad;
    }
    // In GENERAL the loop above has already added the target's term, because there the term has the
    // factor dz/dx, which with softcap depends on z.
    if constexpr (MODE != GENERAL) {
      if (at < 0) return;
#pragma unroll
      for (int j = 0; j < M; ++j) {
        if (j == at) x[j] += of_target;
      }
    }
  }
};

}  // namespace losses

#endif
