// kernel_template: schemas, checks, allocation and registration. kernel_template.h has the kernels'
// contract.
#include "kernel_template/kernel_template.h"

#include <algorithm>
#include <tuple>
#include <vector>

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

// Returns the smallest number of rows per CPU thread, for about 128 KiB of memory traffic.
static int64_t row_grain(const Tensor &x) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * x.size(-1) * x.element_size(), 1));
}

// Returns the number of rows in a part. The rows of each part are summed separately for
// grad_weight. A part has at least 16 rows, and there are at most 256 parts.
static int64_t rows_of_a_part(int64_t rows) { return std::max<int64_t>(16, ceil_div(rows, 256)); }

static dtype_t statistics_dtype(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

// weight, contiguous, if there is one.
static std::optional<Tensor> weight_row_of(const std::optional<Tensor> &weight) {
  return weight ? std::optional<Tensor>(as_contiguous(*weight)) : std::nullopt;
}

static std::tuple<Tensor, Tensor> forward(const Tensor &x, const std::optional<Tensor> &weight,
                                          double eps) {
  const char *op = "kernel_template";
  Match match(op);
  match("x", x, FLOATING, "[*, cols]");
  match("weight", weight, SAME, "[cols]");
  const dtype_t dtype = match.dtype();
  std::vector<int64_t> row_shape(x.sizes().begin(), x.sizes().end());
  row_shape.back() = 1;  // rstd broadcasts against x
  const Tensor y = allocate(x.sizes(), dtype, x);
  const Tensor rstd = allocate({row_shape.data(), row_shape.size()}, statistics_dtype(dtype), x);
  if (rstd.numel() == 0) return {y, rstd};
  const Tensor x_rows = as_contiguous(x);  // locals: copies must live until the launch
  const std::optional<Tensor> weight_row = weight_row_of(weight);
  kernel_template_forward_args args{};
  args.x = x_rows.const_data_ptr();
  args.weight = weight_row ? weight_row->const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.rstd = rstd.mutable_data_ptr();
  args.eps = eps;
  args.rows = match.size("*");
  args.cols = match.size("cols");
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template_forward), args, x, args.rows, row_grain(x));
  return {y, rstd};
}

static std::tuple<Tensor, Tensor> backward(const Tensor &grad_out, const Tensor &x,
                                           const std::optional<Tensor> &weight, const Tensor &rstd,
                                           bool needs_grad_x, bool needs_grad_weight) {
  const char *op = "kernel_template_backward";
  Match match(op);
  match("x", x, FLOATING, "[*, cols]");
  match("weight", weight, SAME, "[cols]");
  match("grad_out", grad_out, SAME, "like x");
  const dtype_t dtype = match.dtype();
  const int64_t rows = match.size("*"), cols = match.size("cols"), none = 0;
  check_device(op, "rstd", rstd, "x", x);
  const bool right_type = rstd.scalar_type() == scalar_type(statistics_dtype(dtype));
  if (!right_type || !rstd.is_contiguous() || rstd.numel() != rows) {
    fail(op, "expected rstd as the forward returned it");
  }
  const Tensor grad_x =
      needs_grad_x ? allocate(x.sizes(), dtype, x) : allocate({&none, 1}, dtype, x);
  const Tensor grad_weight = allocate({needs_grad_weight ? &cols : &none, 1}, dtype, x);
  if (cols == 0 || (rows == 0 && !needs_grad_weight) || !(needs_grad_x || needs_grad_weight)) {
    return {grad_x, grad_weight};
  }
  const Tensor g = as_contiguous(grad_out), x_rows = as_contiguous(x);
  const std::optional<Tensor> weight_row = weight_row_of(weight);
  kernel_template_backward_args args{};
  args.part_rows = rows_of_a_part(rows);
  args.parts = ceil_div(rows, args.part_rows);
  args.wide_cols = 32 * ceil_div(cols, 32);
  const int64_t sums = args.parts * args.wide_cols;
  const Tensor partial = allocate({needs_grad_weight ? &sums : &none, 1}, DTYPE_FLOAT64, x);
  args.grad_out = g.const_data_ptr();
  args.x = x_rows.const_data_ptr();
  args.weight = weight_row ? weight_row->const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  args.grad_x = needs_grad_x ? grad_x.mutable_data_ptr() : nullptr;
  args.grad_weight = needs_grad_weight ? grad_weight.mutable_data_ptr() : nullptr;
  args.partial = needs_grad_weight ? static_cast<double *>(partial.mutable_data_ptr()) : nullptr;
  args.rows = rows;
  args.cols = cols;
  args.dtype = dtype;
  // Without rows grad_weight is 0. On a GPU this launch writes the zeros, on the CPU parallel_for.
  if (rows > 0 || x.is_cuda()) launch(op, KERNEL(kernel_template_backward), args, x, args.parts, 1);
  if (needs_grad_weight && !x.is_cuda()) {
    parallel_for(ceil_div(cols, 32), flat_grain(8), kernel_template_grad_weight_cpu, &args);
  }
  return {grad_x, grad_weight};
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(
      m, "kernel_template(Tensor x, Tensor? weight=None, float eps=1e-06) -> (Tensor, Tensor)",
      &forward);
  DEF_WITH_NO_GRAD(
      m,
      "kernel_template_backward(Tensor grad_out, Tensor x, Tensor? weight, Tensor rstd, "
      "bool needs_grad_x, bool needs_grad_weight) -> (Tensor, Tensor)",
      &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
