// layer_norm, rms_norm and their variants with a fused residual and dropout: checks, allocation,
// schemas and registration. norm.h defines what the kernels compute.
#include "norm/norm.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

#include "common/shim/op.h"

namespace extension_cpp::norm {

using Shape = std::vector<int64_t>;
using Optional = std::optional<Tensor>;
static const Optional NONE;

// ---- checks ----

// Returns the dtype of weight (or bias). Fails unless weight has the shape normalized_shape, x's
// device, and x's dtype or float32.
static dtype_t check_weight(const char *op, const char *name, const Tensor &weight, const Tensor &x,
                            Sizes normalized_shape) {
  const dtype_t dtype = check_same_or_float32(op, name, weight, "x", x);
  if (!weight.sizes().equals(normalized_shape)) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(normalized_shape) +
                 ", normalized_shape, but got " + to_string(weight.sizes()));
  }
  return dtype;
}

// Checks the inputs of a call, and sets the types and sizes in `args`. x is treated as a matrix
// whose columns are the normalized dimensions.
template <typename Args>
static void check_inputs(Args &args, const char *op, const Tensor &x, Sizes normalized_shape,
                         const Optional &weight, const Optional &bias) {
  args.dtype = args.weight_dtype = check_dtype(op, "x", x);
  const size_t dims = normalized_shape.size(), x_dims = static_cast<size_t>(x.dim());
  if (dims == 0) fail(op, "expected normalized_shape to have at least one dimension, but got []");
  const Sizes sizes = x.sizes();
  if (dims > x_dims || !sizes.slice(x_dims - dims).equals(normalized_shape)) {
    fail(op, "expected normalized_shape to be the last dimensions of x, of shape " +
                 to_string(sizes) + ", but got " + to_string(normalized_shape));
  }
  if (weight) args.weight_dtype = check_weight(op, "weight", *weight, x, normalized_shape);
  if (bias) {
    const dtype_t dtype = check_weight(op, "bias", *bias, x, normalized_shape);
    if (weight && dtype != args.weight_dtype) check_same(op, "bias", *bias, "weight", *weight);
    args.weight_dtype = dtype;
  }
  args.rows = args.cols = 1;
  for (size_t d = 0; d < x_dims; ++d) (d < x_dims - dims ? args.rows : args.cols) *= sizes[d];
}

// Returns the dropout argument of a kernel. p = 0 means no dropout, with or without a seed.
static dropout_t check_dropout(const char *op, double p, const Optional &seed, const Tensor &x) {
  check_probability(op, p);
  if (seed) check_seed(op, *seed, x);
  if (p == 0) return {};
  if (!seed) fail(op, "expected a seed with p > 0, but got None");
  return dropout_of(p, static_cast<const int64_t *>(seed->const_data_ptr()));
}

