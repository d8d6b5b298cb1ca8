// Parameters of the norms' GPU kernels, and the choice of a kernel's template arguments.
#ifndef EXTENSION_CPP_NORM_LAUNCH_CUH
#define EXTENSION_CPP_NORM_LAUNCH_CUH

#include "common/cuda/dropout.cuh"
#include "norm/norm.h"
#include "norm/norm_math.cuh"
#include "rows/launch.cuh"

namespace norms {

using namespace rows;

// ---- in kernels ----

// The kernels' parameters, and functions that return rows of the tensors. T is the type of
// args.dtype.
template <typename T>
struct ForwardParams : Geometry, norm_forward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *residual_row(int64_t r) const {
    return static_cast<const T *>(residual) + r * residual_stride;
  }
  __device__ const void *parameter(int i) const { return i == 0 ? weight : bias; }
  __device__ bool drops_x() const { return dropout_x.seed != nullptr; }
};

template <typename T>
struct BackwardParams : Geometry, norm_backward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *grad_out_row(int64_t r) const {
    return static_cast<const T *>(grad_out) + r * grad_out_stride;
  }
  __device__ const T *grad_sum_row(int64_t r) const {
    return static_cast<const T *>(grad_sum) + r * grad_sum_stride;
  }
  __device__ void *gradient(int i) const { return i == 0 ? grad_weight : grad_bias; }
  __device__ bool drops_x() const { return grad_dropped != nullptr; }
};

// The random bits for dropout of y, of the elements that a thread owns in a row.
template <int K, int N>
struct RowBits {
  RandomBits<N> bits[K];
  RandomBits<1> edge;
  __device__ const RandomBits<N> &at(Part<N> part) const { return bits[part.k]; }
  __device__ const RandomBits<1> &at(Part<1>) const { return edge; }

  // Draws the bits, if the fused variant FORM has dropout of y.
  template <Form FORM, typename Params, typename Window>
  __device__ void draw(const Params &p, int64_t row, const Window &window) {
    if (FORM != Form::DROPOUT_OF_Y) return;
    const int64_t seed = *p.dropout_y.seed;
    int64_t first[K];
#pragma unroll
    for (int k = 0; k < K; ++k) first[k] = row * p.cols + window.column(k);
    ::draw(bits, seed, first);
    if (window.has_edge()) edge = draw_one(seed, row * p.cols + window.edge);
  }
};

// ---- on the host ----

// These functions launch all kernels of the norms but the fallback kernels and the sum of partial
// rows. Their kernels take longest to compile, and are in separate .cu files to be compiled in
// parallel.
cudaError_t forward(const norm_forward_args &args, Form form, const Plan &plan,
                    cudaStream_t stream);
cudaError_t backward(const norm_backward_args &args, Form form, const Plan &plan,
                     cudaStream_t stream);

// Returns f(norm, form), which is the address of a kernel. `norm` is LayerNorm or RmsNorm
// (norm_math.cuh), and `form` is a constant. Only layer_norm is fused with dropout of y.
template <typename F>
const void *kernel_of_norm(bool is_layer_norm, Form form, F &&f) {
  constexpr std::integral_constant<Form, Form::PLAIN> plain;
  constexpr std::integral_constant<Form, Form::RESIDUAL> residual;
  constexpr std::integral_constant<Form, Form::DROPOUT_OF_Y> dropout_of_y;
  if (form == Form::DROPOUT_OF_Y) return f(LayerNorm<float>{}, dropout_of_y);
  if (form == Form::RESIDUAL) {
    return is_layer_norm ? f(LayerNorm<float>{}, residual) : f(RmsNorm<float>{}, residual);
  }
  return is_layer_norm ? f(LayerNorm<float>{}, plain) : f(RmsNorm<float>{}, plain);
}

}  // namespace norms

#endif
