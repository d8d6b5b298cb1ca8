// The forward and the backward of all norms: checks, allocation, launch. norm.h has the kernels'
// contract.
#include <algorithm>

#include "norm/norm_shim.h"

namespace extension_cpp {

// ---- checks ----

// Fails unless weight (or bias) has normalized_shape, x's device, and x's dtype or float32.
static dtype_t check_weight(const char *op, const char *name, const Tensor &weight, const Tensor &x,
                            Sizes normalized_shape) {
  const dtype_t dtype = check_same_or_float32(op, name, weight, "x", x);
  if (!weight.sizes().equals(normalized_shape)) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(normalized_shape) +
                 ", normalized_shape, but got " + to_string(weight.sizes()));
  }
  return dtype;
}

// Checks the inputs of a call, and fills in the types and sizes of its arguments. x becomes a
// matrix whose columns are the normalized dimensions.
template <typename Args, typename Call>
static void check_inputs(Args &args, const Call &call) {
  const char *op = call.op;
  const Tensor &x = call.x;
  const Sizes normalized_shape = call.normalized_shape;
  args.dtype = args.weight_dtype = check_dtype(op, "x", x);
  const size_t dims = normalized_shape.size(), x_dims = static_cast<size_t>(x.dim());
  if (dims == 0) fail(op, "expected normalized_shape to have at least one dimension, but got []");
  const Sizes sizes = x.sizes();
  if (dims > x_dims || !sizes.slice(x_dims - dims).equals(normalized_shape)) {
    fail(op, "expected normalized_shape to be the last dimensions of x, of shape " +
                 to_string(sizes) + ", but got " + to_string(normalized_shape));
  }
  if (call.weight) {
    args.weight_dtype = check_weight(op, "weight", *call.weight, x, normalized_shape);
  }
  if (call.bias) {
    args.weight_dtype = check_weight(op, "bias", *call.bias, x, normalized_shape);
    if (call.weight) check_same(op, "bias", *call.bias, "weight", *call.weight);
  }
  args.rows = args.cols = 1;
  for (size_t d = 0; d < x_dims; ++d) (d < x_dims - dims ? args.rows : args.cols) *= sizes[d];
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
                             const Tensor &x, const norm_backward_args &args) {
  check_device(op, name, statistics, "x", x);
  if (statistics.scalar_type() != scalar_type(acc_dtype(args.dtype)) ||
      !statistics.is_contiguous() || statistics.numel() != args.rows) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

// ---- memory ----

static const void *pointer(const Optional &x) { return x ? x->const_data_ptr() : nullptr; }

// weight or bias as the kernels read it. On CUDA: the contiguous tensor, if there is one. On the
// CPU: the output of norm_widen_cpu, with `value` in every column if there is no tensor.
template <typename Args>
static Optional weight_for_kernel(const Optional &weight, double value, const Args &call,
                                  const Tensor &x) {
  Optional source;
  if (weight) source.emplace(as_contiguous(*weight));
  if (x.is_cuda()) return source;
  const int64_t padded = norm_wide_cols(call.cols);
  const Tensor wide = allocate({&padded, 1}, acc_dtype(call.dtype), x);
  norm_widen_args args{pointer(source), wide.mutable_data_ptr(), value, call.cols,
                       call.dtype,      call.weight_dtype};
  norm_widen_cpu(0, call.cols, &args);
  return wide;
}

// Allocates a tensor of these sizes if `needed`, else an empty one.
static Tensor allocate_if(bool needed, Sizes sizes, dtype_t dtype, const Tensor &like) {
  const int64_t none = 0;
  return allocate(needed ? sizes : Sizes{&none, 1}, dtype, like);
}

static Tensor allocate_statistics(const Forward &call, dtype_t dtype) {
  Shape shape(call.x.sizes().begin(), call.x.sizes().end());
  std::fill_n(shape.rbegin(), call.normalized_shape.size(), 1);
  return allocate({shape.data(), shape.size()}, acc_dtype(dtype), call.x);
}

static Rows rows_of(const Tensor &x, Sizes normalized_shape) {
  return as_rows(x, static_cast<int64_t>(normalized_shape.size()));
}

// ---- forward and backward ----

Outputs norm_forward(const Forward &call) {
  const Tensor &x = call.x;
  norm_forward_args args{};
  check_inputs(args, call);
  if (call.residual) check_like(call.op, "residual", *call.residual, "x", x);
  (call.residual ? args.dropout_x : args.dropout_y) = check_dropout(call.op, call.p, call.seed, x);

  Outputs out{allocate(x.sizes(), args.dtype, x), {}, {}, {}};
  if (call.residual) out.sum.emplace(allocate(x.sizes(), args.dtype, x));
  if (call.with_statistics) {
    if (call.centered) out.mean.emplace(allocate_statistics(call, args.dtype));
    out.rstd.emplace(allocate_statistics(call, args.dtype));
  }
  if (args.rows == 0) return out;

  const Rows x_rows = rows_of(x, call.normalized_shape);
  const Rows residual_rows =
      call.residual ? rows_of(*call.residual, call.normalized_shape) : x_rows;
  const Optional weight = weight_for_kernel(call.weight, 1, args, x);
  const Optional bias = call.centered ? weight_for_kernel(call.bias, 0, args, x) : std::nullopt;
  args.x = x_rows.tensor.const_data_ptr();
  args.weight = pointer(weight);
  args.bias = pointer(bias);
  args.y = out.y.mutable_data_ptr();
  args.mean = out.mean ? out.mean->mutable_data_ptr() : nullptr;
  args.rstd = out.rstd ? out.rstd->mutable_data_ptr() : nullptr;
  args.eps = call.eps.value_or(args.dtype == DTYPE_FLOAT64 ? 0x1p-52 : 0x1p-23);
  args.x_stride = x_rows.stride;
  args.centered = call.centered;
  if (call.residual) {
    args.residual = residual_rows.tensor.const_data_ptr();
    args.residual_stride = residual_rows.stride;
    args.sum = out.sum->mutable_data_ptr();
  }
  // The fewest rows per CPU thread: 128 KiB of traffic.
  const int64_t row_bytes = args.cols * x.element_size();
  const int64_t grain = ceil_div(128 << 10, std::max<int64_t>(2 * row_bytes, 1));
  launch(call.op, KERNEL(norm_forward), args, x, args.rows, grain);
  return out;
}

Gradients norm_backward(const Backward &call) {
  const char *op = call.op;
  const Tensor &x = call.x;
  const bool needs_sums = call.needs_weight || call.needs_bias;
  if (call.grad_sum) check_like(op, "grad_sum", *call.grad_sum, "sum", x);
  norm_backward_args args{};
  (call.adds_residual ? args.dropout_x : args.dropout_y) = check_dropout(op, call.p, call.seed, x);
  check_inputs(args, call);
  check_like(op, "grad_out", call.grad_out, "x", x);
  if (call.mean) check_statistics(op, "mean", *call.mean, x, args);
  check_statistics(op, "rstd", call.rstd, x, args);

  const Sizes shape = call.normalized_shape;
  const Gradients gradients{allocate_if(call.needs_x, x.sizes(), args.dtype, x),
                            allocate_if(call.needs_weight, shape, args.weight_dtype, x),
                            allocate_if(call.needs_bias, shape, args.weight_dtype, x),
                            allocate_if(call.needs_dropped, x.sizes(), args.dtype, x)};
  if (args.cols == 0 || !(needs_sums || call.needs_x) || (args.rows == 0 && !needs_sums))
    return gradients;

  const bool adds_grad_sum = call.grad_sum && call.needs_x;
  const Rows x_rows = rows_of(x, shape), grad_out_rows = rows_of(call.grad_out, shape);
  const Rows grad_sum_rows = adds_grad_sum ? rows_of(*call.grad_sum, shape) : x_rows;
  const Optional weight = weight_for_kernel(call.weight, 1, args, x);
  args.grad_out = grad_out_rows.tensor.const_data_ptr();
  args.x = x_rows.tensor.const_data_ptr();
  args.mean = call.mean ? call.mean->const_data_ptr() : nullptr;
  args.rstd = call.rstd.const_data_ptr();
  args.weight = pointer(weight);
  args.grad_x = call.needs_x ? gradients.x.mutable_data_ptr() : nullptr;
  args.grad_weight = call.needs_weight ? gradients.weight.mutable_data_ptr() : nullptr;
  args.grad_bias = call.needs_bias ? gradients.bias.mutable_data_ptr() : nullptr;
  args.x_stride = x_rows.stride;
  args.grad_out_stride = grad_out_rows.stride;
  args.grad_sum = adds_grad_sum ? grad_sum_rows.tensor.const_data_ptr() : nullptr;
  args.grad_sum_stride = adds_grad_sum ? grad_sum_rows.stride : 0;
  args.grad_dropped = call.needs_dropped ? gradients.dropped.mutable_data_ptr() : nullptr;
  const int64_t doubles = needs_sums ? ceil_div(ON_DEVICE_OF(x, norm_partial)(&args), 8) : 0;
  Optional partial;
  if (doubles > 0) {
    partial.emplace(allocate({&doubles, 1}, DTYPE_FLOAT64, x));
    args.partial = partial->mutable_data_ptr();
  }
  launch(op, KERNEL(norm_backward), args, x, norm_parts(args.rows, args.cols), 1);
  if (needs_sums && !x.is_cuda())
    parallel_for(ceil_div(args.cols, NORM_TILE), 1, norm_grad_weight_cpu, &args);
  return gradients;
}

}  // namespace extension_cpp