static void check_statistics(const char *op, const char *name, const Tensor &statistics,
                             const Tensor &x, const norm_backward_args &args) {
  check_device(op, name, statistics, "x", x);
  if (statistics.scalar_type() != scalar_type(acc_dtype(args.dtype)) ||
      !statistics.is_contiguous() || statistics.numel() != args.rows) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

// ---- memory ----

// A weight or bias in the type and layout that the kernels read.
class Parameter {
 public:
  // On the CPU, `value` stands in for a tensor that is None.
  template <typename Args>
  Parameter(const Optional &weight, double value, const Args &args, const Tensor &x) {
    if (weight) tensor.emplace(as_contiguous(*weight));
    pointer = tensor ? tensor->const_data_ptr() : nullptr;
    if (x.is_cuda()) return;
    const auto doubles = static_cast<size_t>(norm_wide_cols(args.cols));
    void *to = on_stack.data();
    if (doubles > on_stack.size()) {
      on_heap.reset(std::aligned_alloc(64, static_cast<size_t>(ceil_div(8 * doubles, 64)) * 64));
      if (!on_heap) throw std::bad_alloc();
      to = on_heap.get();
    }
    norm_widen_args widen{pointer, to, value, args.cols, args.dtype, args.weight_dtype};
    norm_widen_cpu(0, args.cols, &widen);
    pointer = to;
  }

  Parameter(const Parameter &) = delete;  // data() points into this object

  [[nodiscard]] const void *data() const { return pointer; }

 private:
  Optional tensor;  // the contiguous tensor, if the caller gave one
  // On the CPU, the output of norm_widen_cpu. Up to 1024 columns it is on the stack, because beside
  // a small norm malloc would count. A tensor would take ten times as long as malloc.
  alignas(64) std::array<double, NORM_BLOCK * 33> on_stack;
  std::unique_ptr<void, decltype(&std::free)> on_heap{nullptr, &std::free};
  const void *pointer;
};

// Allocates a tensor of these sizes if it is needed, and a tensor without elements otherwise.
static Tensor allocate_if(bool needed, Sizes sizes, dtype_t dtype, const Tensor &like) {
  const int64_t none = 0;
  return allocate(needed ? sizes : Sizes{&none, 1}, dtype, like);
}

// ---- one forward and one backward function for all ops, with the arguments of add_layer_norm ----

struct Outputs {
  Tensor y;
  Optional sum;  // only in ops with a residual
  // The shape is x's, but with size 1 in the normalized dimensions, for broadcasting to x.
  Optional mean, rstd;
};

// Checks, allocates and launches forward. `bias` is nullptr in rms_norm, and `residual` is nullptr
// in ops without one. Dropout applies to x if there is a residual, and to y otherwise. eps defaults
// to the machine epsilon of the accumulation type.
static Outputs norm_forward(const char *op, bool with_statistics, const Tensor &x,
                            const Tensor *residual, Sizes normalized_shape, const Optional &weight,
                            const Optional *bias, std::optional<double> eps, double p,
                            const Optional &seed) {
  norm_forward_args args{};
  check_inputs(args, op, x, normalized_shape, weight, bias ? *bias : NONE);
  if (residual) check_like(op, "residual", *residual, "x", x);
  (residual ? args.dropout_x : args.dropout_y) = check_dropout(op, p, seed, x);

  Outputs out{allocate(x.sizes(), args.dtype, x), {}, {}, {}};
  if (residual) out.sum.emplace(allocate(x.sizes(), args.dtype, x));
  if (with_statistics) {
    Shape shape(x.sizes().begin(), x.sizes().end());
    std::fill_n(shape.rbegin(), normalized_shape.size(), 1);
    if (bias) out.mean.emplace(allocate(shape, acc_dtype(args.dtype), x));
    out.rstd.emplace(allocate(shape, acc_dtype(args.dtype), x));
  }
  if (args.rows == 0) return out;

  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const Rows x_rows = as_rows(x, dims),
             residual_rows = residual ? as_rows(*residual, dims) : x_rows;
  const Parameter kernel_weight(weight, 1, args, x);
  std::optional<Parameter> kernel_bias;
  if (bias) kernel_bias.emplace(*bias, 0, args, x);
  args.x = x_rows.tensor.const_data_ptr();
  args.weight = kernel_weight.data();
  args.bias = kernel_bias ? kernel_bias->data() : nullptr;
  args.y = out.y.mutable_data_ptr();
  args.mean = out.mean ? out.mean->mutable_data_ptr() : nullptr;
  args.rstd = out.rstd ? out.rstd->mutable_data_ptr() : nullptr;
  args.eps = eps.value_or(args.dtype == DTYPE_FLOAT64 ? 0x1p-52 : 0x1p-23);
  args.x_stride = x_rows.stride;
  args.centered = bias != nullptr;
  if (residual) {
    args.residual = residual_rows.tensor.const_data_ptr();
    args.residual_stride = residual_rows.stride;
    args.sum = out.sum->mutable_data_ptr();
  }
  // Each CPU thread gets rows with at least 128 KiB of memory traffic.
  const int64_t row_bytes = args.cols * x.element_size();
  const int64_t grain = ceil_div(128 << 10, std::max<int64_t>(2 * row_bytes, 1));
  launch(op, KERNEL(norm_forward), args, x, args.rows, grain);
  return out;
}

// The gradients that backward returns. A gradient that is not needed is a tensor without elements.
struct Gradients {
  Tensor x, weight;
  Optional bias;     // only in ops of layer_norm
  Optional dropped;  // gradient of x before its dropout; only in ops with a residual
};

// `x` is the tensor that was normalized, which is `sum` in ops with a residual. `grad_sum` is
// nullptr in ops without a residual, and `mean` is nullptr in rms_norm.
static Gradients norm_backward(const char *op, const Tensor &grad_out, const Optional *grad_sum,
                               const Tensor &x, Sizes normalized_shape, const Tensor *mean,
                               const Tensor &rstd, const Optional &weight, const Optional &bias,
                               double p, const Optional &seed, bool needs_x, bool needs_residual,
                               bool needs_weight, bool needs_bias) {
  norm_backward_args args{};
  if (grad_sum) check_memory(op, "sum", x);
  if (grad_sum && *grad_sum) check_like(op, "grad_sum", **grad_sum, "sum", x);
  (grad_sum ? args.dropout_x : args.dropout_y) = check_dropout(op, p, seed, x);
  check_inputs(args, op, x, normalized_shape, weight, bias);
  check_like(op, "grad_out", grad_out, "x", x);
  if (mean) check_statistics(op, "mean", *mean, x, args);
  check_statistics(op, "rstd", rstd, x, args);

  const bool needs_dropped = grad_sum && needs_x && p > 0, needs_sums = needs_weight || needs_bias;
  needs_x = needs_x || needs_residual;
  Gradients gradients{allocate_if(needs_x, x.sizes(), args.dtype, x),
                      allocate_if(needs_weight, normalized_shape, args.weight_dtype, x),
                      {},
                      {}};
  if (mean) gradients.bias = allocate_if(needs_bias, normalized_shape, args.weight_dtype, x);
  if (grad_sum) gradients.dropped = allocate_if(needs_dropped, x.sizes(), args.dtype, x);
  if (args.cols == 0 || !(needs_sums || needs_x) || (args.rows == 0 && !needs_sums))
    return gradients;

  const auto dims = static_cast<int64_t>(normalized_shape.size());
  const bool adds_grad_sum = grad_sum && *grad_sum && needs_x;
  const Rows x_rows = as_rows(x, dims), grad_out_rows = as_rows(grad_out, dims);
  const Rows grad_sum_rows = adds_grad_sum ? as_rows(**grad_sum, dims) : x_rows;
  const Parameter kernel_weight(weight, 1, args, x);
  args.grad_out = grad_out_rows.tensor.const_data_ptr();
  args.x = x_rows.tensor.const_data_ptr();
  args.mean = mean ? mean->const_data_ptr() : nullptr;
  args.rstd = rstd.const_data_ptr();
  args.weight = kernel_weight.data();
  args.grad_x = needs_x ? gradients.x.mutable_data_ptr() : nullptr;
  args.grad_weight = needs_weight ? gradients.weight.mutable_data_ptr() : nullptr;
  args.grad_bias = needs_bias ? gradients.bias->mutable_data_ptr() : nullptr;
  args.grad_dropped = needs_dropped ? gradients.dropped->mutable_data_ptr() : nullptr;
  args.x_stride = x_rows.stride;
  args.grad_out_stride = grad_out_rows.stride;
  if (adds_grad_sum) {
    args.grad_sum = grad_sum_rows.tensor.const_data_ptr();
    args.grad_sum_stride = grad_sum_rows.stride;
  }
  const int64_t doubles = needs_sums ? ceil_div(ON_DEVICE_OF(x, norm_partial)(&args), 8) : 0;
  Optional partial;
  if (doubles > 0) {
    partial.emplace(allocate({&doubles, 1}, DTYPE_FLOAT64, x));
    args.partial = partial->mutable_data_ptr();
  }
  // Without rows the gradients of weight and bias are 0. On the GPU this launch writes the zeros.
  // On the CPU norm_grad_weight_cpu writes them.
  if (args.rows > 0 || x.is_cuda())
    launch(op, KERNEL(norm_backward), args, x, norm_parts(args.rows, args.cols), 1);
  if (needs_sums && !x.is_cuda())
    parallel_for(ceil_div(args.cols, NORM_TILE), 1, norm_grad_weight_cpu, &args);
  return gradients;
}

// ---- the ops ----

// Returns the results of an op and its statistics. A no-grad overload returns only the results.
template <bool with_statistics, typename... Results, typename... Statistics>
static auto returned(const std::tuple<Results...> &results, const Statistics &...statistics) {
  if constexpr (with_statistics)
    return std::tuple_cat(results, std::tuple{*statistics...});
  else
    return results;
}

// with_statistics is true for the operator and false for its no-grad overload.
template <bool with_statistics>
static auto layer_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                       const Optional &bias, double eps) {
  const Outputs out = norm_forward("layer_norm", with_statistics, x, nullptr, normalized_shape,
                                   weight, &bias, eps, 0, NONE);
  return returned<with_statistics>(std::tuple{out.y}, out.mean, out.rstd);
}

