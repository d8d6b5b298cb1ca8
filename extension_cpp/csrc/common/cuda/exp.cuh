// exp and division by the hardware's approximate instructions. For float32 they are accurate to
// about 2 ulp. For float64 they are exp() and the operator /.
#ifndef EXTENSION_CPP_CUDA_EXP_CUH
#define EXTENSION_CPP_CUDA_EXP_CUH

#include "common/cuda/vector.cuh"

// Compute 2^x and 1 / x in one instruction each. Subnormal inputs and results are flushed to 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Exp<T>::scaled(x) returns exp(x) / UNSCALE for x <= 44. For any other x, NaN included, the result
// is unspecified. The caller must select another value in its place, or for NaN multiply it by x.
// For float32, scaled(x) is exp(x) * 2^64, so that x exp(x) keeps its digits where exp(x) alone
// would underflow. x is first reduced to |r| <= ln2/2, because the error of the hardware's exp2
// grows with its argument. Half-precision results need neither the factor nor the reduction.
// Arithmetic limits the speed of these types, so both are left out.
template <typename T>
struct Exp {
  static constexpr float UNSCALE = 1.0f;
  static __device__ float scaled(float x) { return exp2f(x * 0x1.715476p0f); }
};
template <>
struct Exp<float> {
  static constexpr float UNSCALE = 0x1p-64f;
  static __device__ float scaled(float x) {
    // The low bits of `shifted` hold n = round(x / ln 2).
    const float shifted = fmaf(x, 0x1.715476p0f, 0x1.8p23f);
    const float n = shifted - 0x1.8p23f;
    const float r = fmaf(n, -0x1.7f7d1cp-20f, fmaf(n, -0x1.62e4p-1f, x));
    const int p = __float_as_int(exp2_fast(r * 0x1.715476p0f));
    const float e = __int_as_float(p + (__float_as_int(shifted) << 23) + (64 << 23));
    return x < -110.0f ? 0.0f : e;
  }
};
template <>
struct Exp<double> {
  static constexpr double UNSCALE = 1.0;
  static __device__ double scaled(double x) { return exp(x); }
};

__device__ inline float divide(float a, float b) { return __fdividef(a, b); }
__device__ inline double divide(double a, double b) { return a / b; }

// Returns 1 / x for a normal x. One Newton step refines the approximation and makes 1 / 1 exact.
__device__ inline float reciprocal(float x) {
  const float y = reciprocal_fast(x);
  return fmaf(fmaf(-x, y, 1.0f), y, y);
}
__device__ inline double reciprocal(double x) { return 1 / x; }

#endif
