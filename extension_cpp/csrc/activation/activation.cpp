// silu and gelu: schemas, checks, allocation and registration. activation.h has the formulas.
#include "activation/activation.h"

#include "common/shim/op.h"

namespace extension_cpp::activation {

static Tensor forward(const char *op, activation_t kind, const Tensor &x) {
  const dtype_t dtype = check_dtype(op, "x", x);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_dense = with_strides_of(x, y);
  activation_forward_args args{x_dense.const_data_ptr(), y.mutable_data_ptr(), x.numel(), kind,
                               dtype};
  launch_flat(op, KERNEL(activation_forward), args, x, EXP_COST * 2 * x.element_size());
  return y;
}

static Tensor backward(const char *op, activation_t kind, const Tensor &grad_out, const Tensor &x) {
  const dtype_t dtype = check_dtype(op, "x", x);
  check_like(op, "grad_out", grad_out, "x", x);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  const Tensor g = with_strides_of(grad_out, grad_x), x_dense = with_strides_of(x, grad_x);
  activation_backward_args args{g.const_data_ptr(),
                                x_dense.const_data_ptr(),
                                grad_x.mutable_data_ptr(),
                                x.numel(),
                                kind,
                                dtype};
  launch_flat(op, KERNEL(activation_backward), args, x, EXP_COST * 3 * x.element_size());
  return grad_x;
}

static Tensor double_backward(const char *op, activation_t kind, const Tensor &grad_grad_x,
                              const Tensor &grad_out, const Tensor &x) {
  const dtype_t dtype = check_dtype(op, "x", x);
  check_like(op, "grad_grad_x", grad_grad_x, "x", x);
  check_like(op, "grad_out", grad_out, "x", x);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  const Tensor gg = with_strides_of(grad_grad_x, grad_x), g = with_strides_of(grad_out, grad_x);
  const Tensor x_dense = with_strides_of(x, grad_x);
  activation_double_backward_args args{gg.const_data_ptr(),
                                       g.const_data_ptr(),
                                       x_dense.const_data_ptr(),
                                       grad_x.mutable_data_ptr(),
                                       x.numel(),
                                       kind,
                                       dtype};
  launch_flat(op, KERNEL(activation_double_backward), args, x, EXP_COST * 4 * x.element_size());
  return grad_x;
}

static activation_t gelu_kind(bool tanh) { return tanh ? GELU_TANH : GELU; }

static Tensor silu(const Tensor &x) { return forward("silu", SILU, x); }
static Tensor silu_backward(const Tensor &grad_out, const Tensor &x) {
  return backward("silu_backward", SILU, grad_out, x);
}
static Tensor silu_double_backward(const Tensor &grad_grad_x, const Tensor &grad_out,
                                   const Tensor &x) {
  return double_backward("silu_double_backward", SILU, grad_grad_x, grad_out, x);
}

static Tensor gelu(const Tensor &x, bool tanh) { return forward("gelu", gelu_kind(tanh), x); }
static Tensor gelu_backward(const Tensor &grad_out, const Tensor &x, bool tanh) {
  return backward("gelu_backward", gelu_kind(tanh), grad_out, x);
}
static Tensor gelu_double_backward(const Tensor &grad_grad_x, const Tensor &grad_out,
                                   const Tensor &x, bool tanh) {
  return double_backward("gelu_double_backward", gelu_kind(tanh), grad_grad_x, grad_out, x);
}

// The schema of gelu has a bool in place of PyTorch's string `approximate`, because with PyTorch
// 2.10 and 2.11 the stable ABI leaks a string argument at every call.
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "silu(Tensor x) -> Tensor", &silu);
  DEF_WITH_NO_GRAD(m, "silu_backward(Tensor grad_out, Tensor x) -> Tensor", &silu_backward);
  DEF_WITH_NO_GRAD(m,
                   "silu_double_backward(Tensor grad_grad_x, Tensor grad_out, Tensor x) -> Tensor",
                   &silu_double_backward);
  DEF_WITH_NO_GRAD(m, "gelu(Tensor x, bool tanh=False) -> Tensor", &gelu);
  DEF_WITH_NO_GRAD(m, "gelu_backward(Tensor grad_out, Tensor x, bool tanh) -> Tensor",
                   &gelu_backward);
  DEF_WITH_NO_GRAD(
      m,
      "gelu_double_backward(Tensor grad_grad_x, Tensor grad_out, Tensor x, bool tanh) -> "
      "Tensor",
      &gelu_double_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "silu", TORCH_BOX(&silu));
  impl_with_no_grad(m, "silu_backward", TORCH_BOX(&silu_backward));
  impl_with_no_grad(m, "silu_double_backward", TORCH_BOX(&silu_double_backward));
  impl_with_no_grad(m, "gelu", TORCH_BOX(&gelu));
  impl_with_no_grad(m, "gelu_backward", TORCH_BOX(&gelu_backward));
  impl_with_no_grad(m, "gelu_double_backward", TORCH_BOX(&gelu_double_backward));
}

}  // namespace extension_cpp::activation
