// bias_gelu: schemas, checks, allocation and registration. bias_gelu.h has the formulas.
#include "bias_gelu/bias_gelu.h"

#include "common/shim/bias.h"

namespace extension_cpp::bias_gelu {

static Tensor bias_gelu(const Tensor &x, const Tensor &bias, bool tanh) {
  bias_gelu_forward_args args{};
  args.kind = tanh ? GELU_TANH : GELU;
  return bias_forward("bias_gelu", KERNEL(bias_gelu_forward), args, x, bias, EXP_COST);
}

static std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor &grad_out, const Tensor &x,
                                                     const Tensor &bias, bool tanh,
                                                     bool needs_grad_x, bool needs_grad_bias) {
  bias_gelu_backward_args args{};
  args.kind = tanh ? GELU_TANH : GELU;
  return bias_backward("bias_gelu_backward", KERNEL(bias_gelu_backward), bias_gelu_grad_bias_cpu,
                       args, grad_out, x, bias, {needs_grad_x, needs_grad_bias});
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "bias_gelu(Tensor x, Tensor bias, bool tanh=False) -> Tensor", &bias_gelu);
  DEF_WITH_NO_GRAD(m,
                   "bias_gelu_backward(Tensor grad_out, Tensor x, Tensor bias, bool tanh, bool "
                   "needs_grad_x, bool needs_grad_bias) -> (Tensor, Tensor)",
                   &bias_gelu_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "bias_gelu", TORCH_BOX(&bias_gelu));
  impl_with_no_grad(m, "bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace extension_cpp::bias_gelu
