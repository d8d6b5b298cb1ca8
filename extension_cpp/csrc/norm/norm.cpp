// layer_norm, rms_norm and their forms with a residual and dropout: schemas and registration.
// norm_shim.cpp has their forward and backward.
#include "norm/norm_shim.h"

namespace extension_cpp {

// ---- layer_norm and rms_norm ----

// with_statistics: true for the operator, false for its no-grad overload.
template <bool with_statistics>
static auto layer_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                       const Optional &bias, double eps) {
  const Outputs out =
      norm_forward({"layer_norm", x, normalized_shape, weight, bias, eps, true, with_statistics});
  return returned<with_statistics>(std::tuple{out.y}, out.mean, out.rstd);
}

template <bool with_statistics>
static auto rms_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                     std::optional<double> eps) {
  const Outputs out =
      norm_forward({"rms_norm", x, normalized_shape, weight, NONE, eps, false, with_statistics});
  return returned<with_statistics>(std::tuple{out.y}, out.rstd);
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, bool needs_grad_x,
    bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward({"layer_norm_backward", grad_out, x, normalized_shape, &mean, rstd, weight,
                     bias, needs_grad_x, needs_grad_weight, needs_grad_bias});
  return {g.x, g.weight, g.bias};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad_out, const Tensor &x,
                                                    const Shape &normalized_shape,
                                                    const Tensor &rstd, const Optional &weight,
                                                    bool needs_grad_x, bool needs_grad_weight) {
  const Gradients g = norm_backward({"rms_norm_backward", grad_out, x, normalized_shape, nullptr,
                                     rstd, weight, NONE, needs_grad_x, needs_grad_weight, false});
  return {g.x, g.weight};
}

// ---- with a residual or dropout ----

template <bool with_statistics>
static auto add_layer_norm(const Tensor &x, const Tensor &residual, const Shape &normalized_shape,
                           const Optional &weight, const Optional &bias, double eps, double p,
                           const Optional &seed) {
  const Outputs out = norm_forward({"add_layer_norm", x, normalized_shape, weight, bias, eps, true,
                                    with_statistics, &residual, p, seed});
  return returned<with_statistics>(std::tuple{out.y, *out.sum}, out.mean, out.rstd);
}

template <bool with_statistics>
static auto add_rms_norm(const Tensor &x, const Tensor &residual, const Shape &normalized_shape,
                         const Optional &weight, std::optional<double> eps, double p,
                         const Optional &seed) {
  const Outputs out = norm_forward({"add_rms_norm", x, normalized_shape, weight, NONE, eps, false,
                                    with_statistics, &residual, p, seed});
  return returned<with_statistics>(std::tuple{out.y, *out.sum}, out.rstd);
}

template <bool with_statistics>
static auto layer_norm_dropout(const Tensor &x, const Shape &normalized_shape,
                               const Optional &weight, const Optional &bias, double eps, double p,
                               const Optional &seed) {
  const Outputs out = norm_forward({"layer_norm_dropout", x, normalized_shape, weight, bias, eps,
                                    true, with_statistics, nullptr, p, seed});
  return returned<with_statistics>(std::tuple{out.y}, out.mean, out.rstd);
}

// add_layer_norm_backward and add_rms_norm_backward return the gradients of x and of residual.
// Without dropout the two are equal, and the kernel writes only that of residual.

static std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &mean, const Tensor &rstd, const Optional &weight,
    const Optional &bias, double p, const Optional &seed, bool needs_grad_x,
    bool needs_grad_residual, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward({"add_layer_norm_backward", grad_out, sum, normalized_shape, &mean, rstd,
                     weight, bias, needs_grad_x || needs_grad_residual, needs_grad_weight,
                     needs_grad_bias, p, seed, true, grad_sum, needs_grad_x && p > 0});
  return {g.dropped, g.x, g.weight, g.bias};
}

static std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &rstd, const Optional &weight, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_residual, bool needs_grad_weight) {
  const Gradients g =
      norm_backward({"add_rms_norm_backward", grad_out, sum, normalized_shape, nullptr, rstd,
                     weight, NONE, needs_grad_x || needs_grad_residual, needs_grad_weight, false, p,
                     seed, true, grad_sum, needs_grad_x && p > 0});
  return {g.dropped, g.x, g.weight};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_dropout_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward({"layer_norm_dropout_backward", grad_out, x, normalized_shape, &mean, rstd,
                     weight, bias, needs_grad_x, needs_grad_weight, needs_grad_bias, p, seed});
  return {g.x, g.weight, g.bias};
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  def_with_no_grad(m,
                   "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                   "Tensor? bias=None, float eps=1e-05) -> (Tensor, Tensor, Tensor)",
                   "Tensor");
  def_with_no_grad(m,
                   "layer_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool needs_grad_x, "
                   "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
  def_with_no_grad(m,
                   "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                   "float? eps=None) -> (Tensor, Tensor)",
                   "Tensor");
  def_with_no_grad(m,
                   "rms_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor rstd, Tensor? weight, bool needs_grad_x, bool needs_grad_weight) -> "
                   "(Tensor, Tensor)");
  def_with_no_grad(m,
                   "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, "
                   "Tensor? weight, Tensor? bias, float eps, float p, Tensor? seed) -> "
                   "(Tensor, Tensor, Tensor, Tensor)",
                   "(Tensor, Tensor)");
  def_with_no_grad(m,
                   "add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, "
                   "SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
                   "Tensor? bias, float p, Tensor? seed, bool needs_grad_x, "
                   "bool needs_grad_residual, bool needs_grad_weight, bool needs_grad_bias) -> "
                   "(Tensor, Tensor, Tensor, Tensor)");
  def_with_no_grad(m,
                   "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, "
                   "Tensor? weight, float? eps, float p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
                   "(Tensor, Tensor)");
  def_with_no_grad(m,
                   "add_rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, "
                   "SymInt[] normalized_shape, Tensor rstd, Tensor? weight, float p, Tensor? seed, "
                   "bool needs_grad_x, bool needs_grad_residual, bool needs_grad_weight) -> "
                   "(Tensor, Tensor, Tensor)");
  def_with_no_grad(m,
                   "layer_norm_dropout(Tensor x, SymInt[] normalized_shape, Tensor? weight, "
                   "Tensor? bias, float eps, float p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
                   "Tensor");
  def_with_no_grad(m,
                   "layer_norm_dropout_backward(Tensor grad_out, Tensor x, "
                   "SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
                   "Tensor? bias, float p, Tensor? seed, bool needs_grad_x, "
                   "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "layer_norm", TORCH_BOX(&layer_norm<true>), TORCH_BOX(&layer_norm<false>));
  impl_with_no_grad(m, "layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  impl_with_no_grad(m, "rms_norm", TORCH_BOX(&rms_norm<true>), TORCH_BOX(&rms_norm<false>));
  impl_with_no_grad(m, "rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  impl_with_no_grad(m, "add_layer_norm", TORCH_BOX(&add_layer_norm<true>),
                    TORCH_BOX(&add_layer_norm<false>));
  impl_with_no_grad(m, "add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  impl_with_no_grad(m, "add_rms_norm", TORCH_BOX(&add_rms_norm<true>),
                    TORCH_BOX(&add_rms_norm<false>));
  impl_with_no_grad(m, "add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  impl_with_no_grad(m, "layer_norm_dropout", TORCH_BOX(&layer_norm_dropout<true>),
                    TORCH_BOX(&layer_norm_dropout<false>));
  impl_with_no_grad(m, "layer_norm_dropout_backward", TORCH_BOX(&layer_norm_dropout_backward));
}

}  // namespace extension_cpp
