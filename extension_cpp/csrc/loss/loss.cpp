// cross_entropy: schema, checks, launches and registration. Also the schema of
// linear_cross_entropy. loss.h defines what the kernels compute.
#include "loss/loss_shim.h"

namespace extension_cpp::loss {

// The values are those of ATen's enum. The op takes a number and not PyTorch's string, because
// PyTorch 2.11 leaks memory for string arguments.
enum Reduction : int64_t { NONE, MEAN, SUM };

static void check_reduction(const char *op, int64_t reduction) {
  if (reduction < NONE || reduction > SUM) {
    fail(op, "expected reduction to be 0 (none), 1 (mean) or 2 (sum), but got " +
                 std::to_string(reduction));
  }
}

// Returns the dimension of the classes: 0 for logits (C,), and 1 for logits (N, C, ...).
static int64_t class_dim_of(const Tensor &logits) { return logits.dim() == 1 ? 0 : 1; }

static std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor &logits, const Tensor &target,
                                                        const Optional &weight,
                                                        int64_t ignore_index, int64_t reduction,
                                                        double label_smoothing, double z_loss,
                                                        std::optional<double> softcap,
                                                        bool float_loss) {
  const char *const op = "cross_entropy";
  check_reduction(op, reduction);
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const LossRows rows = loss_rows_of(op, logits, target, weight, options, class_dim_of(logits));
  const dtype_t acc = acc_dtype(rows.args.dtype), out_dtype = float_loss ? acc : rows.args.dtype;
  const RowResults results = launch_forward(op, rows, false);
  if (reduction != NONE) {
    const auto [loss, total] = launch_reduce(op, results.loss, &rows, reduction == MEAN, out_dtype);
    return {loss, results.lse, total};
  }
  const int64_t zero = 0;
  const Tensor no_total = allocate({&zero, 1}, acc, logits);
  if (out_dtype == acc) return {results.loss, results.lse, no_total};
  Tensor rounded = allocate(target.sizes(), out_dtype, logits);
  torch::stable::copy_(rounded, results.loss);
  return {rounded, results.lse, no_total};
}

// FirstResult<&f>::call(...) calls f and returns only its first result, the loss. This is the
// function of the no-grad overload.
template <auto function>
struct FirstResult;
template <typename... Args, std::tuple<Tensor, Tensor, Tensor> (*function)(Args...)>
struct FirstResult<function> {
  static Tensor call(Args... args) { return std::get<0>(function(args...)); }
};
using CrossEntropyNoGrad = FirstResult<&cross_entropy>;

static Tensor cross_entropy_backward(const Tensor &grad_out, const Tensor &logits,
                                     const Tensor &target, const Tensor &lse, const Tensor &total,
                                     const Optional &weight, int64_t ignore_index,
                                     int64_t reduction, double label_smoothing, double z_loss,
                                     std::optional<double> softcap) {
  const char *const op = "cross_entropy_backward";
  check_reduction(op, reduction);
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const LossRows rows = loss_rows_of(op, logits, target, weight, options, class_dim_of(logits));
  const dtype_t dtype = rows.args.dtype;
  const Sizes scalar{};
  loss_backward_args args{};
  args.rows = rows.args;
  args.grad_dtype = check_loss_grad(op, "grad_out", grad_out, logits,
                                    reduction == NONE ? target.sizes() : scalar);
  check_lse(op, lse, target, dtype);
  check_device(op, "total", total, "logits", logits);
  if (total.scalar_type() != scalar_type(acc_dtype(dtype)) || !total.is_contiguous() ||
      total.dim() != 1 || total.numel() != (reduction != NONE)) {
    fail(op, "expected total as the forward returned it");
  }
  const Tensor grads = as_contiguous(grad_out);
  args.lse = lse.const_data_ptr();
  args.grad_loss = grads.const_data_ptr();
  args.grad_stride = reduction == NONE;
  args.total = reduction == MEAN ? total.const_data_ptr() : nullptr;
  return launch_backward(op, args, logits);
}

// Fails unless x is one number of the accumulation type of `dtype`.
static void check_scalar(const char *op, const char *name, const Tensor &x, dtype_t dtype) {
  if (x.scalar_type() != scalar_type(acc_dtype(dtype)) || x.numel() != 1) {
    fail(op, std::string("expected ") + name + " to be one number of type " +
                 (dtype == DTYPE_FLOAT64 ? "float64" : "float32"));
  }
}

