// softmax and log_softmax: schemas, checks, allocation and registration. softmax.h has the
// formulas.
#include "softmax/softmax.h"

#include <algorithm>

#include "common/shim/op.h"

namespace extension_cpp::softmax {

// A dense tensor as the kernels see it, whatever the order of its dimensions in memory.
struct Shape {
  int64_t outer, cols, inner;
};

// x must be dense and have elements.
static Shape shape_of(const Tensor &x, int64_t dim) {
  if (x.dim() == 0 || x.size(dim) == 1) return {x.numel(), 1, 1};
  const int64_t cols = x.size(dim), inner = x.stride(dim);
  return {x.numel() / (cols * inner), cols, inner};
}

// Returns the smallest number of work items per CPU thread. These items have only about 16 KiB of
// memory traffic, because exp takes most of the time.
static int64_t grain(const Shape &shape, int64_t element_size) {
  const int64_t width = std::min<int64_t>(shape.inner, SOFTMAX_TILE);
  return ceil_div(16 << 10, 2 * shape.cols * width * element_size);
}

static Tensor forward(const char *op, const Tensor &x, int64_t dim, bool is_log) {
  const dtype_t dtype = check_dtype(op, "x", x);
  dim = check_dim(op, x, dim);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor dense = with_strides_of(x, y);
  const Shape shape = shape_of(y, dim);
  softmax_forward_args args{dense.const_data_ptr(),
                            y.mutable_data_ptr(),
                            shape.outer,
                            shape.cols,
                            shape.inner,
                            dtype,
                            is_log};
  launch(op, KERNEL(softmax_forward), args, x, softmax_items(shape.outer, shape.inner),
         grain(shape, static_cast<int64_t>(x.element_size())));
  return y;
}

static Tensor backward(const char *op, const Tensor &grad_out, const Tensor &y, int64_t dim,
                       bool is_log) {
  const dtype_t dtype = check_dtype(op, "y", y);
  check_like(op, "grad_out", grad_out, "y", y);
  dim = check_dim(op, y, dim);
  const Tensor grad_x = allocate_like(y);
  if (y.numel() == 0) return grad_x;
  const Tensor dense_grad = with_strides_of(grad_out, grad_x), dense = with_strides_of(y, grad_x);
  const Shape shape = shape_of(grad_x, dim);
  softmax_backward_args args{dense_grad.const_data_ptr(),
                             dense.const_data_ptr(),
                             grad_x.mutable_data_ptr(),
                             shape.outer,
                             shape.cols,
                             shape.inner,
                             dtype,
                             is_log};
  launch(op, KERNEL(softmax_backward), args, y, softmax_items(shape.outer, shape.inner),
         grain(shape, static_cast<int64_t>(y.element_size())));
  return grad_x;
}

static Tensor softmax(const Tensor &x, int64_t dim) { return forward("softmax", x, dim, false); }

static Tensor log_softmax(const Tensor &x, int64_t dim) {
  return forward("log_softmax", x, dim, true);
}

static Tensor softmax_backward(const Tensor &grad_out, const Tensor &y, int64_t dim) {
  return backward("softmax_backward", grad_out, y, dim, false);
}

static Tensor log_softmax_backward(const Tensor &grad_out, const Tensor &y, int64_t dim) {
  return backward("log_softmax_backward", grad_out, y, dim, true);
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "softmax(Tensor x, int dim=-1) -> Tensor", &softmax);
  DEF_WITH_NO_GRAD(m, "softmax_backward(Tensor grad_out, Tensor y, int dim) -> Tensor",
                   &softmax_backward);
  DEF_WITH_NO_GRAD(m, "log_softmax(Tensor x, int dim=-1) -> Tensor", &log_softmax);
  DEF_WITH_NO_GRAD(m, "log_softmax_backward(Tensor grad_out, Tensor y, int dim) -> Tensor",
                   &log_softmax_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "softmax", TORCH_BOX(&softmax));
  impl_with_no_grad(m, "softmax_backward", TORCH_BOX(&softmax_backward));
  impl_with_no_grad(m, "log_softmax", TORCH_BOX(&log_softmax));
  impl_with_no_grad(m, "log_softmax_backward", TORCH_BOX(&log_softmax_backward));
}

}  // namespace extension_cpp::softmax
