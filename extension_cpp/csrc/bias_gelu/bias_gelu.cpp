// bias_gelu: schemas, checks, allocation and registration. bias_gelu.h has the kernels' contract.
#include "bias_gelu/bias_gelu.h"

#include "common/shim/op.h"

namespace extension_cpp::bias_gelu {

// The kernels take contiguous rows, because the bias runs along the last dimension. If x has other
// strides, the result is copied into them at the end.
static Tensor bias_gelu(const Tensor &x, const Tensor &bias, bool tanh) {
  const dtype_t dtype = check_bias("bias_gelu", x, bias);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_rows = as_contiguous(x), bias_row = as_contiguous(bias);
  const Tensor y_rows = y.is_contiguous() ? y : allocate(x.sizes(), dtype, x);
  const int64_t cols = x.size(-1);
  bias_gelu_forward_args args{x_rows.const_data_ptr(),
                              bias_row.const_data_ptr(),
                              y_rows.mutable_data_ptr(),
                              x.numel() / cols,
                              cols,
                              tanh ? GELU_TANH : GELU,
                              dtype};
  launch("bias_gelu", KERNEL(bias_gelu_forward), args, x, ceil_div(x.numel(), CHUNK),
         flat_grain(EXP_COST * 2 * x.element_size()));
  return copy_into(y, y_rows);
}

static std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor &grad_out, const Tensor &x,
                                                     const Tensor &bias, bool tanh,
                                                     bool needs_grad_x, bool needs_grad_bias) {
  const char *op = "bias_gelu_backward";
  const dtype_t dtype = check_bias(op, x, bias);
  check_like(op, "grad_out", grad_out, "x", x);
  const int64_t none = 0, cols = x.size(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const Tensor grad_x = needs_grad_x ? allocate_like(x) : allocate({&none, 1}, dtype, x);
  const Tensor grad_bias = allocate({needs_grad_bias ? &cols : &none, 1}, dtype, x);
  if (cols == 0 || (rows == 0 && !needs_grad_bias) || !(needs_grad_x || needs_grad_bias))
    return {grad_x, grad_bias};
  const Tensor g = as_contiguous(grad_out), x_rows = as_contiguous(x),
               bias_row = as_contiguous(bias);
  const Tensor grad_x_rows = grad_x.is_contiguous() ? grad_x : allocate(x.sizes(), dtype, x);
  const int64_t doubles = !needs_grad_bias ? 0 : ON_DEVICE_OF(x, column_sums_partial)(rows, cols);
  const Tensor partial = allocate({&doubles, 1}, DTYPE_FLOAT64, x);
  bias_gelu_backward_args args{
      g.const_data_ptr(),
      x_rows.const_data_ptr(),
      bias_row.const_data_ptr(),
      needs_grad_x ? grad_x_rows.mutable_data_ptr() : nullptr,
      needs_grad_bias ? grad_bias.mutable_data_ptr() : nullptr,
      needs_grad_bias ? static_cast<double *>(partial.mutable_data_ptr()) : nullptr,
      rows,
      cols,
      tanh ? GELU_TANH : GELU,
      dtype};
  const int64_t tiles = column_sums_tiles(cols);
  // Without rows grad_bias is 0: on the GPU this kernel writes it, on the CPU the sums below do.
  if (rows > 0 || x.is_cuda())
    launch(op, KERNEL(bias_gelu_backward), args, x, column_sums_parts(rows, cols) * tiles, 1);
  if (needs_grad_bias && !x.is_cuda()) parallel_for(tiles, 1, bias_gelu_grad_bias_cpu, &args);
  return {copy_into(grad_x, grad_x_rows), grad_bias};
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