template <bool with_statistics>
static auto rms_norm(const Tensor &x, const Shape &normalized_shape, const Optional &weight,
                     std::optional<double> eps) {
  const Outputs out = norm_forward("rms_norm", with_statistics, x, nullptr, normalized_shape,
                                   weight, nullptr, eps, 0, NONE);
  return returned<with_statistics>(std::tuple{out.y}, out.rstd);
}

template <bool with_statistics>
static auto add_layer_norm(const Tensor &x, const Tensor &residual, const Shape &normalized_shape,
                           const Optional &weight, const Optional &bias, double eps, double p,
                           const Optional &seed) {
  const Outputs out = norm_forward("add_layer_norm", with_statistics, x, &residual,
                                   normalized_shape, weight, &bias, eps, p, seed);
  return returned<with_statistics>(std::tuple{out.y, *out.sum}, out.mean, out.rstd);
}

template <bool with_statistics>
static auto add_rms_norm(const Tensor &x, const Tensor &residual, const Shape &normalized_shape,
                         const Optional &weight, std::optional<double> eps, double p,
                         const Optional &seed) {
  const Outputs out = norm_forward("add_rms_norm", with_statistics, x, &residual, normalized_shape,
                                   weight, nullptr, eps, p, seed);
  return returned<with_statistics>(std::tuple{out.y, *out.sum}, out.rstd);
}

