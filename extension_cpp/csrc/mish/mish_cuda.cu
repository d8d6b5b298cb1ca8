// mish on the GPU, element by element. A thread processes two 16-byte vectors of each operand
// (common/cuda/pointwise.cuh). mish.h has the formulas. For all types but float64, exp2 and the
// division are the hardware's approximations (2 ulp each).
#include "common/cuda/exp.cuh"
#include "common/cuda/pointwise.cuh"
#include "mish/mish.h"

__device__ inline float linear_from(float) { return 20.0f; }
__device__ inline double linear_from(double) { return 24.0; }

template <typename T, typename A = acc_t<T>>
__device__ inline A mish_value(A x) {
  const A scaled = Exp<T>::scaled(x), e = scaled * Exp<T>::UNSCALE;
  const A denominator = fma(e, e + 2, A(2));
  return x > linear_from(x) ? x : x * divide(e + 2, denominator) * scaled * Exp<T>::UNSCALE;
}

template <typename T, typename A = acc_t<T>>
__device__ inline A mish_derivative(A x) {
  const A scaled = Exp<T>::scaled(x), e = scaled * Exp<T>::UNSCALE;
  const A denominator = fma(e, e + 2, A(2));
  // A quarter of mish.h's numerator, so that no finite x overflows. The factors 1/4 and 4 are
  // exact.
  const A numerator = fma((e + 2) / 4, denominator, x * (1 + e));
  return x > linear_from(x)
             ? A(1)
             : divide(numerator, denominator * denominator) * scaled * (4 * Exp<T>::UNSCALE);
}

template <typename T, typename A = acc_t<T>>
__device__ inline A mish_second_derivative(A x) {
  const A scaled = Exp<T>::scaled(x), e = scaled * Exp<T>::UNSCALE;
  const A denominator = fma(e, e + 2, A(2));
  const A bracket = 2 + x * divide(denominator - 2 * e * e * (e + 2), denominator * (1 + e));
  const A second =
      divide(1 + e, denominator * denominator) * bracket * scaled * (4 * Exp<T>::UNSCALE);
  return x > linear_from(x) ? A(0) : second;
}

template <typename T, typename A = acc_t<T>>
struct MishForward {
  __device__ void operator()(const A (&in)[1], A (&out)[1]) const { out[0] = mish_value<T>(in[0]); }
};

template <typename T, typename A = acc_t<T>>
struct MishBackward {
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    out[0] = in[0] * mish_derivative<T>(in[1]);
  }
};

template <typename T, typename A = acc_t<T>>
struct MishDoubleBackward {
  __device__ void operator()(const A (&in)[3], A (&out)[1]) const {
    out[0] = in[0] * in[1] * mish_second_derivative<T>(in[2]);
  }
};

extern "C" int mish_forward_cuda(const mish_forward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 1, 1>({args->x}, {args->y}, args->numel, MishForward<T>{}, stream);
  });
}

extern "C" int mish_backward_cuda(const mish_backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 2, 1>({args->grad_out, args->x}, {args->grad_x}, args->numel,
                                      MishBackward<T>{}, stream);
  });
}

extern "C" int mish_double_backward_cuda(const mish_double_backward_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return pointwise::launch<T, 3, 1>({args->grad_grad_x, args->grad_out, args->x}, {args->grad_x},
                                      args->numel, MishDoubleBackward<T>{}, stream);
  });
}
