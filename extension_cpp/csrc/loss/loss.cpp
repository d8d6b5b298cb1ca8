// cross_entropy and token_log_probs: schemas, checks, allocation, launches and registration. loss.h
// has the kernels' contract.
#include "loss/loss.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <tuple>
#include <vector>

#include "common/op.h"

namespace extension_cpp {

using Optional = std::optional<Tensor>;

// As in ATen. A number, since PyTorch's conversion of a string argument leaks (2.11).
enum Reduction : int64_t { NONE, MEAN, SUM };

// ---- checks ----

// The accumulation type: of lse, and of the losses inside.
static dtype_t acc_dtype(dtype_t dtype) {
  return dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
}

static std::string to_text(double x) {
  std::ostringstream text;
  text << x;
  return text.str();
}

// The shape of logits without the dimension of the classes.
static std::vector<int64_t> rows_shape(const Tensor &logits, int64_t class_dim) {
  std::vector<int64_t> sizes(logits.sizes().begin(), logits.sizes().end());
  sizes.erase(sizes.begin() + class_dim);
  return sizes;
}

// On the CPU also each value: the kernel would give NaN, as on the GPU, where a check would have to
// wait for the device.
static void check_target(const char *op, const Tensor &target, const Tensor &logits,
                         int64_t class_dim, int64_t ignore_index) {
  check_device(op, "target", target, "logits", logits);
  if (target.scalar_type() != ScalarType::Long) {
    fail(op, "expected target to be int64, class indices, but got " + dtype_string(target));
  }
  const std::vector<int64_t> shape = rows_shape(logits, class_dim);
  const Sizes sizes = target.sizes();
  if (sizes.size() != shape.size() || !std::equal(sizes.begin(), sizes.end(), shape.begin())) {
    fail(op, "expected target of shape " + to_string({shape.data(), shape.size()}) +
                 ", that of logits without the classes, but got " + to_string(sizes));
  }
  if (!target.is_cpu()) return;
  const Tensor dense = as_contiguous(target);
  const auto *const values = static_cast<const int64_t *>(dense.const_data_ptr());
  const int64_t classes = logits.size(class_dim);
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if ((values[i] >= 0 && values[i] < classes) || values[i] == ignore_index) continue;
    const std::string or_ignored = ignore_index == INT64_MIN ? "" : " or ignore_index";
    fail(op, "expected target in [0, " + std::to_string(classes - 1) + "]" + or_ignored +
                 ", but got " + std::to_string(values[i]));
  }
}

static void check_weight(const char *op, const Tensor &weight, const Tensor &logits,
                         int64_t classes) {
  check_device(op, "weight", weight, "logits", logits);
  if (weight.scalar_type() != logits.scalar_type() &&
      (weight.scalar_type() != ScalarType::Float || logits.scalar_type() == ScalarType::Double)) {
    const std::string or_float32 = logits.element_size() < 4 ? " or float32" : "";
    fail(op, "expected weight to be " + dtype_string(logits) + " like logits" + or_float32 +
                 ", but got " + dtype_string(weight));
  }
  if (weight.dim() != 1 || weight.size(0) != classes) {
    fail(op, "expected weight of shape [" + std::to_string(classes) +
                 "], a number for each class, but got " + to_string(weight.sizes()));
  }
}

static void check_reduction(const char *op, int64_t reduction) {
  if (reduction < NONE || reduction > SUM) {
    fail(op, "expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got " +
                 std::to_string(reduction));
  }
}

struct Options {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::optional<double> softcap;
};

static dtype_t check_inputs(const char *op, const Tensor &logits, const Tensor &target,
                            const Optional &weight, const Options &options, int64_t class_dim) {
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
  if (options.softcap && !(*options.softcap > 0 && std::isfinite(*options.softcap))) {
    fail(op, "expected softcap to be positive or None, but got " + to_text(*options.softcap));
  }
  return dtype;
}

// The classes of (C,) are dimension 0, those of (N, C, ...) dimension 1.
static int64_t class_dim_of(const Tensor &logits) { return logits.dim() == 1 ? 0 : 1; }

// ---- memory ----

// The tensors that a kernel reads; they live as long as its arguments.
struct LossRows {
  Tensor logits, target;
  Optional weight, weight_sum;
  loss_rows args;
};

