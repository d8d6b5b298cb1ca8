// token_log_probs: schema, checks, launches and registration. loss.h defines its formulas.
#include <algorithm>

#include "loss/loss_shim.h"

namespace extension_cpp::loss {

static LossRows token_rows(const char *op, const Tensor &logits, const Tensor &target,
                           double temperature) {
  const int64_t class_dim = std::max<int64_t>(logits.dim() - 1, 0);
  LossRows rows = loss_rows_of(op, logits, target, std::nullopt, {}, class_dim, 1 / temperature);
  if (!(temperature > 0)) {
    fail(op, "expected temperature to be positive, but got " + to_text(temperature));
  }
  return rows;
}

static std::tuple<Tensor, Tensor, Tensor> token_log_probs(const Tensor &logits,
                                                          const Tensor &target,
                                                          double temperature) {
  const char *const op = "token_log_probs";
  const RowResults results = launch_forward(op, token_rows(op, logits, target, temperature), true);
  return {results.loss, *results.entropy, results.lse};
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
  const LossRows rows = token_rows(op, logits, target, temperature);
  loss_backward_args args{};
  args.rows = rows.args;
  args.grad_dtype = check_loss_grad(op, "grad_log_probs", grad_log_probs, logits, target.sizes());
  check_loss_grad(op, "grad_entropy", grad_entropy, logits, target.sizes());
  check_same(op, "grad_entropy", grad_entropy, "grad_log_probs", grad_log_probs);
  check_lse(op, lse, target, rows.args.dtype);
  check_statistic(op, "entropy", entropy, target, target.sizes(), acc_dtype(rows.args.dtype));
  const Tensor of_log_probs = as_contiguous(grad_log_probs),
               of_entropy = as_contiguous(grad_entropy);
  args.lse = lse.const_data_ptr();
  args.grad_loss = of_log_probs.const_data_ptr();
  args.grad_stride = 1;
  args.entropy = entropy.const_data_ptr();
  args.grad_entropy = of_entropy.const_data_ptr();
  return launch_backward(op, args, logits);
}

// ---- registration ----

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_FEWER_RESULTS(m,
                         "token_log_probs(Tensor logits, Tensor target, float temperature=1.0) -> "
                         "(Tensor, Tensor, Tensor)",
                         &token_log_probs, "(Tensor, Tensor)", &token_log_probs_no_grad);
  DEF_WITH_NO_GRAD(
      m,
      "token_log_probs_backward(Tensor grad_log_probs, Tensor grad_entropy, "
      "Tensor logits, Tensor target, Tensor lse, Tensor entropy, float temperature) -> "
      "Tensor",
      &token_log_probs_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "token_log_probs", TORCH_BOX(&token_log_probs),
                    TORCH_BOX(&token_log_probs_no_grad));
  impl_with_no_grad(m, "token_log_probs_backward", TORCH_BOX(&token_log_probs_backward));
}

}  // namespace extension_cpp::loss
