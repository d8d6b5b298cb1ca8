// layer_norm and rms_norm: schemas and registration, and the forward and the backward of all norms
// (checks, allocation, launch). norm.h has the kernels' contract.
#include <algorithm>

#include "norm/norm_shim.h"

namespace extension_cpp {

// ---- checks ----

// x as a matrix: the normalized dimensions are the columns.
struct Problem {
  dtype_t dtype;
  dtype_t weight_dtype;
  int64_t row_dims;  // the number of normalized dimensions
  int64_t rows;
  int64_t cols;
};

// The accumulation type. mean and rstd have it too.
static dtype_t statistics_dtype(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

// Fails unless weight (or bias) has normalized_shape, x's device, and x's dtype or float32.
static dtype_t check_weight(const char *op, const char *name, const Tensor &weight, const Tensor &x,
                            Sizes normalized_shape) {
  check_device(op, name, weight, "x", x);
  const ScalarType dtype = weight.scalar_type();
  if (dtype != x.scalar_type() &&
      (dtype != ScalarType::Float || x.scalar_type() == ScalarType::Double)) {
    const std::string or_float32 = x.element_size() < 4 ? " or float32" : "";
    fail(op, "expected " + std::string(name) + " to be " + dtype_string(x) + " like x" +
                 or_float32 + ", but got " + dtype_string(weight));
  }
  if (!weight.sizes().equals(normalized_shape)) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(normalized_shape) +
                 ", normalized_shape, but got " + to_string(weight.sizes()));
  }
  return check_dtype(op, name, weight);
}

static Problem check_inputs(const char *op, const Tensor &x, Sizes normalized_shape,
                            const Optional &weight, const Optional &bias) {
  Problem problem{};
  problem.dtype = problem.weight_dtype = check_dtype(op, "x", x);
  const size_t dims = normalized_shape.size(), x_dims = static_cast<size_t>(x.dim());
  if (dims == 0) fail(op, "expected normalized_shape to have at least one dimension, but got []");
  const Sizes sizes = x.sizes();
  if (dims > x_dims || !sizes.slice(x_dims - dims).equals(normalized_shape)) {
    fail(op, "expected normalized_shape to be the last dimensions of x, of shape " +
                 to_string(sizes) + ", but got " + to_string(normalized_shape));
  }
  if (weight) problem.weight_dtype = check_weight(op, "weight", *weight, x, normalized_shape);
  if (bias) {
    problem.weight_dtype = check_weight(op, "bias", *bias, x, normalized_shape);
    if (weight) check_same(op, "bias", *bias, "weight", *weight);
  }
  problem.row_dims = static_cast<int64_t>(dims);
  problem.rows = problem.cols = 1;
  for (size_t d = 0; d < x_dims; ++d) (d < x_dims - dims ? problem.rows : problem.cols) *= sizes[d];
  return problem;
}

static void check_like(const char *op, const char *name, const Tensor &tensor,
                       const char *like_name, const Tensor &like) {
  check_same(op, name, tensor, like_name, like);
  check_shape(op, name, tensor, like_name, like);
}

// p = 0 means no dropout, with or without a seed.
static dropout_t check_dropout(const char *op, double p, const Optional &seed, const Tensor &x) {
  check_probability(op, p);
  if (seed) check_seed(op, *seed, x);
  if (p == 0) return {};
  if (!seed) fail(op, "expected a seed with p > 0, but got None");
  return dropout_of(p, static_cast<const int64_t *>(seed->const_data_ptr()));
}

