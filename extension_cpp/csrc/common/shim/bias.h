// Functions that the shims of element-wise ops with a bias over the last dimension share
// (bias_gelu, scale_bias_relu): checks, allocation, launches. Callers set their op's options in
// `args`.
#ifndef EXTENSION_CPP_BIAS_H
#define EXTENSION_CPP_BIAS_H

#include "common/column_sums.h"
#include "common/shim/op.h"

namespace extension_cpp {

// Runs the forward kernel and returns y. The kernels take contiguous rows, so if x has other
// strides, the result is copied into y at the end. `cost` is the time of an element's arithmetic
// relative to its memory traffic.
template <typename Args>
Tensor bias_forward(const char *op, const Kernel<Args> &kernel, Args args, const Tensor &x,
                    const Tensor &bias, int64_t cost) {
  args.dtype = check_bias(op, x, bias);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_rows = as_contiguous(x), bias_row = as_contiguous(bias);
  const Tensor y_rows = y.is_contiguous() ? y : allocate(x.sizes(), args.dtype, x);
  args.x = x_rows.const_data_ptr();
  args.bias = bias_row.const_data_ptr();
  args.y = y_rows.mutable_data_ptr();
  args.cols = x.size(-1);
  args.rows = x.numel() / args.cols;
  launch(op, kernel, args, x, ceil_div(x.numel(), CHUNK), flat_grain(cost * 2 * x.element_size()));
  return copy_into(y, y_rows);
}

struct Needs {
  bool grad_x, grad_bias;
};

// Runs the backward kernel and returns {grad_x, grad_bias}. Gradients that are not needed have no
// elements. On the CPU the kernel writes partial sums of grad_bias, and `sum_parts` adds them up.
// The CUDA launcher does both.
template <typename Args>
std::tuple<Tensor, Tensor> bias_backward(const char *op, const Kernel<Args> &kernel,
                                         void (*sum_parts)(int64_t, int64_t, void *), Args args,
                                         const Tensor &grad_out, const Tensor &x,
                                         const Tensor &bias, Needs needs) {
  const dtype_t dtype = args.dtype = check_bias(op, x, bias);
  check_like(op, "grad_out", grad_out, "x", x);
  const int64_t none = 0, cols = x.size(-1), rows = cols == 0 ? 0 : x.numel() / cols;
  const Tensor grad_x = needs.grad_x ? allocate_like(x) : allocate({&none, 1}, dtype, x);
  const Tensor grad_bias = allocate({needs.grad_bias ? &cols : &none, 1}, dtype, x);
  if (cols == 0 || (rows == 0 && !needs.grad_bias) || !(needs.grad_x || needs.grad_bias))
    return {grad_x, grad_bias};
  const Tensor g = as_contiguous(grad_out), x_rows = as_contiguous(x),
               bias_row = as_contiguous(bias);
  const Tensor grad_x_rows = grad_x.is_contiguous() ? grad_x : allocate(x.sizes(), dtype, x);
  const int64_t doubles = !needs.grad_bias ? 0 : ON_DEVICE_OF(x, column_sums_partial)(rows, cols);
  const Tensor partial = allocate({&doubles, 1}, DTYPE_FLOAT64, x);
  args.grad_out = g.const_data_ptr();
  args.x = x_rows.const_data_ptr();
  args.bias = bias_row.const_data_ptr();
  if (needs.grad_x) args.grad_x = grad_x_rows.mutable_data_ptr();
  if (needs.grad_bias) args.grad_bias = grad_bias.mutable_data_ptr();
  if (needs.grad_bias) args.partial = static_cast<double *>(partial.mutable_data_ptr());
  args.rows = rows;
  args.cols = cols;
  const int64_t tiles = column_sums_tiles(cols);
  // Without rows grad_bias is 0. On a GPU this launch writes the zeros, on the CPU sum_parts does.
  if (rows > 0 || x.is_cuda())
    launch(op, kernel, args, x, column_sums_parts(rows, cols) * tiles, 1);
  if (needs.grad_bias && !x.is_cuda()) parallel_for(tiles, 1, sum_parts, &args);
  return {copy_into(grad_x, grad_x_rows), grad_bias};
}

}  // namespace extension_cpp

#endif
