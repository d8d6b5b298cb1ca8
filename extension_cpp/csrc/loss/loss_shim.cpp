// Checks, allocation and launches of the losses (loss_shim.h).
#include "loss/loss_shim.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <sstream>
#include <vector>

namespace extension_cpp::loss {

// ---- checks ----

std::string to_text(double x) {
  std::ostringstream text;
  text << x;
  return text.str();
}

static bool are_equal(Sizes a, Sizes b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// Returns the shape of logits without the dimension of the classes.
static std::vector<int64_t> rows_shape(const Tensor &logits, int64_t class_dim) {
  std::vector<int64_t> sizes(logits.sizes().begin(), logits.sizes().end());
  sizes.erase(sizes.begin() + class_dim);
  return sizes;
}

// Checks target's dtype and shape, and on the CPU also its values. On the GPU a check of the values
// would have to wait for the device, so the kernel returns NaN for a wrong target instead.
static void check_target(const char *op, const Tensor &target, const Tensor &logits,
                         int64_t class_dim, int64_t ignore_index) {
  check_device(op, "target", target, "logits", logits);
  if (target.scalar_type() != ScalarType::Long) {
    fail(op, "expected target to be int64, class indices, but got " + dtype_string(target));
  }
  const std::vector<int64_t> shape = rows_shape(logits, class_dim);
  const Sizes sizes = target.sizes();
  if (!are_equal(sizes, {shape.data(), shape.size()})) {
    fail(op, "expected target of shape " + to_string({shape.data(), shape.size()}) +
                 ", that of logits without the classes, but got " + to_string(sizes));
  }
  if (!target.is_cpu()) return;
  const Tensor dense = as_contiguous(target);
  const auto *const values = static_cast<const int64_t *>(dense.const_data_ptr());
  const int64_t classes = logits.size(class_dim);
  const bool can_ignore = ignore_index != INT64_MIN;  // token_log_probs ignores no target
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (values[i] >= 0 && values[i] < classes) continue;
    if (can_ignore && values[i] == ignore_index) continue;
    const std::string or_ignored = can_ignore ? " or ignore_index" : "";
    fail(op, "expected target in [0, " + std::to_string(classes - 1) + "]" + or_ignored +
                 ", but got " + std::to_string(values[i]));
  }
}

static void check_weight(const char *op, const Tensor &weight, const Tensor &logits,
                         int64_t classes) {
  check_same_or_float32(op, "weight", weight, "logits", logits);
  if (weight.dim() != 1 || weight.size(0) != classes) {
    fail(op, "expected weight of shape [" + std::to_string(classes) +
                 "], a number for each class, but got " + to_string(weight.sizes()));
  }
}

// Fails unless softcap and 1 / softcap are finite in the accumulation type. Otherwise z could be
// NaN.
static void check_softcap(const char *op, double softcap, dtype_t dtype) {
  const bool is_double = dtype == DTYPE_FLOAT64;
  const double least = is_double ? DBL_MIN : FLT_MIN, most = is_double ? DBL_MAX : FLT_MAX;
  if (!(softcap >= least && softcap <= most)) {
    fail(op, std::string("expected softcap to be None or a positive normal number of float") +
                 (is_double ? "64" : "32") + ", but got " + to_text(softcap));
  }
}

// Checks all inputs, and returns the dtype of logits.
static dtype_t check_inputs(const char *op, const Tensor &logits, const Tensor &target,
                            const Optional &weight, const LossOptions &options, int64_t class_dim) {
  const dtype_t dtype = check_dtype(op, "logits", logits);
  if (logits.dim() == 0) {
    fail(op, "expected logits to have at least one dimension, but got shape []");
  }
  const int64_t classes = logits.size(class_dim);
  if (classes == 0) {
    fail(op, "expected at least one class, but got logits of shape " + to_string(logits.sizes()));
  }
  check_target(op, target, logits, class_dim, options.ignore_index);
  if (weight) check_weight(op, *weight, logits, classes);
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1)) {
    fail(op, "expected label_smoothing to be between 0 and 1, but got " +
                 to_text(options.label_smoothing));
  }
  if (!std::isfinite(options.z_loss)) {
    fail(op, "expected z_loss to be finite, but got " + to_text(options.z_loss));
  }
  if (options.softcap) check_softcap(op, *options.softcap, dtype);
  return dtype;
}

void check_statistic(const char *op, const char *name, const Tensor &x, const Tensor &target,
                     Sizes shape, dtype_t dtype) {
  check_device(op, name, x, "logits", target);
  if (x.scalar_type() != scalar_type(dtype) || !x.is_contiguous() || !are_equal(x.sizes(), shape)) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

// Returns the shape of lse, which has two numbers for each row.
static std::vector<int64_t> lse_shape(const Tensor &target) {
  std::vector<int64_t> sizes(target.sizes().begin(), target.sizes().end());
  sizes.push_back(2);
  return sizes;
}

void check_lse(const char *op, const Tensor &lse, const Tensor &target, dtype_t dtype) {
  const std::vector<int64_t> shape = lse_shape(target);
  check_statistic(op, "lse", lse, target, {shape.data(), shape.size()}, acc_dtype(dtype));
}

dtype_t check_loss_grad(const char *op, const char *name, const Tensor &grad, const Tensor &logits,
                        Sizes shape) {
  const dtype_t dtype = check_same_or_float32(op, name, grad, "logits", logits);
  if (!are_equal(grad.sizes(), shape)) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(shape) +
                 ", that of the result, but got " + to_string(grad.sizes()));
  }
  return dtype;
}

