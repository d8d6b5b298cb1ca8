// mish: schemas, checks, allocation and registration. mish.h has the formulas.
#include "mish/mish.h"

#include "common/shim/op.h"

namespace extension_cpp::mish {

static Tensor mish(const Tensor &x) {
  const dtype_t dtype = check_dtype("mish", "x", x);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_dense = with_strides_of(x, y);
  mish_forward_args args{x_dense.const_data_ptr(), y.mutable_data_ptr(), x.numel(), dtype};
  launch_flat("mish", KERNEL(mish_forward), args, x, EXP_COST * 2 * x.element_size());
  return y;
}

static Tensor mish_backward(const Tensor &grad_out, const Tensor &x) {
  const dtype_t dtype = check_dtype("mish_backward", "x", x);
  check_like("mish_backward", "grad_out", grad_out, "x", x);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  const Tensor g = with_strides_of(grad_out, grad_x), x_dense = with_strides_of(x, grad_x);
  mish_backward_args args{g.const_data_ptr(), x_dense.const_data_ptr(), grad_x.mutable_data_ptr(),
                          x.numel(), dtype};
  launch_flat("mish_backward", KERNEL(mish_backward), args, x, EXP_COST * 3 * x.element_size());
  return grad_x;
}

static Tensor mish_double_backward(const Tensor &grad_grad_x, const Tensor &grad_out,
                                   const Tensor &x) {
  const char *op = "mish_double_backward";
  const dtype_t dtype = check_dtype(op, "x", x);
  check_like(op, "grad_grad_x", grad_grad_x, "x", x);
  check_like(op, "grad_out", grad_out, "x", x);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  const Tensor gg = with_strides_of(grad_grad_x, grad_x), g = with_strides_of(grad_out, grad_x);
  const Tensor x_dense = with_strides_of(x, grad_x);
  mish_double_backward_args args{
      gg.const_data_ptr(),       g.const_data_ptr(), x_dense.const_data_ptr(),
      grad_x.mutable_data_ptr(), x.numel(),          dtype};
  launch_flat(op, KERNEL(mish_double_backward), args, x, EXP_COST * 4 * x.element_size());
  return grad_x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "mish(Tensor x) -> Tensor", &mish);
  DEF_WITH_NO_GRAD(m, "mish_backward(Tensor grad_out, Tensor x) -> Tensor", &mish_backward);
  DEF_WITH_NO_GRAD(m,
                   "mish_double_backward(Tensor grad_grad_x, Tensor grad_out, Tensor x) -> Tensor",
                   &mish_double_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "mish", TORCH_BOX(&mish));
  impl_with_no_grad(m, "mish_backward", TORCH_BOX(&mish_backward));
  impl_with_no_grad(m, "mish_double_backward", TORCH_BOX(&mish_double_backward));
}

}  // namespace extension_cpp::mish
