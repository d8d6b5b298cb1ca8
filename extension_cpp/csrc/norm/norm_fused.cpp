// add_layer_norm, add_rms_norm and layer_norm_dropout: schemas, checks, allocation and registration. The kernels' contract is in
// norm.h.
#include "norm/norm_shim.h"

namespace extension_cpp {

// No dropout where p is 0, with a seed or without.
static dropout_t check_dropout(const char *op, double p, const Optional &seed, const Tensor &x) {
  check_probability(op, p);
  if (seed) check_seed(op, *seed, x);
  if (p == 0) return {};
  if (!seed) fail(op, "expected a seed with p > 0, but got None");
  return dropout_of(p, static_cast<const int64_t *>(seed->const_data_ptr()));
}

static void check_like(const char *op, const char *name, const Tensor &tensor,
                       const char *like_name, const Tensor &like) {
  check_same(op, name, tensor, like_name, like);
  check_shape(op, name, tensor, like_name, like);
}

using Pair = std::tuple<Tensor, Tensor>;

// y, and the sum of residual and x with dropout; `centered`: add_layer_norm.
static Pair add_norm(Statistics *statistics, bool centered, const char *op, const Tensor &x,
                     const Tensor &residual, const Shape &normalized_shape, const Optional &weight,
                     const Optional &bias, std::optional<double> eps, double p,
                     const Optional &seed) {
  const Problem problem = check_inputs(op, x, normalized_shape, weight, bias);
  check_like(op, "residual", residual, "x", x);
  const dropout_t dropout = check_dropout(op, p, seed, x);
  const Tensor y = allocate(x.sizes(), problem.dtype, x),
               sum = allocate(x.sizes(), problem.dtype, x);
  norm_forward(op, problem, x, normalized_shape.size(), weight, bias, eps_or_default(eps, problem),
               centered, y, statistics, {&residual, &sum, dropout});
  return {y, sum};
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm(
    const Tensor &x, const Tensor &residual, const Shape &normalized_shape, const Optional &weight,
    const Optional &bias, double eps, double p, const Optional &seed) {
  Statistics statistics;
  const auto [y, sum] = add_norm(&statistics, true, "add_layer_norm", x, residual, normalized_shape,
                                 weight, bias, eps, p, seed);
  return {y, sum, *statistics.mean, *statistics.rstd};
}

static Pair add_layer_norm_no_grad(const Tensor &x, const Tensor &residual,
                                   const Shape &normalized_shape, const Optional &weight,
                                   const Optional &bias, double eps, double p,
                                   const Optional &seed) {
  return add_norm(nullptr, true, "add_layer_norm", x, residual, normalized_shape, weight, bias, eps,
                  p, seed);
}

static std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor &x, const Tensor &residual,
                                                       const Shape &normalized_shape,
                                                       const Optional &weight,
                                                       std::optional<double> eps, double p,
                                                       const Optional &seed) {
  Statistics statistics;
  const auto [y, sum] = add_norm(&statistics, false, "add_rms_norm", x, residual, normalized_shape,
                                 weight, std::nullopt, eps, p, seed);
  return {y, sum, *statistics.rstd};
}

static Pair add_rms_norm_no_grad(const Tensor &x, const Tensor &residual,
                                 const Shape &normalized_shape, const Optional &weight,
                                 std::optional<double> eps, double p, const Optional &seed) {
  return add_norm(nullptr, false, "add_rms_norm", x, residual, normalized_shape, weight,
                  std::nullopt, eps, p, seed);
}

static Tensor layer_norm_dropout_with(Statistics *statistics, const Tensor &x,
                                      const Shape &normalized_shape, const Optional &weight,
                                      const Optional &bias, double eps, double p,
                                      const Optional &seed) {
  const char *op = "layer_norm_dropout";
  const Problem problem = check_inputs(op, x, normalized_shape, weight, bias);
  const dropout_t dropout = check_dropout(op, p, seed, x);
  const Tensor y = allocate(x.sizes(), problem.dtype, x);
  norm_forward(op, problem, x, normalized_shape.size(), weight, bias, eps, true, y, statistics,
               {nullptr, nullptr, dropout});
  return y;
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_dropout(const Tensor &x,
                                                             const Shape &normalized_shape,
                                                             const Optional &weight,
                                                             const Optional &bias, double eps,
                                                             double p, const Optional &seed) {
  Statistics statistics;
  const Tensor y =
      layer_norm_dropout_with(&statistics, x, normalized_shape, weight, bias, eps, p, seed);
  return {y, *statistics.mean, *statistics.rstd};
}

static Tensor layer_norm_dropout_no_grad(const Tensor &x, const Shape &normalized_shape,
                                         const Optional &weight, const Optional &bias, double eps,
                                         double p, const Optional &seed) {
  return layer_norm_dropout_with(nullptr, x, normalized_shape, weight, bias, eps, p, seed);
}

// The gradients of x, residual, weight and bias. Without dropout x's gradient is residual's: only the latter is written.
static Gradients add_norm_backward(const char *op, const Tensor &grad_out, const Optional &grad_sum,
                                   const Tensor &sum, const Shape &normalized_shape,
                                   const Tensor *mean, const Tensor &rstd, const Optional &weight,
                                   const Optional &bias, double p, const Optional &seed,
                                   bool needs_x, bool needs_residual, bool needs_weight,
                                   bool needs_bias) {
  if (grad_sum) check_like(op, "grad_sum", *grad_sum, "sum", sum);
  FusedBackward fused;
  fused.grad_sum = grad_sum ? &*grad_sum : nullptr;
  fused.dropout_x = check_dropout(op, p, seed, sum);
  fused.needs_dropped = needs_x && p > 0;
  return norm_backward(op, grad_out, sum, normalized_shape, mean, rstd, weight, bias,
                       needs_x || needs_residual, needs_weight, needs_bias, fused);
}

static std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &mean, const Tensor &rstd, const Optional &weight,
    const Optional &bias, double p, const Optional &seed, bool needs_grad_x,
    bool needs_grad_residual, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g = add_norm_backward(
      "add_layer_norm_backward", grad_out, grad_sum, sum, normalized_shape, &mean, rstd, weight,
      bias, p, seed, needs_grad_x, needs_grad_residual, needs_grad_weight, needs_grad_bias);
  return {g.dropped, g.x, g.weight, g.bias};
}

static std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &rstd, const Optional &weight, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_residual, bool needs_grad_weight) {
  const Gradients g = add_norm_backward(
      "add_rms_norm_backward", grad_out, grad_sum, sum, normalized_shape, nullptr, rstd, weight,
      std::nullopt, p, seed, needs_grad_x, needs_grad_residual, needs_grad_weight, false);
  return {g.dropped, g.x, g.weight};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_dropout_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) {
  const char *op = "layer_norm_dropout_backward";
  FusedBackward fused;
  fused.dropout_y = check_dropout(op, p, seed, x);
  const Gradients g = norm_backward(op, grad_out, x, normalized_shape, &mean, rstd, weight, bias,
                                    needs_grad_x, needs_grad_weight, needs_grad_bias, fused);
  return {g.x, g.weight, g.bias};
}

STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  def_with_twin(m,
                "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? "
                "weight, Tensor? bias, float eps, "
                "float p, Tensor? seed) -> (Tensor, Tensor, Tensor, Tensor)",
                "(Tensor, Tensor)");
  def_with_twin(
      m,
      "add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, SymInt[] "
      "normalized_shape, Tensor mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, float p, Tensor? seed, bool needs_grad_x, bool "
      "needs_grad_residual, "
      "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor, Tensor)");
  def_with_twin(m,
                "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, Tensor? "
                "weight, float? eps, float p, "
                "Tensor? seed) -> (Tensor, Tensor, Tensor)",
                "(Tensor, Tensor)");
  def_with_twin(m,
                "add_rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, SymInt[] "
                "normalized_shape, Tensor rstd, "
                "Tensor? weight, float p, Tensor? seed, bool needs_grad_x, bool "
                "needs_grad_residual, bool needs_grad_weight) -> "
                "(Tensor, Tensor, Tensor)");
  def_with_twin(m,
                "layer_norm_dropout(Tensor x, SymInt[] normalized_shape, Tensor? weight, Tensor? "
                "bias, float eps, float p, "
                "Tensor? seed) -> (Tensor, Tensor, Tensor)",
                "Tensor");
  def_with_twin(m,
                "layer_norm_dropout_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                "Tensor mean, Tensor rstd, "
                "Tensor? weight, Tensor? bias, float p, Tensor? seed, bool needs_grad_x, bool "
                "needs_grad_weight, "
                "bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CPU, m) {
  impl_with_twin(m, "add_layer_norm", TORCH_BOX(&add_layer_norm),
                 TORCH_BOX(&add_layer_norm_no_grad));
  impl_with_twin(m, "add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  impl_with_twin(m, "add_rms_norm", TORCH_BOX(&add_rms_norm), TORCH_BOX(&add_rms_norm_no_grad));
  impl_with_twin(m, "add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  impl_with_twin(m, "layer_norm_dropout", TORCH_BOX(&layer_norm_dropout),
                 TORCH_BOX(&layer_norm_dropout_no_grad));
  impl_with_twin(m, "layer_norm_dropout_backward", TORCH_BOX(&layer_norm_dropout_backward));
}

#ifdef WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CUDA, m) {
  impl_with_twin(m, "add_layer_norm", TORCH_BOX(&add_layer_norm),
                 TORCH_BOX(&add_layer_norm_no_grad));
  impl_with_twin(m, "add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  impl_with_twin(m, "add_rms_norm", TORCH_BOX(&add_rms_norm), TORCH_BOX(&add_rms_norm_no_grad));
  impl_with_twin(m, "add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  impl_with_twin(m, "layer_norm_dropout", TORCH_BOX(&layer_norm_dropout),
                 TORCH_BOX(&layer_norm_dropout_no_grad));
  impl_with_twin(m, "layer_norm_dropout_backward", TORCH_BOX(&layer_norm_dropout_backward));
}
#endif

}  // namespace extension_cpp