static void check_statistics(const char *op, const char *name, const Tensor &statistics,
                             const Tensor &x, const Problem &problem) {
  check_device(op, name, statistics, "x", x);
  if (statistics.scalar_type() != scalar_type(statistics_dtype(problem.dtype)) ||
      !statistics.is_contiguous() || statistics.numel() != problem.rows) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

// ---- memory ----

// weight or bias as the kernels read it. On CUDA: the contiguous tensor, if there is one. On the
// CPU: the output of norm_widen_cpu, with `value` in every column if there is no tensor.
static Optional weight_for_kernel(const Optional &weight, double value, const Problem &problem,
                                  const Tensor &x) {
  Optional source;
  if (weight) source.emplace(as_contiguous(*weight));
  if (x.is_cuda()) return source;
  const int64_t padded = norm_wide_cols(problem.cols);
  const Tensor wide = allocate({&padded, 1}, statistics_dtype(problem.dtype), x);
  norm_widen_args args{source ? source->const_data_ptr() : nullptr,
                       wide.mutable_data_ptr(),
                       value,
                       problem.cols,
                       problem.dtype,
                       problem.weight_dtype};
  norm_widen_cpu(0, problem.cols, &args);
  return wide;
}

static const void *pointer(const Optional &x) { return x ? x->const_data_ptr() : nullptr; }

// Allocates a tensor of these sizes if `needed`, else an empty one.
static Tensor allocate_if(bool needed, Sizes sizes, dtype_t dtype, const Tensor &like) {
  const int64_t none = 0;
  return allocate(needed ? sizes : Sizes{&none, 1}, dtype, like);
}

static Tensor allocate_statistics(const Tensor &x, const Problem &problem) {
  Shape shape(x.sizes().begin(), x.sizes().end());
  std::fill(shape.end() - problem.row_dims, shape.end(), 1);
  return allocate({shape.data(), shape.size()}, statistics_dtype(problem.dtype), x);
}

// ---- forward and backward of all norms ----

Outputs norm_forward(const Forward &call) {
  const Tensor &x = call.x;
  const Problem problem = check_inputs(call.op, x, call.normalized_shape, call.weight, call.bias);
  if (call.residual) check_like(call.op, "residual", *call.residual, "x", x);
  norm_forward_args args{};
  (call.residual ? args.dropout_x : args.dropout_y) = check_dropout(call.op, call.p, call.seed, x);

  Outputs out{allocate(x.sizes(), problem.dtype, x), {}, {}, {}};
  if (call.residual) out.sum.emplace(allocate(x.sizes(), problem.dtype, x));
  if (call.with_statistics) {
    if (call.centered) out.mean.emplace(allocate_statistics(x, problem));
    out.rstd.emplace(allocate_statistics(x, problem));
  }
  if (problem.rows == 0) return out;

  const Rows x_rows = as_rows(x, problem.row_dims);
  const Rows residual_rows = call.residual ? as_rows(*call.residual, problem.row_dims) : x_rows;
  const Optional weight = weight_for_kernel(call.weight, 1, problem, x);
  const Optional bias = call.centered ? weight_for_kernel(call.bias, 0, problem, x) : std::nullopt;
  args.x = x_rows.tensor.const_data_ptr();
  args.weight = pointer(weight);
  args.bias = pointer(bias);
  args.y = out.y.mutable_data_ptr();
  args.mean = out.mean ? out.mean->mutable_data_ptr() : nullptr;
  args.rstd = out.rstd ? out.rstd->mutable_data_ptr() : nullptr;
  args.eps = call.eps.value_or(problem.dtype == DTYPE_FLOAT64 ? 0x1p-52 : 0x1p-23);
  args.rows = problem.rows;
  args.cols = problem.cols;
  args.x_stride = x_rows.stride;
  args.dtype = problem.dtype;
  args.weight_dtype = problem.weight_dtype;
  args.centered = call.centered;
  if (call.residual) {
    args.residual = residual_rows.tensor.const_data_ptr();
    args.residual_stride = residual_rows.stride;
    args.sum = out.sum->mutable_data_ptr();
  }
  // The fewest rows per CPU thread: 128 KiB of traffic.
  const int64_t row_bytes = problem.cols * x.element_size();
  const int64_t grain = ceil_div(128 << 10, std::max<int64_t>(2 * row_bytes, 1));
  launch(call.op, KERNEL(norm_forward), args, x, problem.rows, grain);
  return out;
}

Gradients norm_backward(const Backward &call) {
  const char *op = call.op;
  const Tensor &x = call.x;
  const bool needs_sums = call.needs_weight || call.needs_bias;
  if (call.grad_sum) check_like(op, "grad_sum", *call.grad_sum, "sum", x);
  norm_backward_args args{};
  (call.adds_residual ? args.dropout_x : args.dropout_y) = check_dropout(op, call.p, call.seed, x);
  const Problem problem = check_inputs(op, x, call.normalized_shape, call.weight, call.bias);
  check_like(op, "grad_out", call.grad_out, "x", x);
  if (call.mean) check_statistics(op, "mean", *call.mean, x, problem);
  check_statistics(op, "rstd", call.rstd, x, problem);

  const Sizes shape = call.normalized_shape;
  const Gradients gradients{allocate_if(call.needs_x, x.sizes(), problem.dtype, x),
                            allocate_if(call.needs_weight, shape, problem.weight_dtype, x),
                            allocate_if(call.needs_bias, shape, problem.weight_dtype, x),
                            allocate_if(call.needs_dropped, x.sizes(), problem.dtype, x)};
  if (problem.cols == 0 || !(needs_sums || call.needs_x) || (problem.rows == 0 && !needs_sums))
    return gradients;

  const bool adds_grad_sum = call.grad_sum && call.needs_x;
  const Rows x_rows = as_rows(x, problem.row_dims),
             grad_out_rows = as_rows(call.grad_out, problem.row_dims);
  const Rows grad_sum_rows = adds_grad_sum ? as_rows(*call.grad_sum, problem.row_dims) : x_rows;
  const Optional weight = weight_for_kernel(call.weight, 1, problem, x);
  args.grad_out = grad_out_rows.tensor.const_data_ptr();
  args.x = x_rows.tensor.const_data_ptr();
  args.mean = call.mean ? call.mean->const_data_ptr() : nullptr;
  args.rstd = call.rstd.const_data_ptr();
  args.weight = pointer(weight);
  args.grad_x = call.needs_x ? gradients.x.mutable_data_ptr() : nullptr;
  args.grad_weight = call.needs_weight ? gradients.weight.mutable_data_ptr() : nullptr;
  args.grad_bias = call.needs_bias ? gradients.bias.mutable_data_ptr() : nullptr;
  args.rows = problem.rows;
  args.cols = problem.cols;
  args.x_stride = x_rows.stride;
  args.grad_out_stride = grad_out_rows.stride;
  args.dtype = problem.dtype;
  args.weight_dtype = problem.weight_dtype;
  args.grad_sum = adds_grad_sum ? grad_sum_rows.tensor.const_data_ptr() : nullptr;
  args.grad_sum_stride = adds_grad_sum ? grad_sum_rows.stride : 0;
  args.grad_dropped = call.needs_dropped ? gradients.dropped.mutable_data_ptr() : nullptr;
  const int64_t doubles = needs_sums ? ceil_div(ON_DEVICE_OF(x, norm_partial)(&args), 8) : 0;
  Optional partial;
  if (doubles > 0) {
    partial.emplace(allocate({&doubles, 1}, DTYPE_FLOAT64, x));
    args.partial = partial->mutable_data_ptr();
  }
  launch(op, KERNEL(norm_backward), args, x, norm_parts(problem.rows, problem.cols), 1);
  if (needs_sums && !x.is_cuda())
    parallel_for(ceil_div(problem.cols, NORM_TILE), 1, norm_grad_weight_cpu, &args);
  return gradients;
}

// ---- layer_norm and rms_norm ----

// with_statistics: true for the operator, false for its no-grad overload.
template <bool with_statistics>
static auto layer_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                       const Optional &bias, double eps) {
  const Outputs out =
      norm_forward({"layer_norm", x, normalized_shape, weight, bias, eps, true, with_statistics});
  return returned<with_statistics>(std::tuple{out.y}, out.mean, out.rstd);
}