template <bool with_statistics>
static auto layer_norm_dropout(const Tensor &x, const Shape &normalized_shape,
                               const Optional &weight, const Optional &bias, double eps, double p,
                               const Optional &seed) {
  const Outputs out = norm_forward("layer_norm_dropout", with_statistics, x, nullptr,
                                   normalized_shape, weight, &bias, eps, p, seed);
  return returned<with_statistics>(std::tuple{out.y}, out.mean, out.rstd);
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, bool needs_grad_x,
    bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g =
      norm_backward("layer_norm_backward", grad_out, nullptr, x, normalized_shape, &mean, rstd,
                    weight, bias, 0, NONE, needs_grad_x, false, needs_grad_weight, needs_grad_bias);
  return {g.x, g.weight, *g.bias};
}

static std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor &grad_out, const Tensor &x,
                                                    const Shape &normalized_shape,
                                                    const Tensor &rstd, const Optional &weight,
                                                    bool needs_grad_x, bool needs_grad_weight) {
  const Gradients g =
      norm_backward("rms_norm_backward", grad_out, nullptr, x, normalized_shape, nullptr, rstd,
                    weight, NONE, 0, NONE, needs_grad_x, false, needs_grad_weight, false);
  return {g.x, g.weight};
}

// add_layer_norm_backward and add_rms_norm_backward return the gradients of x and of residual.
// Without dropout the two gradients are equal. Then only that of residual is written, and that of x
// has no elements.

static std::tuple<Tensor, Tensor, Tensor, Tensor> add_layer_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &mean, const Tensor &rstd, const Optional &weight,
    const Optional &bias, double p, const Optional &seed, bool needs_grad_x,
    bool needs_grad_residual, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g = norm_backward(
      "add_layer_norm_backward", grad_out, &grad_sum, sum, normalized_shape, &mean, rstd, weight,
      bias, p, seed, needs_grad_x, needs_grad_residual, needs_grad_weight, needs_grad_bias);
  return {*g.dropped, g.x, g.weight, *g.bias};
}

static std::tuple<Tensor, Tensor, Tensor> add_rms_norm_backward(
    const Tensor &grad_out, const Optional &grad_sum, const Tensor &sum,
    const Shape &normalized_shape, const Tensor &rstd, const Optional &weight, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_residual, bool needs_grad_weight) {
  const Gradients g = norm_backward("add_rms_norm_backward", grad_out, &grad_sum, sum,
                                    normalized_shape, nullptr, rstd, weight, NONE, p, seed,
                                    needs_grad_x, needs_grad_residual, needs_grad_weight, false);
  return {*g.dropped, g.x, g.weight};
}

