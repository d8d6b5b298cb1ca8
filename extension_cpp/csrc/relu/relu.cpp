// relu: schemas, checks, allocation and registration. relu.h defines what the kernels compute.
#include "relu/relu.h"

#include "common/shim/op.h"

namespace extension_cpp::relu {

static Tensor relu(const Tensor &x) {
  const dtype_t dtype = check_dtype("relu", "x", x);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_dense = with_strides_of(x, y);
  relu_forward_args args{x_dense.const_data_ptr(), y.mutable_data_ptr(), x.numel(), dtype};
  launch_flat("relu", KERNEL(relu_forward), args, x, 2 * x.element_size());
  return y;
}

static Tensor relu_backward(const Tensor &grad_out, const Tensor &y) {
  const dtype_t dtype = check_dtype("relu_backward", "y", y);
  check_like("relu_backward", "grad_out", grad_out, "y", y);
  const Tensor grad_x = allocate_like(y);
  if (y.numel() == 0) return grad_x;
  const Tensor g = with_strides_of(grad_out, grad_x), y_dense = with_strides_of(y, grad_x);
  relu_backward_args args{g.const_data_ptr(), y_dense.const_data_ptr(), grad_x.mutable_data_ptr(),
                          y.numel(), dtype};
  launch_flat("relu_backward", KERNEL(relu_backward), args, y, 3 * y.element_size());
  return grad_x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "relu(Tensor x) -> Tensor", &relu);
  DEF_WITH_NO_GRAD(m, "relu_backward(Tensor grad_out, Tensor y) -> Tensor", &relu_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "relu", TORCH_BOX(&relu));
  impl_with_no_grad(m, "relu_backward", TORCH_BOX(&relu_backward));
}

}  // namespace extension_cpp::relu
