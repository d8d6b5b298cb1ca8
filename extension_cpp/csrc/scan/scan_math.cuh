// The algebra of the scans on the GPU, and the inputs and results of each op at a step.
//
// A Part summarises consecutive steps; join(before, after) is the Part of both. A State is the
// running result of a line; apply(part, state) is the State after the steps of the Part.
#ifndef EXTENSION_CPP_SCAN_MATH_CUH
#define EXTENSION_CPP_SCAN_MATH_CUH

#include <cmath>

#include "common/cuda/vector.cuh"

namespace scans {

template <typename A, int COUNT>
struct Words {
  static constexpr int WORDS = COUNT;
  A v[COUNT];
};

// ---- algebras ----

template <typename A>
struct Sum {
  using Part = Words<A, 1>;
  using State = Part;
  static __device__ State start() { return {{0}}; }
  static __device__ Part identity() { return {{0}}; }
  static __device__ Part join(Part before, Part after) { return {{before.v[0] + after.v[0]}}; }
  static __device__ State apply(Part part, State state) { return join(state, part); }
};

// Returns exp(a - b) for a <= b, or 1 if a > b by rounding or both are the same infinity.
template <typename A>
__device__ inline A exp_difference(A a, A b) {
  return a >= b ? A(1) : exp(a - b);
}

// A Part of numbers x_k is {m, s}: m is the largest x_k, and s is the sum of exp(x_k - m) over the
// other x_k. The pair avoids the rounding of m + log(1 + s) at each join. s leaves out the term of
// the largest number, which is 1 and would hide small terms if m is near 0. An empty Part has s =
// -1. A NaN makes s NaN but does not change m.
template <typename A>
struct LogSum {
  using Part = Words<A, 2>;
  using State = Part;
  static __device__ State start() { return {{-INFINITY, -1}}; }
  static __device__ Part identity() { return {{-INFINITY, -1}}; }
  static __device__ Part of(A x) { return x == x ? Part{{x, 0}} : Part{{-INFINITY, x}}; }
  static __device__ Part join(Part before, Part after) {
    const bool is_above = after.v[0] > before.v[0];
    const Part high = is_above ? after : before, low = is_above ? before : after;
    const A e = exp_difference(low.v[0], high.v[0]);
    return {{high.v[0], fma(low.v[1], e, high.v[1] + e)}};
  }
  static __device__ State apply(Part part, State state) { return join(state, part); }
};

// The recurrence state = decay * state + value. A Part is {decay, value}.
template <typename A>
struct Linear {
  using Part = Words<A, 2>;
  using State = Words<A, 1>;
  static __device__ State start() { return {{0}}; }
  static __device__ Part identity() { return {{1, 0}}; }
  static __device__ Part join(Part before, Part after) {
    return {{before.v[0] * after.v[0], fma(after.v[0], before.v[1], after.v[1])}};
  }
  // The decay of many steps may overflow to infinity. A state of 0 must not become NaN then.
  static __device__ State apply(Part part, State state) {
    const A x = state.v[0];
    return {{x == 0 && part.v[0] == part.v[0] ? part.v[1] : fma(part.v[0], x, part.v[1])}};
  }
};

// ---- ops ----

// An op has these members. part(in, is_first) returns the Part of one step. step(in, is_first,
// state, out) advances the state by one step and sets the results of the step. in[i] is input i at
// step + shift(i), or 0 outside the line. ROW_VECTORS and COLUMN_VECTORS are the numbers of 16-byte
// vectors per input and thread. ROW_VECTORS is a power of two. ROW_CTAS and COLUMN_CTAS are the
// numbers of CTAs for which the registers of an SM suffice.

template <typename Element>
struct Cumsum {
  using T = Element;
  using A = acc_t<T>;
  using Algebra = Sum<A>;
  static constexpr int INPUTS = 1, OUTPUTS = 1;
  static constexpr int ROW_VECTORS = 8, COLUMN_VECTORS = 8;
  // With 6 CTAs per SM, a thread has 40 registers. These are too few for rows of doubles. For
  // columns with two lines per thread, 5 CTAs with more registers are faster.
  static constexpr int ROW_CTAS = sizeof(T) == 8 ? 5 : 6, COLUMN_CTAS = sizeof(T) == 4 ? 6 : 5;
  static __device__ constexpr int shift(int) { return 0; }
  bool exclusive;
  __device__ Words<A, 1> part(const A (&in)[1], bool) const { return {{in[0]}}; }
  __device__ void step(const A (&in)[1], bool, typename Algebra::State &state, A (&out)[1]) const {
    out[0] = state.v[0];
    state.v[0] += in[0];
    if (!exclusive) out[0] = state.v[0];
  }
};

template <typename Element>
struct Logcumsumexp {
  using T = Element;
  using A = acc_t<T>;
  using Algebra = LogSum<A>;
  static constexpr int INPUTS = 1, OUTPUTS = 1;
  static constexpr int ROW_VECTORS = 4, ROW_CTAS = 4, COLUMN_VECTORS = 8, COLUMN_CTAS = 3;
  static __device__ constexpr int shift(int) { return 0; }
  __device__ Words<A, 2> part(const A (&in)[1], bool) const { return Algebra::of(in[0]); }
  __device__ void step(const A (&in)[1], bool, typename Algebra::State &state, A (&out)[1]) const {
    state = Algebra::join(state, Algebra::of(in[0]));
    out[0] = state.v[0] + log1p(state.v[1]);
  }
};

// Returns exp(x - y), the weight of x in y, or 0 for y = -inf, which depends on no element.
template <typename A>
__device__ inline A weight_in(A x, A y) {
  return y == -INFINITY ? A(0) : exp_difference(x, y);
}

// The inputs are grad_out, x, y, and y of the step before in this scan, which runs backward.
template <typename Element>
struct LogcumsumexpBackward {
  using T = Element;
  using A = acc_t<T>;
  using Algebra = Linear<A>;
  static constexpr int INPUTS = 4, OUTPUTS = 1;
  static constexpr int ROW_VECTORS = 2, ROW_CTAS = 4, COLUMN_VECTORS = 4, COLUMN_CTAS = 3;
  static __device__ constexpr int shift(int i) { return i == 3 ? -1 : 0; }
  static __device__ A decay(const A (&in)[4], bool is_first) {
    return is_first ? A(0) : weight_in(in[2], in[3]);
  }
  __device__ Words<A, 2> part(const A (&in)[4], bool is_first) const {
    return {{decay(in, is_first), in[0]}};
  }
  __device__ void step(const A (&in)[4], bool is_first, typename Algebra::State &state,
                       A (&out)[1]) const {
    state.v[0] = fma(decay(in, is_first), state.v[0], in[0]);
    out[0] = weight_in(in[1], in[2]) * state.v[0];
  }
};

// The inputs are a and b.
template <typename Element>
struct Recurrence {
  using T = Element;
  using A = acc_t<T>;
  using Algebra = Linear<A>;
  static constexpr int INPUTS = 2, OUTPUTS = 1;
  static constexpr int ROW_VECTORS = 8, ROW_CTAS = 4, COLUMN_VECTORS = 8, COLUMN_CTAS = 3;
  static __device__ constexpr int shift(int) { return 0; }
  __device__ Words<A, 2> part(const A (&in)[2], bool) const { return {{in[0], in[1]}}; }
  __device__ void step(const A (&in)[2], bool, typename Algebra::State &state, A (&out)[1]) const {
    out[0] = state.v[0] = fma(in[0], state.v[0], in[1]);
  }
};

// Inputs: grad_h, a of the step before, and h of the step after. Results: grad_a and grad_b.
template <typename Element>
struct RecurrenceBackward {
  using T = Element;
  using A = acc_t<T>;
  using Algebra = Linear<A>;
  static constexpr int INPUTS = 3, OUTPUTS = 2;
  static constexpr int ROW_VECTORS = 4, ROW_CTAS = 4, COLUMN_VECTORS = 5, COLUMN_CTAS = 3;
  static __device__ constexpr int shift(int i) { return i == 1 ? -1 : i == 2 ? 1 : 0; }
  __device__ Words<A, 2> part(const A (&in)[3], bool) const { return {{in[1], in[0]}}; }
  __device__ void step(const A (&in)[3], bool, typename Algebra::State &state, A (&out)[2]) const {
    out[1] = state.v[0] = fma(in[1], state.v[0], in[0]);
    out[0] = out[1] * in[2];
  }
};

}  // namespace scans

#endif
