// silu and gelu on the GPU, element by element. A thread processes two 16-byte vectors of each
// operand (common/cuda/pointwise.cuh). The arithmetic is in activation_math.cuh.
#include "activation/activation.h"
#include "activation/activation_math.cuh"
#include "common/cuda/pointwise.cuh"

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct ActivationForward {
  __device__ void operator()(const A (&in)[1], A (&out)[1]) const {
    out[0] = activation::activation<KIND, T>(in[0]).value;
  }
};

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct ActivationBackward {
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    out[0] = in[0] * activation::activation<KIND, T>(in[1]).first;
  }
};

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct ActivationDoubleBackward {
  __device__ void operator()(const A (&in)[3], A (&out)[1]) const {
    out[0] = in[0] * in[1] * activation::second_derivative<KIND, T>(in[2]);
  }
};

extern "C" int activation_forward_cuda(const activation_forward_args *args, void *stream) {
  return activation::with_types(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    const ActivationForward<decltype(kind)::value, T> f;
    return pointwise::launch<T, 1, 1>({args->x}, {args->y}, args->numel, f, stream);
  });
}

extern "C" int activation_backward_cuda(const activation_backward_args *args, void *stream) {
  return activation::with_types(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    const ActivationBackward<decltype(kind)::value, T> f;
    return pointwise::launch<T, 2, 1>({args->grad_out, args->x}, {args->grad_x}, args->numel, f,
                                      stream);
  });
}

extern "C" int activation_double_backward_cuda(const activation_double_backward_args *args,
                                               void *stream) {
  return activation::with_types(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    const ActivationDoubleBackward<decltype(kind)::value, T> f;
    return pointwise::launch<T, 3, 1>({args->grad_grad_x, args->grad_out, args->x}, {args->grad_x},
                                      args->numel, f, stream);
  });
}
