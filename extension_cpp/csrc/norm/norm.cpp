// layer_norm and rms_norm: schemas, checks, allocation and registration, and what norm_fused.cpp shares with them. The kernels'
// contract is in norm.h.
#include <algorithm>

#include "norm/norm_shim.h"

namespace extension_cpp {

// The accumulation type, in which mean and rstd are kept.
static dtype_t statistics_dtype(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

// Fails unless weight (or bias) has normalized_shape, x's device, and x's dtype or float32.
static dtype_t check_weight(const char *op, const char *name, const Tensor &weight, const Tensor &x,
                            const Shape &normalized_shape) {
  check_device(op, name, weight, "x", x);
  const ScalarType dtype = weight.scalar_type();
  if (dtype != x.scalar_type() &&
      (dtype != ScalarType::Float || x.scalar_type() == ScalarType::Double)) {
    const std::string or_float32 = x.element_size() < 4 ? " or float32" : "";
    fail(op, "expected " + std::string(name) + " to be " + dtype_string(x) + " like x" +
                 or_float32 + ", but got " + dtype_string(weight));
  }
  const Sizes sizes = weight.sizes();
  if (sizes.size() != normalized_shape.size() ||
      !std::equal(sizes.begin(), sizes.end(), normalized_shape.begin())) {
    fail(op, "expected " + std::string(name) + " of shape " +
                 to_string({normalized_shape.data(), normalized_shape.size()}) +
                 ", normalized_shape, but got " + to_string(sizes));
  }
  return check_dtype(op, name, weight);
}

Problem check_inputs(const char *op, const Tensor &x, const Shape &normalized_shape,
                     const Optional &weight, const Optional &bias) {
  Problem problem{};
  problem.dtype = problem.weight_dtype = check_dtype(op, "x", x);
  const size_t dims = normalized_shape.size(), x_dims = static_cast<size_t>(x.dim());
  if (dims == 0) fail(op, "expected normalized_shape to have at least one dimension, but got []");
  const Sizes sizes = x.sizes();
  if (dims > x_dims ||
      !std::equal(normalized_shape.begin(), normalized_shape.end(), sizes.end() - dims)) {
    fail(op, "expected normalized_shape to be the last dimensions of x, of shape " +
                 to_string(sizes) + ", but got " + to_string({normalized_shape.data(), dims}));
  }
  if (weight) problem.weight_dtype = check_weight(op, "weight", *weight, x, normalized_shape);
  if (bias) {
    problem.weight_dtype = check_weight(op, "bias", *bias, x, normalized_shape);
    if (weight) check_same(op, "bias", *bias, "weight", *weight);
  }
  problem.rows = problem.cols = 1;
  for (size_t d = 0; d < x_dims; ++d) (d < x_dims - dims ? problem.rows : problem.cols) *= sizes[d];
  return problem;
}

// A tensor seen as rows: unit stride inside a row, one stride from row to row.
struct Rows {
  Tensor tensor;
  int64_t stride;
};

// The stride from row to row if x's strides allow for rows of `cols` elements that do not overlap, else -1.
static int64_t row_stride(const Tensor &x, int64_t row_dims, int64_t cols) {
  int64_t expected = 1, d = x.dim() - 1;
  for (; d >= x.dim() - row_dims; expected *= x.size(d--)) {
    if (x.size(d) != 1 && x.stride(d) != expected) return -1;
  }
  int64_t stride = -1;
  for (; d >= 0; expected *= x.size(d--)) {
    if (x.size(d) == 1) continue;
    if (stride < 0) {
      stride = expected = x.stride(d);
      if (stride < cols) return -1;
    } else if (x.stride(d) != expected) {
      return -1;
    }
  }
  return stride < 0 ? cols : stride;
}

static Rows as_rows(const Tensor &x, int64_t row_dims, int64_t cols) {
  const int64_t stride = x.is_contiguous() ? cols : row_stride(x, row_dims, cols);
  return stride < 0 ? Rows{torch::stable::contiguous(x), cols} : Rows{x, stride};
}

// What the kernels read as a weight: on CUDA the tensor itself, on the CPU its widened copy (norm_widen_cpu).
static Optional weight_for_kernel(const Optional &weight, double missing, const Problem &problem,
                                  const Tensor &x) {
  Optional source;
  if (weight) source.emplace(as_contiguous(*weight));
  if (x.is_cuda()) return source;
  const int64_t padded = norm_wide_cols(problem.cols);
  const Tensor wide = allocate({&padded, 1}, statistics_dtype(problem.dtype), x);
  norm_widen_args args{source ? source->const_data_ptr() : nullptr,
                       wide.mutable_data_ptr(),
                       missing,
                       problem.cols,
                       problem.dtype,
                       problem.weight_dtype};
  norm_widen_cpu(0, problem.cols, &args);
  return wide;
}

static const void *pointer(const Optional &x) { return x ? x->const_data_ptr() : nullptr; }

// The rows worth a thread on the CPU: 128 KiB of traffic.
static int64_t row_grain(const Problem &problem, int64_t element_size) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * problem.cols * element_size, 1));
}