// Processes one chunk of rows for linear_cross_entropy. Returns the losses, and overwrites logits
// by scale times their gradient.
static Tensor cross_entropy_chunk(const Tensor &logits, const Tensor &target,
                                  const Optional &weight, int64_t ignore_index,
                                  double label_smoothing, double z_loss,
                                  std::optional<double> softcap, const Tensor &scale) {
  const char *const op = "cross_entropy_chunk";
  const LossOptions options{ignore_index, label_smoothing, z_loss, softcap};
  const LossRows rows = loss_rows_of(op, logits, target, weight, options, class_dim_of(logits));
  check_device(op, "scale", scale, "logits", logits);
  if (!logits.is_contiguous() || logits.dim() != 2) {
    fail(op,
         "expected logits to be a contiguous matrix, but got shape " + to_string(logits.sizes()));
  }
  check_scalar(op, "scale", scale, rows.args.dtype);
  return launch_forward(op, rows, false, &logits, &scale).loss;
}

// Returns x * factor in x's dtype.
static Tensor cross_entropy_scale(const Tensor &x, const Tensor &factor) {
  const char *const op = "cross_entropy_scale";
  const dtype_t dtype = check_dtype(op, "x", x);
  check_device(op, "factor", factor, "x", x);
  check_scalar(op, "factor", factor, dtype);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  const Tensor x_dense = with_strides_of(x, y);
  loss_scale_args args{x_dense.const_data_ptr(), factor.const_data_ptr(), y.mutable_data_ptr(),
                       x.numel(), dtype};
  launch_flat(op, KERNEL(loss_scale), args, x, 2 * x.element_size());
  return y;
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_FEWER_RESULTS(m,
                         "cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, "
                         "int ignore_index=-100, int reduction=1, float label_smoothing=0.0, "
                         "float z_loss=0.0, float? softcap=None, bool float_loss=False) -> "
                         "(Tensor, Tensor, Tensor)",
                         &cross_entropy, "Tensor", &CrossEntropyNoGrad::call);
  DEF_WITH_NO_GRAD(m,
                   "cross_entropy_backward(Tensor grad_out, Tensor logits, Tensor target, "
                   "Tensor lse, Tensor total, Tensor? weight, int ignore_index, int reduction, "
                   "float label_smoothing, float z_loss, float? softcap) -> Tensor",
                   &cross_entropy_backward);
  DEF(m,
      "cross_entropy_chunk(Tensor(a!) logits, Tensor target, Tensor? weight, int ignore_index, "
      "float label_smoothing, float z_loss, float? softcap, Tensor scale) -> Tensor",
      &cross_entropy_chunk);
  DEF(m, "cross_entropy_scale(Tensor x, Tensor factor) -> Tensor", &cross_entropy_scale);
  // linear_loss.py implements the next two ops, because they call PyTorch's matrix products.
  def_in_python(m,
                "linear_cross_entropy(Tensor x, Tensor linear_weight, Tensor target, "
                "Tensor? linear_bias, Tensor? weight, int reduction, int ignore_index, "
                "float label_smoothing, float z_loss, float? softcap, bool float_loss, "
                "bool needs_grad_x, bool needs_grad_weight, bool needs_grad_bias) -> "
                "(Tensor, Tensor, Tensor, Tensor)",
                "Tensor");
  def_in_python(m,
                "linear_cross_entropy_backward(Tensor grad_out, Tensor x, Tensor linear_weight, "
                "Tensor target, Tensor? linear_bias, Tensor? weight, Tensor grad_x, "
                "Tensor grad_weight, Tensor grad_bias, int reduction, int ignore_index, "
                "float label_smoothing, float z_loss, float? softcap, bool needs_grad_x, "
                "bool needs_grad_weight, bool needs_grad_bias) -> (Tensor, Tensor, Tensor)");
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "cross_entropy", TORCH_BOX(&cross_entropy),
                    TORCH_BOX(&CrossEntropyNoGrad::call));
  impl_with_no_grad(m, "cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  impl(m, "cross_entropy_chunk", TORCH_BOX(&cross_entropy_chunk));
  impl(m, "cross_entropy_scale", TORCH_BOX(&cross_entropy_scale));
}

}  // namespace extension_cpp::loss
