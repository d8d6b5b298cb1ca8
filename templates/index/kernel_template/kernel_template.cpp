// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include <algorithm>

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

// Returns the smallest number of rows per CPU thread, for about 128 KiB of memory traffic.
static int64_t row_grain(const Tensor &rows) {
  const int64_t cols = rows.numel() / rows.size(0);
  return ceil_div(128 << 10, std::max<int64_t>(2 * cols * rows.element_size(), 1));
}

static Tensor forward(const Tensor &x, const Tensor &index) {
  const char *op = "kernel_template";
  Match match(op);
  match("x", x, FLOATING, "[rows, *]");
  match("index", index, INT64, "[count]");
  match.index("index", index, match.size("rows"));
  const dtype_t dtype = match.dtype();
  const std::vector<int64_t> sizes = joined({{index.size(0)}, sizes_of(x.sizes(), 1)});
  const Tensor out = allocate({sizes.data(), sizes.size()}, dtype, x);
  if (out.numel() == 0) return out;
  const Tensor x_rows = as_contiguous(x),
               numbers = as_contiguous(index);  // locals keep copies alive until the launch
  kernel_template_forward_args args{};
  args.x = x_rows.const_data_ptr();
  args.index = static_cast<const int64_t *>(numbers.const_data_ptr());
  args.out = out.mutable_data_ptr();
  args.rows = match.size("rows");
  args.count = match.size("count");
  args.cols = match.size("*");
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_forward), args, x, args.count, row_grain(out));
  return out;
}

static Tensor backward(const Tensor &grad_out, const Tensor &index, int64_t rows) {
  const char *op = "kernel_template_backward";
  Match match(op);
  match("grad_out", grad_out, FLOATING, "[count, *]");
  match("index", index, INT64, "[count]");
  if (rows < 0) fail(op, "expected rows to be 0 or more, but got " + std::to_string(rows));
  match.index("index", index, rows);
  const dtype_t dtype = match.dtype();
  const std::vector<int64_t> sizes = joined({{rows}, sizes_of(grad_out.sizes(), 1)});
  const Tensor grad_x = allocate({sizes.data(), sizes.size()}, dtype, grad_out);
  if (grad_x.numel() == 0) return grad_x;
  const Tensor g = as_contiguous(grad_out), numbers = as_contiguous(index);
  kernel_template_backward_args args{};
  args.grad_out = g.const_data_ptr();
  args.index = static_cast<const int64_t *>(numbers.const_data_ptr());
  args.grad_x = grad_x.mutable_data_ptr();
  args.rows = rows;
  args.count = match.size("count");
  args.cols = match.size("*");
  args.dtype = dtype;
  const bool sorts = !grad_out.is_cuda();
  const int64_t ends_size = sorts ? rows : 0, order_size = sorts ? args.count : 0;
  const Tensor ends = allocate({&ends_size, 1}, ScalarType::Long, grad_out),
               order = allocate({&order_size, 1}, ScalarType::Long, grad_out);
  if (sorts) {
    args.ends = static_cast<int64_t *>(ends.mutable_data_ptr());
    args.order = static_cast<int64_t *>(order.mutable_data_ptr());
    parallel_for(1, 1, kernel_template_sort_cpu, &args);
  }
  launch(op, KERNEL(kernel_template_backward), args, grad_out, rows, row_grain(grad_x));
  return grad_x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor x, Tensor index) -> Tensor", &forward);
  DEF_WITH_NO_GRAD(m,
                   "kernel_template_backward(Tensor grad_out, Tensor index, SymInt rows) -> Tensor",
                   &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
