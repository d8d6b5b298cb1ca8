// Shared by cross_entropy and token_log_probs in C++: checks, the layout of rows, launches.
#ifndef EXTENSION_CPP_LOSS_SHIM_H
#define EXTENSION_CPP_LOSS_SHIM_H

#include <optional>
#include <string>
#include <tuple>

#include "common/shim/op.h"
#include "loss/loss.h"

namespace extension_cpp {

using Optional = std::optional<Tensor>;

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  std::optional<double> softcap;
};

std::string to_text(double x);

// The dtype of logits. Fails unless logits, target, weight and options fit; class_dim is the
// dimension of the classes.
dtype_t check_loss_inputs(const char *op, const Tensor &logits, const Tensor &target,
                          const Optional &weight, const LossOptions &options, int64_t class_dim);

// Fails unless x is what forward returned: this shape and type, contiguous, on target's device.
void check_statistic(const char *op, const char *name, const Tensor &x, const Tensor &target,
                     Sizes shape, dtype_t dtype);

// Fails unless lse is what forward returned for logits of this type.
void check_lse(const char *op, const Tensor &lse, const Tensor &target, dtype_t dtype);

// The dtype of grad. Fails unless grad has the device of logits, its dtype or the accumulation
// type, and this shape.
dtype_t check_loss_grad(const char *op, const char *name, const Tensor &grad, const Tensor &logits,
                        Sizes shape);

// The tensors that a kernel reads. They must live until the kernel is launched.
struct LossRows {
  Tensor logits, target;
  Optional weight, weight_sum;
  loss_rows args;
};

LossRows loss_rows_of(const char *op, const Tensor &logits, const Tensor &target,
                      const Optional &weight, const LossOptions &options, int64_t class_dim,
                      double scale, dtype_t dtype);

// Allocates the scratch of a loss_reduce, and launches it.
void launch_reduce(const char *op, loss_reduce_args &args, const Tensor &like);

// What forward writes for each row, in the accumulation type.
struct RowResults {
  Tensor loss, lse;
  Optional entropy;
};

// Launches forward. If grad_logits is not NULL, also writes the gradient times *grad_scale to it.
RowResults launch_forward(const char *op, const LossRows &rows, bool with_entropy,
                          const Tensor *grad_logits = nullptr, const Tensor *grad_scale = nullptr);

// Launches backward, and returns grad_logits.
Tensor launch_backward(const char *op, loss_backward_args &args, const Tensor &logits);

}  // namespace extension_cpp

#endif