// ---- memory ----

// Returns weight in the accumulation type.
static Optional widened(const Optional &weight, dtype_t dtype) {
  if (!weight) return std::nullopt;
  if (weight->scalar_type() == scalar_type(acc_dtype(dtype))) return as_contiguous(*weight);
  Tensor wide = allocate(weight->sizes(), acc_dtype(dtype), *weight);
  torch::stable::copy_(wide, *weight);
  return wide;
}

std::tuple<Tensor, Tensor> launch_reduce(const char *op, const Tensor &losses, const LossRows *rows,
                                         bool is_mean, dtype_t out_dtype) {
  const dtype_t acc = losses.scalar_type() == ScalarType::Double ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  const int64_t one = 1, partials = std::max<int64_t>(loss_partials(losses.numel()), 1);
  const Tensor out = allocate(Sizes{}, out_dtype, losses), total = allocate({&one, 1}, acc, losses),
               partial = allocate({&partials, 1}, DTYPE_FLOAT64, losses);
  loss_reduce_args args{};
  args.loss = losses.const_data_ptr();
  if (rows != nullptr) {
    args.target = rows->args.target;
    args.weight = rows->args.weight;
    args.cols = rows->args.cols;
    args.ignore_index = rows->args.options.ignore_index;
  }
  args.partial = partial.mutable_data_ptr();
  args.out = out.mutable_data_ptr();
  args.total = total.mutable_data_ptr();
  args.rows = losses.numel();
  args.dtype = acc;
  args.out_dtype = out_dtype;
  args.is_mean = is_mean;
  launch(op, KERNEL(loss_reduce), args, losses, 1, 1);
  return {out, total};
}

LossRows loss_rows_of(const char *op, const Tensor &logits, const Tensor &target,
                      const Optional &weight, const LossOptions &options, int64_t class_dim,
                      double scale) {
  const dtype_t dtype = check_inputs(op, logits, target, weight, options, class_dim);
  int64_t inner = 1;
  for (int64_t d = class_dim + 1; d < logits.dim(); ++d) inner *= logits.size(d);
  const int64_t cols = logits.size(class_dim);
  const Rows matrix = as_rows(logits, logits.dim() - class_dim);
  LossRows rows{matrix.tensor, as_contiguous(target), widened(weight, dtype), {}, {}};
  loss_rows &args = rows.args;
  args.logits = rows.logits.const_data_ptr();
  args.target = static_cast<const int64_t *>(rows.target.const_data_ptr());
  args.weight = rows.weight ? rows.weight->const_data_ptr() : nullptr;
  if (rows.weight && options.label_smoothing > 0) {
    const Tensor &all = *rows.weight;
    rows.weight_sum = std::get<0>(launch_reduce(op, all, nullptr, false, acc_dtype(dtype)));
    args.weight_sum = rows.weight_sum->const_data_ptr();
  }
  args.outer = inner == 0 ? 0 : logits.numel() / (cols * inner);
  args.cols = cols;
  args.inner = inner;
  args.outer_stride = matrix.stride;
  args.options = options.numbers();
  args.scale = scale;
  args.dtype = dtype;
  return rows;
}

// Returns the smallest number of work items per CPU thread. These items have only about 4096
// logits, because exp makes a logit expensive.
static int64_t grain(const loss_rows &rows) {
  return ceil_div(4096, rows.cols * std::min<int64_t>(rows.inner, LOSS_TILE));
}

RowResults launch_forward(const char *op, const LossRows &rows, bool with_entropy,
                          const Tensor *grad_logits, const Tensor *grad_scale) {
  const Sizes sizes = rows.target.sizes();
  const dtype_t acc = acc_dtype(rows.args.dtype);
  const std::vector<int64_t> lse = lse_shape(rows.target);
  RowResults results{
      allocate(sizes, acc, rows.target), allocate({lse.data(), lse.size()}, acc, rows.target), {}};
  loss_forward_args args{};
  args.rows = rows.args;
  args.loss = results.loss.mutable_data_ptr();
  args.lse = results.lse.mutable_data_ptr();
  if (with_entropy) {
    results.entropy.emplace(allocate(sizes, acc, rows.target));
    args.entropy = results.entropy->mutable_data_ptr();
  }
  if (grad_logits != nullptr) {
    args.grad_logits = grad_logits->mutable_data_ptr();
    args.grad_scale = grad_scale->const_data_ptr();
  }
  if (rows.args.outer > 0) {
    launch(op, KERNEL(loss_forward), args, rows.logits,
           loss_items(rows.args.outer, rows.args.inner), grain(rows.args));
  }
  return results;
}

Tensor launch_backward(const char *op, loss_backward_args &args, const Tensor &logits) {
  const Tensor grad_logits = allocate(logits.sizes(), args.rows.dtype, logits);
  args.grad_logits = grad_logits.mutable_data_ptr();
  if (args.rows.outer > 0) {
    launch(op, KERNEL(loss_backward), args, logits, loss_items(args.rows.outer, args.rows.inner),
           grain(args.rows));
  }
  return grad_logits;
}

}  // namespace extension_cpp::loss
