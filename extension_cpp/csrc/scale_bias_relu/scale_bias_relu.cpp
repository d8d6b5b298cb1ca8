// scale_bias_relu: schemas, checks, allocation and registration. Formulas: scale_bias_relu.h.
#include "scale_bias_relu/scale_bias_relu.h"

#include "common/shim/bias.h"

namespace extension_cpp::scale_bias_relu {

static Tensor scale_bias_relu(const Tensor &x, const Tensor &bias, double scale) {
  scale_bias_relu_forward_args args{};
  args.scale = scale;
  return bias_forward("scale_bias_relu", KERNEL(scale_bias_relu_forward), args, x, bias, 1);
}

static std::tuple<Tensor, Tensor> scale_bias_relu_backward(const Tensor &grad_out, const Tensor &x,
                                                           const Tensor &bias, double scale,
                                                           bool needs_grad_x,
                                                           bool needs_grad_bias) {
  scale_bias_relu_backward_args args{};
  args.scale = scale;
  return bias_backward("scale_bias_relu_backward", KERNEL(scale_bias_relu_backward),
                       scale_bias_relu_grad_bias_cpu, args, grad_out, x, bias,
                       {needs_grad_x, needs_grad_bias});
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "scale_bias_relu(Tensor x, Tensor bias, float scale=1.0) -> Tensor",
                   &scale_bias_relu);
  DEF_WITH_NO_GRAD(m,
                   "scale_bias_relu_backward(Tensor grad_out, Tensor x, Tensor bias, float scale, "
                   "bool needs_grad_x, "
                   "bool needs_grad_bias) -> (Tensor, Tensor)",
                   &scale_bias_relu_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "scale_bias_relu", TORCH_BOX(&scale_bias_relu));
  impl_with_no_grad(m, "scale_bias_relu_backward", TORCH_BOX(&scale_bias_relu_backward));
}

}  // namespace extension_cpp::scale_bias_relu
