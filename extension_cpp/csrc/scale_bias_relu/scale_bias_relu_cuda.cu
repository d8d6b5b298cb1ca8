// scale_bias_relu on the GPU. Forward is element-wise, with the bias broadcast over the rows
// (common/cuda/pointwise.cuh). Backward computes grad_x and the sums over the rows in one pass
// (common/cuda/column_sums.cuh).
#include "common/cuda/column_sums.cuh"
#include "common/cuda/pointwise.cuh"
#include "scale_bias_relu/scale_bias_relu.h"

template <typename A>
struct ScaleBiasRelu {
  A scale;
  __device__ void operator()(const A (&in)[2], A (&out)[1]) const {
    const A v = fma(in[0], scale, in[1]);
    out[0] = v < A(0) ? A(0) : v;
  }
};

extern "C" int scale_bias_relu_forward_cuda(const scale_bias_relu_forward_args *args,
                                            void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const ScaleBiasRelu<acc_t<T>> f{static_cast<acc_t<T>>(args->scale)};
    const pointwise::Row<T> bias{static_cast<const T *>(args->bias), args->cols, false, false};
    return pointwise::launch<T, 1, 1>({args->x}, {args->y}, args->rows * args->cols, f, stream,
                                      bias);
  });
}

template <typename A>
struct ScaleBiasReluBackward {
  A scale;
  __device__ A operator()(A x, A grad_out, A bias, A &sum) const {
    const A masked = fma(x, scale, bias) <= A(0) ? A(0) : grad_out;
    sum += masked;
    return masked * scale;
  }
};

extern "C" int scale_bias_relu_backward_cuda(const scale_bias_relu_backward_args *args,
                                             void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const ScaleBiasReluBackward<acc_t<T>> f{static_cast<acc_t<T>>(args->scale)};
    return column_sums::launch<T>(args->x, args->bias, args->grad_out, args->grad_x,
                                  args->grad_bias, args->partial, f, args->rows, args->cols,
                                  stream);
  });
}
