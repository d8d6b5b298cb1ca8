// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include <algorithm>

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

// Returns the smallest number of rows of `steps` steps per CPU thread, for 128 KiB of traffic.
static int64_t row_grain(int64_t steps, const Tensor &x) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * steps * x.element_size(), 1));
}

// Launches the filter. x, weight and y must be contiguous and have elements.
static void filter(const char *op, const Match &match, const Tensor &x, const Tensor &weight,
                   const std::optional<Tensor> &bias, const Tensor &y, bool reverse) {
  kernel_template_filter_args args{};
  args.x = x.const_data_ptr();
  args.weight = weight.const_data_ptr();
  args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.rows = match.size("*") * match.size("channels");
  args.channels = match.size("channels");
  args.steps = match.size("steps");
  args.taps = match.size("taps");
  args.reverse = reverse;
  args.dtype = match.dtype();
  launch(op, KERNEL(kernel_template_filter), args, x, args.rows, row_grain(args.steps, x));
}

static Tensor forward(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias) {
  const char *op = "kernel_template";
  Match match(op);
  match("x", x, FLOATING, "[*, channels, steps]");
  match("weight", weight, SAME, "[channels, taps]");
  match("bias", bias, SAME, "[channels]");
  const Tensor y = allocate(x.sizes(), match.dtype(), x);
  if (y.numel() == 0) return y;
  const Tensor x_rows = as_contiguous(x), taps = as_contiguous(weight);  // locals keep copies alive
  const std::optional<Tensor> offset =
      bias ? std::optional<Tensor>(as_contiguous(*bias)) : std::nullopt;
  filter(op, match, x_rows, taps, offset, y, false);
  return y;
}

static std::tuple<Tensor, Tensor, Tensor> backward(const Tensor &grad_out, const Tensor &x,
                                                   const Tensor &weight, bool needs_grad_x,
                                                   bool needs_grad_weight, bool needs_grad_bias) {
  const char *op = "kernel_template_backward";
  Match match(op);
  match("x", x, FLOATING, "[*, channels, steps]");
  match("weight", weight, SAME, "[channels, taps]");
  match("grad_out", grad_out, SAME, "like x");
  const dtype_t dtype = match.dtype();
  const int64_t channels = match.size("channels"), none = 0;
  const Sizes empty{&none, 1};
  const Tensor grad_x = allocate(needs_grad_x ? x.sizes() : empty, dtype, x);
  const Tensor grad_weight = allocate(needs_grad_weight ? weight.sizes() : empty, dtype, x);
  const Tensor grad_bias = allocate({needs_grad_bias ? &channels : &none, 1}, dtype, x);
  const Tensor g = as_contiguous(grad_out), x_rows = as_contiguous(x), taps = as_contiguous(weight);
  if (grad_x.numel() > 0) filter(op, match, g, taps, std::nullopt, grad_x, true);
  if (grad_weight.numel() == 0 && grad_bias.numel() == 0) return {grad_x, grad_weight, grad_bias};
  kernel_template_sums_args args{};
  args.grad_out = g.const_data_ptr();
  args.x = x_rows.const_data_ptr();
  args.grad_weight = grad_weight.numel() > 0 ? grad_weight.mutable_data_ptr() : nullptr;
  args.grad_bias = grad_bias.numel() > 0 ? grad_bias.mutable_data_ptr() : nullptr;
  args.batch = match.size("*");
  args.channels = channels;
  args.steps = match.size("steps");
  args.taps = match.size("taps");
  args.dtype = dtype;
  const int64_t grain = row_grain(args.batch * args.steps, x);
  launch(op, KERNEL(kernel_template_sums), args, x, channels, grain);
  return {grad_x, grad_weight, grad_bias};
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
                   &forward);
  DEF_WITH_NO_GRAD(m,
                   "kernel_template_backward(Tensor grad_out, Tensor x, Tensor weight, "
                   "bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) -> "
                   "(Tensor, Tensor, Tensor)",
                   &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
