// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include "common/shim/op.h"

namespace extension_cpp::kernel_template {

static Tensor forward(const Tensor &x) {
  const char *op = "kernel_template";
  const dtype_t dtype = check_dtype(op, "x", x);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_dense = with_strides_of(x, y);  // a local keeps a copy alive until the launch
  kernel_template_forward_args args{};
  args.x = x_dense.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.numel = x.numel();
  args.dtype = dtype;
  launch_flat(op, KERNEL(kernel_template_forward), args, x, 2 * x.element_size());
  return y;
}

static Tensor backward(const Tensor &grad_out, const Tensor &x) {
  const char *op = "kernel_template_backward";
  const dtype_t dtype = check_dtype(op, "x", x);
  check_like(op, "grad_out", grad_out, "x", x);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  const Tensor g = with_strides_of(grad_out, grad_x), x_dense = with_strides_of(x, grad_x);
  kernel_template_backward_args args{};
  args.grad_out = g.const_data_ptr();
  args.x = x_dense.const_data_ptr();
  args.grad_x = grad_x.mutable_data_ptr();
  args.numel = x.numel();
  args.dtype = dtype;
  launch_flat(op, KERNEL(kernel_template_backward), args, x, 3 * x.element_size());
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