static std::tuple<Tensor, Tensor, Tensor> layer_norm_dropout_backward(
    const Tensor &grad_out, const Tensor &x, const Shape &normalized_shape, const Tensor &mean,
    const Tensor &rstd, const Optional &weight, const Optional &bias, double p,
    const Optional &seed, bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) {
  const Gradients g = norm_backward("layer_norm_dropout_backward", grad_out, nullptr, x,
                                    normalized_shape, &mean, rstd, weight, bias, p, seed,
                                    needs_grad_x, false, needs_grad_weight, needs_grad_bias);
  return {g.x, g.weight, *g.bias};
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_FEWER_RESULTS(m,
                         "layer_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                         "Tensor? bias=None, float eps=1e-05) -> (Tensor, Tensor, Tensor)",
                         &layer_norm<true>, "Tensor", &layer_norm<false>);
  DEF_WITH_NO_GRAD(m,
                   "layer_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool needs_grad_x, "
                   "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)",
                   &layer_norm_backward);
  DEF_WITH_FEWER_RESULTS(m,
                         "rms_norm(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, "
                         "float? eps=None) -> (Tensor, Tensor)",
                         &rms_norm<true>, "Tensor", &rms_norm<false>);
  DEF_WITH_NO_GRAD(m,
                   "rms_norm_backward(Tensor grad_out, Tensor x, SymInt[] normalized_shape, "
                   "Tensor rstd, Tensor? weight, bool needs_grad_x, bool needs_grad_weight) -> "
                   "(Tensor, Tensor)",
                   &rms_norm_backward);
  DEF_WITH_FEWER_RESULTS(m,
                         "add_layer_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, "
                         "Tensor? weight, Tensor? bias, float eps, float p, Tensor? seed) -> "
                         "(Tensor, Tensor, Tensor, Tensor)",
                         &add_layer_norm<true>, "(Tensor, Tensor)", &add_layer_norm<false>);
  DEF_WITH_NO_GRAD(m,
                   "add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, "
                   "SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
                   "Tensor? bias, float p, Tensor? seed, bool needs_grad_x, "
                   "bool needs_grad_residual, bool needs_grad_weight, bool needs_grad_bias) -> "
                   "(Tensor, Tensor, Tensor, Tensor)",
                   &add_layer_norm_backward);
  DEF_WITH_FEWER_RESULTS(
      m,
      "add_rms_norm(Tensor x, Tensor residual, SymInt[] normalized_shape, "
      "Tensor? weight, float? eps, float p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
      &add_rms_norm<true>, "(Tensor, Tensor)", &add_rms_norm<false>);
  DEF_WITH_NO_GRAD(m,
                   "add_rms_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, "
                   "SymInt[] normalized_shape, Tensor rstd, Tensor? weight, float p, Tensor? seed, "
                   "bool needs_grad_x, bool needs_grad_residual, bool needs_grad_weight) -> "
                   "(Tensor, Tensor, Tensor)",
                   &add_rms_norm_backward);
  DEF_WITH_FEWER_RESULTS(
      m,
      "layer_norm_dropout(Tensor x, SymInt[] normalized_shape, Tensor? weight, "
      "Tensor? bias, float eps, float p, Tensor? seed) -> (Tensor, Tensor, Tensor)",
      &layer_norm_dropout<true>, "Tensor", &layer_norm_dropout<false>);
  DEF_WITH_NO_GRAD(m,
                   "layer_norm_dropout_backward(Tensor grad_out, Tensor x, "
                   "SymInt[] normalized_shape, Tensor mean, Tensor rstd, Tensor? weight, "
                   "Tensor? bias, float p, Tensor? seed, bool needs_grad_x, "
                   "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)",
                   &layer_norm_dropout_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "layer_norm", TORCH_BOX(&layer_norm<true>), TORCH_BOX(&layer_norm<false>));
  impl_with_no_grad(m, "layer_norm_backward", TORCH_BOX(&layer_norm_backward));
  impl_with_no_grad(m, "rms_norm", TORCH_BOX(&rms_norm<true>), TORCH_BOX(&rms_norm<false>));
  impl_with_no_grad(m, "rms_norm_backward", TORCH_BOX(&rms_norm_backward));
  impl_with_no_grad(m, "add_layer_norm", TORCH_BOX(&add_layer_norm<true>),
                    TORCH_BOX(&add_layer_norm<false>));
  impl_with_no_grad(m, "add_layer_norm_backward", TORCH_BOX(&add_layer_norm_backward));
  impl_with_no_grad(m, "add_rms_norm", TORCH_BOX(&add_rms_norm<true>),
                    TORCH_BOX(&add_rms_norm<false>));
  impl_with_no_grad(m, "add_rms_norm_backward", TORCH_BOX(&add_rms_norm_backward));
  impl_with_no_grad(m, "layer_norm_dropout", TORCH_BOX(&layer_norm_dropout<true>),
                    TORCH_BOX(&layer_norm_dropout<false>));
  impl_with_no_grad(m, "layer_norm_dropout_backward", TORCH_BOX(&layer_norm_dropout_backward));
}

}  // namespace extension_cpp::norm
