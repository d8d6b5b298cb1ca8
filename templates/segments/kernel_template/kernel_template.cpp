// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include <algorithm>

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

// Returns offsets as a contiguous tensor. Fails if it has no elements. On the CPU, also fails
// unless the offsets are from 0 to rows and never decrease. On a GPU, a check of the values would
// have to wait for the device.
static Tensor checked(const char *op, const Tensor &offsets, int64_t rows) {
  if (offsets.numel() == 0) {
    fail(op, "expected offsets to have at least one number, but got shape [0]");
  }
  const Tensor numbers = as_contiguous(offsets);
  if (offsets.is_cuda()) return numbers;
  const auto *data = static_cast<const int64_t *>(numbers.const_data_ptr());
  for (int64_t s = 0; s < numbers.numel(); ++s) {
    const int64_t least = s > 0 ? data[s - 1] : 0;
    if (data[s] < least || data[s] > rows) {
      fail(op, "expected offsets[" + std::to_string(s) + "] to be from " + std::to_string(least) +
                   " to " + std::to_string(rows) + ", but got " + std::to_string(data[s]));
    }
  }
  return numbers;
}

// Returns the smallest number of work items per CPU thread, for 128 KiB of memory traffic.
static int64_t grain(const Tensor &x, int64_t items) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * x.numel() / items * x.element_size(), 1));
}

static Tensor forward(const Tensor &x, const Tensor &offsets) {
  const char *op = "kernel_template";
  Match match(op);
  match("x", x, FLOATING, "[rows, *]");
  match("offsets", offsets, INT64, "[borders]");
  const dtype_t dtype = match.dtype();
  const Tensor borders = checked(op, offsets, match.size("rows"));
  const int64_t segments = borders.numel() - 1;
  const std::vector<int64_t> sizes = joined({{segments}, sizes_of(x.sizes(), 1)});
  const Tensor out = allocate({sizes.data(), sizes.size()}, dtype, x);
  if (out.numel() == 0) return out;
  const Tensor x_rows = as_contiguous(x);  // a local keeps a copy alive until the launch
  kernel_template_forward_args args{};
  args.x = x_rows.const_data_ptr();
  args.offsets = static_cast<const int64_t *>(borders.const_data_ptr());
  args.out = out.mutable_data_ptr();
  args.rows = match.size("rows");
  args.segments = segments;
  args.cols = match.size("*");
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_forward), args, x, segments, grain(x, segments));
  return out;
}

static Tensor backward(const Tensor &grad_out, const Tensor &offsets, int64_t rows) {
  const char *op = "kernel_template_backward";
  Match match(op);
  match("grad_out", grad_out, FLOATING, "[segments, *]");
  match("offsets", offsets, INT64, "[borders]");
  if (rows < 0) fail(op, "expected rows to be 0 or more, but got " + std::to_string(rows));
  const dtype_t dtype = match.dtype();
  const Tensor borders = checked(op, offsets, rows);
  const int64_t segments = borders.numel() - 1;
  const std::vector<int64_t> of_out = joined({{segments}, sizes_of(grad_out.sizes(), 1)});
  match.sizes("grad_out", grad_out, {of_out.data(), of_out.size()}, "out");
  const std::vector<int64_t> sizes = joined({{rows}, sizes_of(grad_out.sizes(), 1)});
  const Tensor grad_x = allocate({sizes.data(), sizes.size()}, dtype, grad_out);
  if (grad_x.numel() == 0) return grad_x;
  const Tensor g = as_contiguous(grad_out);
  kernel_template_backward_args args{};
  args.grad_out = g.const_data_ptr();
  args.offsets = static_cast<const int64_t *>(borders.const_data_ptr());
  args.grad_x = grad_x.mutable_data_ptr();
  args.rows = rows;
  args.segments = segments;
  args.cols = match.size("*");
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_backward), args, grad_out, rows, grain(grad_x, rows));
  return grad_x;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor x, Tensor offsets) -> Tensor", &forward);
  DEF_WITH_NO_GRAD(
      m, "kernel_template_backward(Tensor grad_out, Tensor offsets, SymInt rows) -> Tensor",
      &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
