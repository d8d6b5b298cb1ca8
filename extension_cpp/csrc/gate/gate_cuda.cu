// swiglu and geglu on the GPU, element by element. A thread processes two 16-byte vectors of each
// operand (common/cuda/pointwise.cuh). Inputs may have gaps between rows. The arithmetic is in
// activation_math.cuh.
#include "activation/activation_math.cuh"
#include "common/cuda/pointwise.cuh"
#include "gate/gate.h"

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct GateForward {
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    out[0] = activation::activation<KIND, T>(in[0]).value * in[1];
  }
};

template <activation_t KIND, typename T, typename A = acc_t<T>>
struct GateBackward {
  __device__ void operator()(const A (&in)[3], A (&out)[2]) const {
    const activation::Jet<A> f = activation::activation<KIND, T>(in[1]);
    out[0] = in[0] * in[2] * f.first;
    out[1] = in[0] * f.value;
  }
};

extern "C" int gate_forward_cuda(const gate_forward_args *args, void *stream) {
  return activation::with_types(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    return pointwise::launch_rows<T, 2, 1>(
        {args->gate, args->up}, {args->gate_stride, args->up_stride}, {args->y}, args->rows,
        args->cols, GateForward<decltype(kind)::value, T>{}, stream);
  });
}

extern "C" int gate_backward_cuda(const gate_backward_args *args, void *stream) {
  return activation::with_types(args->dtype, args->kind, [&](auto zero, auto kind) {
    using T = decltype(zero);
    return pointwise::launch_rows<T, 3, 2>({args->grad_out, args->gate, args->up},
                                           {args->grad_stride, args->gate_stride, args->up_stride},
                                           {args->grad_gate, args->grad_up}, args->rows, args->cols,
                                           GateBackward<decltype(kind)::value, T>{}, stream);
  });
}
