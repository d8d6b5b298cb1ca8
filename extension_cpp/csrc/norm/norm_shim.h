// What norm.cpp and norm_fused.cpp share: the checks, the allocation and the calls of the kernels of norm.h.
#ifndef EXTENSION_CPP_NORM_SHIM_H
#define EXTENSION_CPP_NORM_SHIM_H

#include <optional>
#include <tuple>
#include <vector>

#include "common/op.h"
#include "norm/norm.h"

namespace extension_cpp {

using Shape = std::vector<int64_t>;
using Optional = std::optional<Tensor>;

// x as rows: the dimensions of normalized_shape side by side.
struct Problem {
  dtype_t dtype;
  dtype_t weight_dtype;
  int64_t rows;
  int64_t cols;
};

Problem check_inputs(const char *op, const Tensor &x, const Shape &normalized_shape,
                     const Optional &weight, const Optional &bias);

// What the forward keeps for the backward, each of x's shape with the normalized dimensions of size 1: they broadcast against x.
struct Statistics {
  Optional mean;  // of layer_norm
  Optional rstd;
};

// eps, by default rms_norm's: the machine epsilon of the type of the arithmetic.
double eps_or_default(std::optional<double> eps, const Problem &problem);

// The fused forms of norm.h: with a residual the dropout is x's, without one y's.
struct FusedForward {
  const Tensor *residual = nullptr;
  const Tensor *sum = nullptr;
  dropout_t dropout{};
};

struct FusedBackward {
  const Tensor *grad_sum = nullptr;
  bool needs_dropped = false;  // only with needs_x
  dropout_t dropout_x{};
  dropout_t dropout_y{};
};

// Forward of all norms: makes the statistics where they are asked for.
void norm_forward(const char *op, const Problem &problem, const Tensor &x, int64_t row_dims,
                  const Optional &weight, const Optional &bias, double eps, bool centered,
                  const Tensor &y, Statistics *statistics, const FusedForward &fused = {});

struct Gradients {
  Tensor x, weight, bias, dropped;
};

// Backward of all norms; gradients that are not needed are empty tensors.
Gradients norm_backward(const char *op, const Tensor &grad_out, const Tensor &x,
                        const Shape &normalized_shape, const Tensor *mean, const Tensor &rstd,
                        const Optional &weight, const Optional &bias, bool needs_x,
                        bool needs_weight, bool needs_bias, const FusedBackward &fused = {});

}  // namespace extension_cpp

#endif