template <bool with_statistics>
static auto rms_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                     std::optional<double> eps) {
  const Outputs out =
      norm_forward({"rms_norm", x, normalized_shape, weight, NONE, eps, false, with_statistics});
  return returned<with_statistics>(std::tuple{out.y}, out.rstd);
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, bool needs_grad_x,
    bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward({"layer_norm_backward", grad_out, x, normalized_shape, &mean, rstd, weight,
                     bias, needs_grad_x, needs_grad_weight, needs_grad_bias});
  return {g.x, g.weight, g.bias};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad_out, const Tensor &x,
                                                    const Shape &normalized_shape,
                                                    const Tensor &rstd, const Optional &weight,
                                                    bool needs_grad_x, bool needs_grad_weight) {
  const Gradients g = norm_backward({"rms_norm_backward", grad_out, x, normalized_shape, nullptr,
                                     rstd, weight, NONE, needs_grad_x, needs_grad_weight, false});
  return {g.x, g.weight};
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  def_with_no_grad(m,
                   "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                   "Tensor? bias=None, float eps=1e-05) -> (Tensor, Tensor, Tensor)",
                   "Tensor");
  def_with_no_grad(m,
                   "layer_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool needs_grad_x, "
                   "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
  def_with_no_grad(m,
                   "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                   "float? eps=None) -> (Tensor, Tensor)",
                   "Tensor");
  def_with_no_grad(m,
                   "rms_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor rstd, Tensor? weight, bool needs_grad_x, bool needs_grad_weight) -> "
                   "(Tensor, Tensor)");
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "layer_norm", TORCH_BOX(&layer_norm<true>), TORCH_BOX(&layer_norm<false>));
  impl_with_no_grad(m, "layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  impl_with_no_grad(m, "rms_norm", TORCH_BOX(&rms_norm<true>), TORCH_BOX(&rms_norm<false>));
  impl_with_no_grad(m, "rms_norm_backward", TORCH_BOX(&rms_norm_backward));
}

}  // namespace extension_cpp
