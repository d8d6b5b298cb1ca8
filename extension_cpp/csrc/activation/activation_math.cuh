// The activations and their derivatives on the GPU. activation.h has the formulas.
//
// activation<KIND, T>(x) returns the value, first and second derivative in T's accumulation type.
// The compiler removes what the caller does not use. As on the CPU, float32 results keep their
// relative accuracy for large negative x. A vector of a half type has eight elements, so arithmetic
// and not memory limits the speed. For these types s, Phi and the density take one exp2 and one
// reciprocal, without range reduction. Their relative error is below 2^-15.
#ifndef EXTENSION_CPP_ACTIVATION_MATH_CUH
#define EXTENSION_CPP_ACTIVATION_MATH_CUH

#include "activation/activation.h"
#include "activation/activation_constants.h"
#include "common/cuda/exp.cuh"

namespace activation {

constexpr float LOG2_E = 0x1.715476p0f;

template <typename T>
constexpr bool is_half = sizeof(T) == 2;

template <typename A>
struct Jet {
  A value, first, second;
};

// The logistic function s(u), its slope s (1 - s), and |1 - 2 s|.
template <typename A>
struct Logistic {
  A value, slope, balance;
};

template <typename T, typename A = acc_t<T>>
__device__ inline Logistic<A> logistic(A u) {
  if constexpr (is_half<T>) {
    // 2^-64 (1 + exp(-u)) stays in float's range for every u for which s(u) does.
    const float inverse = 0x1p-64f + exp2_fast(fmaf(u, -LOG2_E, -64.0f));
    const float s = reciprocal_fast(inverse) * 0x1p-64f;
    // For large u the slope is set to 0, because a large factor x would magnify the rounding error
    // of s - s^2.
    return {s, u > 32.0f ? 0.0f : fmaf(-s, s, s), fabsf(1 - 2 * s)};
  } else {
    // The argument of exp is never positive, so nothing overflows.
    const A t = Exp<T>::scaled(-fabs(u)) * Exp<T>::UNSCALE, r = reciprocal(1 + t), small = t * r;
    return {u < 0 ? small : r, small * r, (1 - t) * r};
  }
}

template <typename T, typename A = acc_t<T>>
__device__ inline Jet<A> silu(A x) {
  const Logistic<A> s = logistic<T>(x);
  return {x * s.value, fma(x, s.slope, s.value), s.slope * (2 - fabs(x) * s.balance)};
}

template <typename T, typename A = acc_t<T>>
__device__ inline Jet<A> gelu_tanh(A x) {
  const A square = fmin(x * x, A(TANH_SQUARE));  // if x is NaN, only the factor x is NaN
  const Logistic<A> s = logistic<T>(x * fma(square, A(TANH_D), A(TANH_C)));
  const A u1 = fma(square, A(3 * TANH_D), A(TANH_C)), xu2 = A(6 * TANH_D) * square;
  const A bend = fabs(x) * s.slope * s.balance;
  // x is first multiplied by s.slope, which is 0 for every x for which x u' would overflow.
  return {x * s.value, fma(x * s.slope, u1, s.value), s.slope * (2 * u1 + xu2) - bend * (u1 * u1)};
}

// Evaluates the polynomial G of activation_constants.h.
template <int N>
__device__ inline float horner(const float (&c)[N], float t) {
  float g = c[N - 1];
#pragma unroll
  for (int i = N - 2; i >= 0; --i) g = fmaf(g, t, c[i]);
  return g;
}

// The values from which gelu and its derivatives are computed: exp(-x^2 / 2), Phi(-|x|) and x^2.
template <typename A>
struct Gauss {
  A density, tail, square;
};

template <typename T, typename A = acc_t<T>>
__device__ inline Gauss<A> gauss(A x) {
  if constexpr (is_half<T>) {
    constexpr float c[] = ERFC_HALF_COEFFICIENTS;
    const float square = x * x, e = exp2_fast(square * (-0.5f * LOG2_E));
    const float t = reciprocal_fast(fabsf(x) + ERFC_HALF_SHIFT);
    return {e, e * (t * horner(c, t)), square};
  } else {
    // |x| is limited to `zero`, at which exp(-x^2 / 2) is 0 in type A.
    const A zero = std::is_same_v<A, float> ? 15 : 39;
    const A size = fabs(x) > zero ? zero : fabs(x), square = size * size;
    const A rounded = Exp<T>::scaled(-square / 2) * Exp<T>::UNSCALE;
    if constexpr (std::is_same_v<A, float>) {
      constexpr float c[] = ERFC_COEFFICIENTS;
      const float low = fmaf(size, size, -square);  // the rounding error of x^2
      const float e = fmaf(rounded, -0.5f * low, rounded), t = reciprocal(size + ERFC_SHIFT);
      return {e, e * (t * horner(c, t)), square};
    } else {
      return {rounded, erfc(size * SQRT_HALF) / 2, square};
    }
  }
}

template <typename T, typename A = acc_t<T>>
__device__ inline Jet<A> gelu(A x) {
  const Gauss<A> g = gauss<T>(x);
  const A phi = x < 0 ? g.tail : 1 - g.tail, density = A(INV_SQRT_2PI) * g.density;
  return {x * phi, fma(x, density, phi), density * (2 - g.square)};
}

template <activation_t KIND, typename T, typename A = acc_t<T>>
__device__ inline Jet<A> activation(A x) {
  if constexpr (KIND == SILU) return silu<T>(x);
  if constexpr (KIND == GELU) return gelu<T>(x);
  if constexpr (KIND == GELU_TANH) return gelu_tanh<T>(x);
}

// Returns the second derivative. For half types it is computed as for float32.
template <activation_t KIND, typename T, typename A = acc_t<T>>
__device__ inline A second_derivative(A x) {
  return activation<KIND, A>(x).second;
}

// ---- host code ----

template <typename T, typename F>
cudaError_t with_kind(T zero, activation_t kind, F &f) {
  switch (kind) {
    case SILU: return f(zero, std::integral_constant<activation_t, SILU>{});
    case GELU: return f(zero, std::integral_constant<activation_t, GELU>{});
    case GELU_TANH: return f(zero, std::integral_constant<activation_t, GELU_TANH>{});
  }
  return cudaErrorInvalidValue;
}

// Calls f with a zero of the dtype's C++ type, and with the kind as a constant:
//   with_types(dtype, kind, [&](auto zero, auto constant) {
//     using T = decltype(zero); ... decltype(constant)::value ... })
template <typename F>
cudaError_t with_types(dtype_t dtype, activation_t kind, F &&f) {
  switch (dtype) {
    case DTYPE_FLOAT64: return with_kind(double{}, kind, f);
    case DTYPE_FLOAT32: return with_kind(float{}, kind, f);
    case DTYPE_BFLOAT16: return with_kind(__nv_bfloat16{}, kind, f);
    case DTYPE_FLOAT16: return with_kind(__half{}, kind, f);
  }
  return cudaErrorInvalidValue;
}

}  // namespace activation

#endif