// weight in the accumulation type.
static Optional widened(const Optional &weight, dtype_t dtype) {
  if (!weight) return std::nullopt;
  if (weight->scalar_type() == scalar_type(acc_dtype(dtype))) return as_contiguous(*weight);
  Tensor wide = allocate(weight->sizes(), acc_dtype(dtype), *weight);
  torch::stable::copy_(wide, *weight);
  return wide;
}

// The sum of `count` numbers of the accumulation type, or of the losses of rows: loss_reduce_args.
static void sum(const char *op, loss_reduce_args &args, const Tensor &like) {
  const int64_t partials = std::max<int64_t>(loss_partials(args.rows), 1);
  const Tensor partial = allocate({&partials, 1}, DTYPE_FLOAT64, like);
  args.partial = partial.mutable_data_ptr();
  launch(op, KERNEL(loss_reduce), args, like, 1, 1);
}

static Tensor sum_of(const char *op, const Tensor &weight, dtype_t dtype) {
  const int64_t one = 1;
  const Tensor total = allocate({&one, 1}, dtype, weight),
               count = allocate({&one, 1}, dtype, weight);
  loss_reduce_args args{};
  args.loss = weight.const_data_ptr();
  args.out = total.mutable_data_ptr();
  args.total = count.mutable_data_ptr();
  args.rows = weight.numel();
  args.dtype = args.out_dtype = dtype;
  sum(op, args, weight);
  return total;
}

static LossRows rows_of(const char *op, const Tensor &logits, const Tensor &target,
                        const Optional &weight, const Options &options, int64_t class_dim,
                        double scale, dtype_t dtype) {
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
    rows.weight_sum = sum_of(op, *rows.weight, acc_dtype(dtype));
    args.weight_sum = rows.weight_sum->const_data_ptr();
  }
  args.outer = inner == 0 ? 0 : logits.numel() / (cols * inner);
  args.cols = cols;
  args.inner = inner;
  args.outer_stride = matrix.stride;
  args.ignore_index = options.ignore_index;
  args.label_smoothing = options.label_smoothing;
  args.z_loss = options.z_loss;
  args.softcap = options.softcap.value_or(0);
  args.scale = scale;
  args.dtype = dtype;
  return rows;
}

// On the CPU a thread gets at least this many items: 16 KiB of traffic, since exp takes most of the
// time.
static int64_t grain(const loss_rows &rows) {
  return ceil_div(4096, rows.cols * std::min<int64_t>(rows.inner, LOSS_TILE));
}

static Tensor allocate_rows(const Tensor &target, dtype_t dtype) {
  return allocate(target.sizes(), dtype, target);
}

static void launch_forward(const char *op, loss_forward_args &args, const Tensor &logits) {
  if (args.rows.outer == 0) return;
  launch(op, KERNEL(loss_forward), args, logits, loss_items(args.rows.outer, args.rows.inner),
         grain(args.rows));
}

// ---- cross_entropy ----

struct Loss {
  Tensor loss, lse, total;
};

static Loss reduce(const char *op, const LossRows &rows, const Tensor &losses, const Tensor &lse,
                   bool is_mean, dtype_t out_dtype) {
  const int64_t one = 1;
  const dtype_t dtype = rows.args.dtype;
  const Loss result{allocate(Sizes{}, out_dtype, losses), lse,
                    allocate({&one, 1}, acc_dtype(dtype), lse)};
  loss_reduce_args args{};
  args.loss = losses.const_data_ptr();
  args.target = rows.args.target;
  args.weight = rows.args.weight;
  args.out = result.loss.mutable_data_ptr();
  args.total = result.total.mutable_data_ptr();
  args.rows = rows.args.outer * rows.args.inner;
  args.cols = rows.args.cols;
  args.ignore_index = rows.args.ignore_index;
  args.dtype = dtype;
  args.out_dtype = out_dtype;
  args.is_mean = is_mean;
  sum(op, args, losses);
  return result;
}