static Tensor allocate_statistics(const Tensor &x, int64_t row_dims, dtype_t dtype) {
  Shape shape(x.sizes().begin(), x.sizes().end());
  std::fill(shape.end() - row_dims, shape.end(), 1);
  return allocate({shape.data(), shape.size()}, statistics_dtype(dtype), x);
}

void norm_forward(const char *op, const Problem &problem, const Tensor &x, int64_t row_dims,
                  const Optional &weight, const Optional &bias, double eps, bool centered,
                  const Tensor &y, Statistics *statistics, const FusedForward &fused) {
  if (statistics) {
    if (centered) statistics->mean.emplace(allocate_statistics(x, row_dims, problem.dtype));
    statistics->rstd.emplace(allocate_statistics(x, row_dims, problem.dtype));
  }
  if (problem.rows == 0) return;
  const Rows rows = as_rows(x, row_dims, problem.cols);
  const Optional w = weight_for_kernel(weight, 1, problem, x);
  const Optional b = centered ? weight_for_kernel(bias, 0, problem, x) : std::nullopt;
  norm_forward_args args{};
  args.x = rows.tensor.const_data_ptr();
  args.weight = pointer(w);
  args.bias = pointer(b);
  args.y = y.mutable_data_ptr();
  if (statistics) {
    args.mean = centered ? statistics->mean->mutable_data_ptr() : nullptr;
    args.rstd = statistics->rstd->mutable_data_ptr();
  }
  args.centered = centered;
  args.eps = eps;
  args.rows = problem.rows;
  args.cols = problem.cols;
  args.x_stride = rows.stride;
  args.dtype = problem.dtype;
  args.weight_dtype = problem.weight_dtype;
  Optional residual;
  if (fused.residual) {
    const Rows residual_rows = as_rows(*fused.residual, row_dims, problem.cols);
    residual.emplace(residual_rows.tensor);
    args.residual = residual->const_data_ptr();
    args.residual_stride = residual_rows.stride;
    args.sum = fused.sum->mutable_data_ptr();
  }
  (fused.residual ? args.dropout_x : args.dropout_y) = fused.dropout;
  launch(op, KERNEL(norm_forward), args, x, problem.rows, row_grain(problem, x.element_size()));
}

