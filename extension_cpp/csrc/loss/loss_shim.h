// C++ code that cross_entropy and token_log_probs share: checks, the layout of rows, and launches.
#ifndef EXTENSION_CPP_LOSS_SHIM_H
#define EXTENSION_CPP_LOSS_SHIM_H

#include <optional>
#include <string>
#include <tuple>

#include "common/shim/op.h"
#include "loss/loss.h"

namespace extension_cpp::loss {

using Optional = std::optional<Tensor>;

// The options as the operators take them. The defaults are those of token_log_probs.
struct LossOptions {
  int64_t ignore_index = INT64_MIN;
  double label_smoothing = 0, z_loss = 0;
  std::optional<double> softcap = std::nullopt;

  // Returns the options in the kernels' form.
  loss_options numbers() const {
    return {ignore_index, label_smoothing, z_loss, softcap.value_or(0)};
  }
};

std::string to_text(double x);

// Fails unless x is as forward returned it: this shape and dtype, contiguous, on target's device.
void check_statistic(const char *op, const char *name, const Tensor &x, const Tensor &target,
                     Sizes shape, dtype_t dtype);

// Fails unless lse is as forward returned it for logits of this dtype.
void check_lse(const char *op, const Tensor &lse, const Tensor &target, dtype_t dtype);

// Returns the dtype of grad. Fails unless grad has this shape, the device of logits, and their
// dtype or the accumulation type.
dtype_t check_loss_grad(const char *op, const char *name, const Tensor &grad, const Tensor &logits,
                        Sizes shape);

// The tensors that a kernel reads, and its arguments. The tensors must live until the launch.
struct LossRows {
  Tensor logits, target;
  Optional weight, weight_sum;
  loss_rows args;
};

// Checks logits, target, weight and options, and returns the kernels' arguments. class_dim is the
// dimension of the classes.
LossRows loss_rows_of(const char *op, const Tensor &logits, const Tensor &target,
                      const Optional &weight, const LossOptions &options, int64_t class_dim,
                      double scale = 1);

// Returns the sum (or mean) of losses, of dtype out_dtype, and the sum of the weights. If `rows` is
// NULL, every loss has the weight 1.
std::tuple<Tensor, Tensor> launch_reduce(const char *op, const Tensor &losses, const LossRows *rows,
                                         bool is_mean, dtype_t out_dtype);

// The results of forward for each row, in the accumulation type.
struct RowResults {
  Tensor loss, lse;
  Optional entropy;
};

// Launches forward. If grad_logits is not NULL, the gradient times *grad_scale is written to it.
RowResults launch_forward(const char *op, const LossRows &rows, bool with_entropy,
                          const Tensor *grad_logits = nullptr, const Tensor *grad_scale = nullptr);

// Launches backward, and returns grad_logits.
Tensor launch_backward(const char *op, loss_backward_args &args, const Tensor &logits);

}  // namespace extension_cpp::loss

#endif