static Loss cross_entropy_forward(const Tensor &logits, const Tensor &target,
                                  const Optional &weight, const Options &options, int64_t reduction,
                                  bool float_loss) {
  const char *const op = "cross_entropy";
  check_reduction(op, reduction);
  const dtype_t dtype = check_inputs(op, logits, target, weight, options, class_dim_of(logits));
  const LossRows rows =
      rows_of(op, logits, target, weight, options, class_dim_of(logits), 1, dtype);
  const dtype_t acc = acc_dtype(dtype), out_dtype = float_loss ? acc : dtype;
  const Tensor losses = allocate_rows(target, acc), lse = allocate_rows(target, DTYPE_FLOAT64);
  loss_forward_args args{};
  args.rows = rows.args;
  args.loss = losses.mutable_data_ptr();
  args.lse = static_cast<double *>(lse.mutable_data_ptr());
  launch_forward(op, args, logits);
  if (reduction != NONE) return reduce(op, rows, losses, lse, reduction == MEAN, out_dtype);
  const int64_t none = 0;
  const Tensor total = allocate({&none, 1}, acc, losses);  // none
  if (out_dtype == acc) return {losses, lse, total};
  Tensor rounded = allocate_rows(target, out_dtype);
  torch::stable::copy_(rounded, losses);
  return {rounded, lse, total};
}

static std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor &logits, const Tensor &target,
                                                        const Optional &weight,
                                                        int64_t ignore_index, int64_t reduction,
                                                        double label_smoothing, double z_loss,
                                                        std::optional<double> softcap,
                                                        bool float_loss) {
  const Loss result = cross_entropy_forward(logits, target, weight,
                                            {ignore_index, label_smoothing, z_loss, softcap},
                                            reduction, float_loss);
  return {result.loss, result.lse, result.total};
}

static Tensor cross_entropy_no_grad(const Tensor &logits, const Tensor &target,
                                    const Optional &weight, int64_t ignore_index, int64_t reduction,
                                    double label_smoothing, double z_loss,
                                    std::optional<double> softcap, bool float_loss) {
  return cross_entropy_forward(logits, target, weight,
                               {ignore_index, label_smoothing, z_loss, softcap}, reduction,
                               float_loss)
      .loss;
}

// Fails unless x is what forward returned: the rows' shape, this type, contiguous.
static void check_statistic(const char *op, const char *name, const Tensor &x, const Tensor &target,
                            dtype_t dtype) {
  check_device(op, name, x, "logits", target);
  if (x.scalar_type() != scalar_type(dtype) || !x.is_contiguous() ||
      to_string(x.sizes()) != to_string(target.sizes())) {
    fail(op, "expected " + std::string(name) + " as the forward returned it");
  }
}

// Fails unless grad has the device of logits, its dtype or the accumulation type, and this shape.
static dtype_t check_grad(const char *op, const char *name, const Tensor &grad,
                          const Tensor &logits, Sizes shape) {
  check_device(op, name, grad, "logits", logits);
  const dtype_t dtype = check_dtype(op, "logits", logits), acc = acc_dtype(dtype);
  const bool is_acc = grad.scalar_type() == scalar_type(acc);
  if (!is_acc && grad.scalar_type() != logits.scalar_type()) {
    const std::string or_float32 = acc != dtype ? " or float32" : "";
    fail(op, "expected " + std::string(name) + " to be " + dtype_string(logits) + " like logits" +
                 or_float32 + ", but got " + dtype_string(grad));
  }
  if (to_string(grad.sizes()) != to_string(shape)) {
    fail(op, "expected " + std::string(name) + " of shape " + to_string(shape) +
                 ", that of the result, but got " + to_string(grad.sizes()));
  }
  return is_acc ? acc : dtype;
}

static Tensor launch_backward(const char *op, loss_backward_args &args, const Tensor &logits) {
  const Tensor grad_logits = allocate(logits.sizes(), args.rows.dtype, logits);
  args.grad_logits = grad_logits.mutable_data_ptr();
  if (args.rows.outer > 0) {
    launch(op, KERNEL(loss_backward), args, logits, loss_items(args.rows.outer, args.rows.inner),
           grain(args.rows));
  }
  return grad_logits;
}