static Tensor layer_norm_with(Statistics *statistics, const Tensor &x,
                              const Shape &normalized_shape, const Optional &weight,
                              const Optional &bias, double eps) {
  const Problem problem = check_inputs("layer_norm", x, normalized_shape, weight, bias);
  const Tensor y = allocate(x.sizes(), problem.dtype, x);
  norm_forward("layer_norm", problem, x, normalized_shape.size(), weight, bias, eps, true, y,
               statistics);
  return y;
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm(const Tensor &x, const Shape &normalized_shape,
                                                     const Optional &weight, const Optional &bias,
                                                     double eps) {
  Statistics statistics;
  const Tensor y = layer_norm_with(&statistics, x, normalized_shape, weight, bias, eps);
  return {y, *statistics.mean, *statistics.rstd};
}

static Tensor layer_norm_no_grad(const Tensor &x, const Shape &normalized_shape,
                                 const Optional &weight, const Optional &bias, double eps) {
  return layer_norm_with(nullptr, x, normalized_shape, weight, bias, eps);
}

double eps_or_default(std::optional<double> eps, const Problem &problem) {
  return eps.value_or(problem.dtype == DTYPE_FLOAT64 ? 0x1p-52 : 0x1p-23);
}

static Tensor rms_norm_with(Statistics *statistics, const Tensor &x, const Shape &normalized_shape,
                            const Optional &weight, std::optional<double> eps) {
  const Problem problem = check_inputs("rms_norm", x, normalized_shape, weight, std::nullopt);
  const Tensor y = allocate(x.sizes(), problem.dtype, x);
  norm_forward("rms_norm", problem, x, normalized_shape.size(), weight, std::nullopt,
               eps_or_default(eps, problem), false, y, statistics);
  return y;
}

static std::tuple<Tensor, Tensor> rms_norm(const Tensor &x, const Shape &normalized_shape,
                                           const Optional &weight, std::optional<double> eps) {
  Statistics statistics;
  const Tensor y = rms_norm_with(&statistics, x, normalized_shape, weight, eps);
  return {y, *statistics.rstd};
}

static Tensor rms_norm_no_grad(const Tensor &x, const Shape &normalized_shape,
                               const Optional &weight, std::optional<double> eps) {
  return rms_norm_with(nullptr, x, normalized_shape, weight, eps);
}

static void check_statistics(const char *op, const char *name, const Tensor &statistics,
                             const Tensor &x, const Problem &problem) {
  check_device(op, name, statistics, "x", x);
  if (statistics.scalar_type() != scalar_type(statistics_dtype(problem.dtype)) ||
      !statistics.is_contiguous() || statistics.numel() != problem.rows) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

Gradients norm_backward(const char *op, const Tensor &grad_out, const Tensor &x,
                        const Shape &normalized_shape, const Tensor *mean, const Tensor &rstd,
                        const Optional &weight, const Optional &bias, bool needs_x,
                        bool needs_weight, bool needs_bias, const FusedBackward &fused) {
  const Problem problem = check_inputs(op, x, normalized_shape, weight, bias);
  check_same(op, "grad_out", grad_out, "x", x);
  check_shape(op, "grad_out", grad_out, "x", x);
  if (mean) check_statistics(op, "mean", *mean, x, problem);
  check_statistics(op, "rstd", rstd, x, problem);
  const int64_t none = 0, row_dims = static_cast<int64_t>(normalized_shape.size());
  const Sizes empty{&none, 1}, shape{normalized_shape.data(), normalized_shape.size()};
  const Gradients gradients{allocate(needs_x ? x.sizes() : empty, problem.dtype, x),
                            allocate(needs_weight ? shape : empty, problem.weight_dtype, x),
                            allocate(needs_bias ? shape : empty, problem.weight_dtype, x),
                            allocate(fused.needs_dropped ? x.sizes() : empty, problem.dtype, x)};
  const bool sums = needs_weight || needs_bias;
  if (problem.cols == 0 || !(sums || needs_x) || (problem.rows == 0 && !sums)) return gradients;

  const Rows x_rows = as_rows(x, row_dims, problem.cols),
             g_rows = as_rows(grad_out, row_dims, problem.cols);
  const Optional w = weight_for_kernel(weight, 1, problem, x);
  norm_backward_args args{};
  args.grad_out = g_rows.tensor.const_data_ptr();
  args.x = x_rows.tensor.const_data_ptr();
  args.mean = mean ? mean->const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  args.weight = pointer(w);
  args.grad_x = needs_x ? gradients.x.mutable_data_ptr() : nullptr;
  args.grad_weight = needs_weight ? gradients.weight.mutable_data_ptr() : nullptr;
  args.grad_bias = needs_bias ? gradients.bias.mutable_data_ptr() : nullptr;
  args.rows = problem.rows;
  args.cols = problem.cols;
  args.x_stride = x_rows.stride;
  args.grad_out_stride = g_rows.stride;
  args.dtype = problem.dtype;
  args.weight_dtype = problem.weight_dtype;
  Optional grad_sum;
  if (fused.grad_sum && needs_x) {
    const Rows grad_sum_rows = as_rows(*fused.grad_sum, row_dims, problem.cols);
    grad_sum.emplace(grad_sum_rows.tensor);
    args.grad_sum = grad_sum->const_data_ptr();
    args.grad_sum_stride = grad_sum_rows.stride;
  }
  args.grad_dropped = fused.needs_dropped ? gradients.dropped.mutable_data_ptr() : nullptr;
  args.dropout_x = fused.dropout_x;
  args.dropout_y = fused.dropout_y;
  const int64_t doubles = sums ? ceil_div(ON_DEVICE_OF(x, norm_partial)(&args), 8) : 0;
  Optional partial;
  if (doubles > 0) {
    partial.emplace(allocate({&doubles, 1}, DTYPE_FLOAT64, x));
    args.partial = partial->mutable_data_ptr();
  }
  launch(op, KERNEL(norm_backward), args, x, norm_parts(problem.rows, problem.cols), 1);
  if (sums && !x.is_cuda())
    parallel_for(ceil_div(problem.cols, NORM_TILE), 1, norm_grad_weight_cpu, &args);
  return gradients;
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, bool needs_grad_x,
    bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward("layer_norm_backward", grad_out, x, normalized_shape, &mean, rstd, weight, bias,
                    needs_grad_x, needs_grad_weight, needs_grad_bias);
  return {g.x, g.weight, g.bias};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad_out, const Tensor &x,
                                                    const Shape &normalized_shape,
                                                    const Tensor &rstd, const Optional &weight,
                                                    bool needs_grad_x, bool needs_grad_weight) {
  const Gradients g =
      norm_backward("rms_norm_backward", grad_out, x, normalized_shape, nullptr, rstd, weight,
                    std::nullopt, needs_grad_x, needs_grad_weight, false);
  return {g.x, g.weight};
}

STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  def_with_twin(m,
                "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? "
                "bias=None, float eps=1e-05) -> "
                "(Tensor, Tensor, Tensor)",
                "Tensor");
  def_with_twin(m,
                "layer_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor "
                "mean, Tensor rstd, "
                "Tensor? weight, Tensor? bias, bool needs_grad_x, bool needs_grad_weight, bool "
                "needs_grad_bias) -> "
                "(Tensor, Tensor, Tensor)");
  def_with_twin(m,
                "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, float? "
                "eps=None) -> (Tensor, Tensor)",
                "Tensor");
  def_with_twin(m,
                "rms_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, Tensor "
                "rstd, Tensor? weight, "
                "bool needs_grad_x, bool needs_grad_weight) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CPU, m) {
  impl_with_twin(m, "layer_norm", TORCH_BOX(&layer_norm), TORCH_BOX(&layer_norm_no_grad));
  impl_with_twin(m, "layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  impl_with_twin(m, "rms_norm", TORCH_BOX(&rms_norm), TORCH_BOX(&rms_norm_no_grad));
  impl_with_twin(m, "rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

#ifdef WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CUDA, m) {
  impl_with_twin(m, "layer_norm", TORCH_BOX(&layer_norm), TORCH_BOX(&layer_norm_no_grad));
  impl_with_twin(m, "layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  impl_with_twin(m, "rms_norm", TORCH_BOX(&rms_norm), TORCH_BOX(&rms_norm_no_grad));
  impl_with_twin(m, "rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}
#endif

}  // namespace extension_cpp
