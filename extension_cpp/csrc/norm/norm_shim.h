// One forward and one backward for all five norms (norm.cpp).
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
inline const Optional NONE;

// The arguments of a forward op. The names are those of the schemas.
struct Forward {
  const char *op;
  const Tensor &x;
  Sizes normalized_shape;
  const Optional &weight;
  const Optional &bias;
  std::optional<double> eps;  // default: the machine epsilon of the accumulation type
  bool centered;              // true: layer_norm; false: rms_norm
  bool with_statistics;       // return mean (if centered) and rstd, for backward
  const Tensor *residual = nullptr;
  double p = 0;  // dropout of x with a residual, of y without one
  const Optional &seed = NONE;
};

struct Outputs {
  Tensor y;
  Optional sum;         // only with a residual
  Optional mean, rstd;  // x's shape with normalized dimensions of size 1, to broadcast
};

Outputs norm_forward(const Forward &call);

// What an op returns: the results and the statistics; its no-grad overload the results alone.
template <bool with_statistics, typename... Results, typename... Statistics>
auto returned(const std::tuple<Results...> &results, const Statistics &...statistics) {
  if constexpr (with_statistics)
    return std::tuple_cat(results, std::tuple{*statistics...});
  else
    return results;
}

// The arguments of a backward op.
struct Backward {
  const char *op;
  const Tensor &grad_out;
  const Tensor &x;  // the normalized tensor: sum in add_layer_norm and add_rms_norm
  Sizes normalized_shape;
  const Tensor *mean;  // nullptr: rms_norm
  const Tensor &rstd;
  const Optional &weight;
  const Optional &bias;
  bool needs_x;
  bool needs_weight;
  bool needs_bias;
  double p = 0;
  const Optional &seed = NONE;
  bool adds_residual = false;  // true: dropout applies to x; false: to y
  const Optional &grad_sum = NONE;
  bool needs_dropped = false;  // only with needs_x and p > 0
};

// The gradients. `x` belongs to the normalized tensor, and `dropped` is dropout(x). A gradient that
// is not needed is an empty tensor.
struct Gradients {
  Tensor x, weight, bias, dropped;
};

Gradients norm_backward(const Backward &call);

}  // namespace extension_cpp

#endif