static Tensor cross_entropy_backward(const Tensor &grad_out, const Tensor &logits,
                                     const Tensor &target, const Tensor &lse, const Tensor &total,
                                     const Optional &weight, int64_t ignore_index,
                                     int64_t reduction, double label_smoothing, double z_loss,
                                     std::optional<double> softcap) {
  const char *const op = "cross_entropy_backward";
  check_reduction(op, reduction);
  const Options options{ignore_index, label_smoothing, z_loss, softcap};
  const dtype_t dtype = check_inputs(op, logits, target, weight, options, class_dim_of(logits));
  const Sizes scalar{};
  loss_backward_args args{};
  args.grad_dtype =
      check_grad(op, "grad_out", grad_out, logits, reduction == NONE ? target.sizes() : scalar);
  check_statistic(op, "lse", lse, target, DTYPE_FLOAT64);
  check_device(op, "total", total, "logits", logits);
  if (total.scalar_type() != scalar_type(acc_dtype(dtype)) || !total.is_contiguous() ||
      total.dim() != 1 || total.numel() != (reduction != NONE)) {
    fail(op, "expected total as the forward returned it");
  }
  const LossRows rows =
      rows_of(op, logits, target, weight, options, class_dim_of(logits), 1, dtype);
  const Tensor grads = as_contiguous(grad_out);
  args.rows = rows.args;
  args.lse = static_cast<const double *>(lse.const_data_ptr());
  args.grad_loss = grads.const_data_ptr();
  args.grad_stride = reduction == NONE;
  args.total = reduction == MEAN ? total.const_data_ptr() : nullptr;
  return launch_backward(op, args, logits);
}

// One chunk of linear_cross_entropy: logits becomes scale * the gradients of the rows' losses.
static Tensor cross_entropy_chunk(const Tensor &logits, const Tensor &target,
                                  const Optional &weight, int64_t ignore_index,
                                  double label_smoothing, double z_loss,
                                  std::optional<double> softcap, const Tensor &scale) {
  const char *const op = "cross_entropy_chunk";
  const Options options{ignore_index, label_smoothing, z_loss, softcap};
  const dtype_t dtype = check_inputs(op, logits, target, weight, options, class_dim_of(logits));
  check_device(op, "scale", scale, "logits", logits);
  if (!logits.is_contiguous() || logits.dim() != 2) {
    fail(op,
         "expected logits to be a contiguous matrix, but got shape " + to_string(logits.sizes()));
  }
  if (scale.scalar_type() != scalar_type(acc_dtype(dtype)) || scale.numel() != 1) {
    fail(op, "expected scale to be one number of type " +
                 std::string(dtype == DTYPE_FLOAT64 ? "float64" : "float32"));
  }
  const LossRows rows = rows_of(op, logits, target, weight, options, 1, 1, dtype);
  const Tensor losses = allocate_rows(target, acc_dtype(dtype)),
               lse = allocate_rows(target, DTYPE_FLOAT64);
  loss_forward_args args{};
  args.rows = rows.args;
  args.loss = losses.mutable_data_ptr();
  args.lse = static_cast<double *>(lse.mutable_data_ptr());
  args.grad_logits = logits.mutable_data_ptr();
  args.grad_scale = scale.const_data_ptr();
  launch_forward(op, args, logits);
  return losses;
}

// ---- token_log_probs ----

// No target is ignored.
static Options token_options() { return {INT64_MIN, 0, 0, std::nullopt}; }

static dtype_t check_tokens(const char *op, const Tensor &logits, const Tensor &target,
                            double temperature) {
  const dtype_t dtype = check_inputs(op, logits, target, std::nullopt, token_options(),
                                     std::max<int64_t>(logits.dim() - 1, 0));
  if (!(temperature > 0)) {
    fail(op, "expected temperature to be positive, but got " + to_text(temperature));
  }
  return dtype;
}

static std::tuple<Tensor, Tensor, Tensor> token_log_probs(const Tensor &logits,
                                                          const Tensor &target,
                                                          double temperature) {
  const char *const op = "token_log_probs";
  const dtype_t dtype = check_tokens(op, logits, target, temperature), acc = acc_dtype(dtype);
  const LossRows rows = rows_of(op, logits, target, std::nullopt, token_options(), logits.dim() - 1,
                                1 / temperature, dtype);
  const Tensor log_probs = allocate_rows(target, acc), entropy = allocate_rows(target, acc),
               lse = allocate_rows(target, DTYPE_FLOAT64);
  loss_forward_args args{};
  args.rows = rows.args;
  args.loss = log_probs.mutable_data_ptr();
  args.entropy = entropy.mutable_data_ptr();
  args.lse = static_cast<double *>(lse.mutable_data_ptr());
  launch_forward(op, args, logits);
  return {log_probs, entropy, lse};
}

static std::tuple<Tensor, Tensor> token_log_probs_no_grad(const Tensor &logits,
                                                          const Tensor &target,
                                                          double temperature) {
  const auto [log_probs, entropy, lse] = token_log_probs(logits, target, temperature);
  return {log_probs, entropy};
}

