// bias_gelu on the GPU. Forward is element-wise, with the bias broadcast over the rows
// (common/cuda/pointwise.cuh). Backward computes grad_x and the sums over the rows in one pass
// (common/cuda/column_sums.cuh). The arithmetic is in activation_math.cuh.
#include "activation/activation_math.cuh"
#include "bias_gelu/bias_gelu.h"
#include "common/cuda/column_sums.cuh"
#include "common/cuda/pointwise.cuh"

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct BiasGeluForward {
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    out[0] = activation::activation<KIND, T>(in[0] + in[1]).value;
  }
};

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct BiasGeluBackward {
  __device__ A operator()(A x, A grad_out, A bias, A &sum) const {
    const A value = grad_out * activation::activation<KIND, T>(x + bias).first;
    sum += value;
    return value;
  }
};

// Calls f with a zero of the dtype's C++ type and with the kind, GELU or GELU_TANH, as a constant.
template <typename F>
static cudaError_t with_gelu(dtype_t dtype, activation_t kind, F &&f) {
  return with_dtype(dtype, [&](auto zero) {
    return kind == GELU ? f(zero, std::integral_constant<activation_t, GELU>{})
                        : f(zero, std::integral_constant<activation_t, GELU_TANH>{});
  });
}

extern "C" int bias_gelu_forward_cuda(const bias_gelu_forward_args *args, void *stream) {
  return with_gelu(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    const pointwise::Row<T> bias{static_cast<const T *>(args->bias), args->cols, false, false};
    return pointwise::launch<T, 1, 1>({args->x}, {args->y}, args->rows * args->cols,
                                      BiasGeluForward<decltype(kind)::value, T>{}, stream, bias);
  });
}

extern "C" int bias_gelu_backward_cuda(const bias_gelu_backward_args *args, void *stream) {
  return with_gelu(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    return column_sums::launch<T>(
        args->x, args->bias, args->grad_out, args->grad_x, args->grad_bias, args->partial,
        BiasGeluBackward<decltype(kind)::value, T>{}, args->rows, args->cols, stream);
  });
}
