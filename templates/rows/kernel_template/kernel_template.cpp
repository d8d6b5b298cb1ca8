// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include <algorithm>

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

// Returns x's sizes without the last one.
static Sizes row_sizes(const Tensor &x) {
  return {x.sizes().data(), static_cast<size_t>(x.dim() - 1)};
}

// Returns the smallest number of rows per CPU thread, for about 128 KiB of memory traffic.
static int64_t row_grain(const Tensor &x) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * x.size(-1) * x.element_size(), 1));
}

static Tensor forward(const Tensor &x) {
  const char *op = "kernel_template";
  Match match(op);
  match("x", x, FLOATING, "[*, cols]");
  const dtype_t dtype = match.dtype();
  const Tensor y = allocate(row_sizes(x), dtype, x);
  if (y.numel() == 0) return y;
  const Tensor x_rows = as_contiguous(x);  // a local keeps a copy alive until the launch
  kernel_template_forward_args args{};
  args.x = x_rows.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.rows = y.numel();
  args.cols = x.size(-1);
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_forward), args, x, args.rows, row_grain(x));
  return y;
}

static Tensor backward(const Tensor &grad_out, const Tensor &x) {
  const char *op = "kernel_template_backward";
  Match match(op);
  match("x", x, FLOATING, "[*, cols]");
  match("grad_out", grad_out, SAME, "[*]");
  const dtype_t dtype = match.dtype();
  const Tensor grad_x = allocate(x.sizes(), dtype, x);
  if (x.numel() == 0) return grad_x;
  const Tensor g = as_contiguous(grad_out), x_rows = as_contiguous(x);
  kernel_template_backward_args args{};
  args.grad_out = g.const_data_ptr();
  args.x = x_rows.const_data_ptr();
  args.grad_x = grad_x.mutable_data_ptr();
  args.rows = g.numel();
  args.cols = x.size(-1);
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_backward), args, x, args.rows, row_grain(x));
  return grad_x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor x) -> Tensor", &forward);
  DEF_WITH_NO_GRAD(m, "kernel_template_backward(Tensor grad_out, Tensor x) -> Tensor", &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