static Tensor token_log_probs_backward(const Tensor &grad_log_probs, const Tensor &grad_entropy,
                                       const Tensor &logits, const Tensor &target,
                                       const Tensor &lse, const Tensor &entropy,
                                       double temperature) {
  const char *const op = "token_log_probs_backward";
  const dtype_t dtype = check_tokens(op, logits, target, temperature);
  loss_backward_args args{};
  args.grad_dtype = check_grad(op, "grad_log_probs", grad_log_probs, logits, target.sizes());
  check_grad(op, "grad_entropy", grad_entropy, logits, target.sizes());
  check_same(op, "grad_entropy", grad_entropy, "grad_log_probs", grad_log_probs);
  check_statistic(op, "lse", lse, target, DTYPE_FLOAT64);
  check_statistic(op, "entropy", entropy, target, acc_dtype(dtype));
  const LossRows rows = rows_of(op, logits, target, std::nullopt, token_options(), logits.dim() - 1,
                                1 / temperature, dtype);
  const Tensor of_log_probs = as_contiguous(grad_log_probs),
               of_entropy = as_contiguous(grad_entropy);
  args.rows = rows.args;
  args.lse = static_cast<const double *>(lse.const_data_ptr());
  args.grad_loss = of_log_probs.const_data_ptr();
  args.grad_stride = 1;
  args.entropy = entropy.const_data_ptr();
  args.grad_entropy = of_entropy.const_data_ptr();
  return launch_backward(op, args, logits);
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  def_with_twin(m,
                "cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, "
                "int ignore_index=-100, int reduction=1, float label_smoothing=0.0, "
                "float z_loss=0.0, float? softcap=None, bool float_loss=False) -> "
                "(Tensor, Tensor, Tensor)",
                "Tensor");
  def_with_twin(m,
                "cross_entropy_backward(Tensor grad_out, Tensor logits, Tensor target, "
                "Tensor lse, Tensor total, Tensor? weight, int ignore_index, int reduction, "
                "float label_smoothing, float z_loss, float? softcap) -> Tensor");
  m.def(
      "cross_entropy_chunk(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, "
      "float label_smoothing, float z_loss, float? softcap, Tensor scale) -> Tensor");
  // Its kernels are in linear_loss.py: matrix products are PyTorch's.
  def_with_twin(m,
                "linear_cross_entropy(Tensor x, Tensor linear_weight, Tensor target, "
                "Tensor? linear_bias, Tensor? weight, int reduction, int ignore_index, "
                "float label_smoothing, float z_loss, float? softcap, bool float_loss, "
                "bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) -> "
                "(Tensor, Tensor, Tensor, Tensor)",
                "Tensor");
  def_with_twin(m,
                "linear_cross_entropy_backward(Tensor grad_out, Tensor x, Tensor linear_weight, "
                "Tensor target, Tensor? linear_bias, Tensor? weight, Tensor grad_x, "
                "Tensor grad_weight, Tensor grad_bias, int reduction, int ignore_index, "
                "float label_smoothing, float z_loss, float? softcap, bool needs_grad_x, "
                "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
  def_with_twin(m,
                "token_log_probs(Tensor logits, Tensor target, float temperature=1.0) -> "
                "(Tensor, Tensor, Tensor)",
                "(Tensor, Tensor)");
  def_with_twin(m,
                "token_log_probs_backward(Tensor grad_log_probs, Tensor grad_entropy, "
                "Tensor logits, Tensor target, Tensor lse, Tensor entropy, float temperature) -> "
                "Tensor");
}

static void register_kernels(StableLibrary &m) {
  impl_with_twin(m, "cross_entropy", TORCH_BOX(&cross_entropy), TORCH_BOX(&cross_entropy_no_grad));
  impl_with_twin(m, "cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_chunk", TORCH_BOX(&cross_entropy_chunk));
  impl_with_twin(m, "token_log_probs", TORCH_BOX(&token_log_probs),
                 TORCH_BOX(&token_log_probs_no_grad));
  impl_with_twin(m, "token_log_probs_backward", TORCH_BOX(&token_log_probs_backward));
}

STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CPU, m) { register_kernels(m); }

#ifdef WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(extension_cpp, CUDA, m) { register_kernels(m); }
#endif

}  // namespace extension_cpp
