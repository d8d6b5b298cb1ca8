// kernel_template: schema, checks, layouts and registration. kernel_template.h has the kernel's
// contract.
#include "kernel_template/kernel_template.h"

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

static void check_inputs(Match &match, const Tensor &param, const Tensor &grad,
                         const Tensor &momentum) {
  match("param", param, FLOATING);
  match("grad", grad, SAME, "like param");
  match("momentum", momentum, SAME, "like param");
}

// Reads the first three tensors and writes the last two, which are param and momentum in place.
static void run(const Match &match, const Tensor &param, const Tensor &grad, const Tensor &momentum,
                double lr, double beta, const Tensor &param_out, const Tensor &momentum_out) {
  if (param.numel() == 0) return;
  // Locals hold the tensors, because copies must live until the launch. The kernel writes directly
  // to param_out if it is dense, and to momentum_out if it has the strides of p_out. Otherwise the
  // kernel writes to a copy, and copy_into copies the result back.
  const Tensor p_out = is_dense(param_out) ? param_out : as_contiguous(param_out);
  const Tensor m_out = with_strides_of(momentum_out, p_out);
  const Tensor p = with_strides_of(param, p_out), g = with_strides_of(grad, p_out),
               m = with_strides_of(momentum, p_out);
  kernel_template_args args{};
  args.param = p.const_data_ptr();
  args.grad = g.const_data_ptr();
  args.momentum = m.const_data_ptr();
  args.param_out = p_out.mutable_data_ptr();
  args.momentum_out = m_out.mutable_data_ptr();
  args.lr = lr;
  args.beta = beta;
  args.numel = param.numel();
  args.dtype = match.dtype();
  launch_flat("kernel_template", KERNEL(kernel_template), args, param, 5 * param.element_size());
  copy_into(param_out, p_out);
  copy_into(momentum_out, m_out);
}

static void step(const Tensor &param, const Tensor &grad, const Tensor &momentum, double lr,
                 double beta) {
  const char *op = "kernel_template";
  Match match(op);
  check_inputs(match, param, grad, momentum);
  check_writable(op, "param", param);
  check_writable(op, "momentum", momentum);
  check_no_partial_overlap(op, "param", param, "grad", grad);
  check_no_partial_overlap(op, "param", param, "momentum", momentum);
  check_no_partial_overlap(op, "momentum", momentum, "grad", grad);
  run(match, param, grad, momentum, lr, beta, param, momentum);
}

static void step_out(const Tensor &param, const Tensor &grad, const Tensor &momentum, double lr,
                     double beta, const Tensor &param_out, const Tensor &momentum_out) {
  const char *op = "kernel_template";
  Match match(op);
  check_inputs(match, param, grad, momentum);
  const auto check_out = [&](const char *name, const Tensor &out) {
    match(name, out, SAME, "like param");
    check_writable(op, name, out);
    check_no_partial_overlap(op, name, out, "param", param);
    check_no_partial_overlap(op, name, out, "grad", grad);
    check_no_partial_overlap(op, name, out, "momentum", momentum);
  };
  check_out("param_out", param_out);
  check_out("momentum_out", momentum_out);
  check_no_partial_overlap(op, "momentum_out", momentum_out, "param_out", param_out);
  run(match, param, grad, momentum, lr, beta, param_out, momentum_out);
}

// An operator that writes to its arguments has no derivative, and therefore no no-grad overload.
// The overload `out` is for the public function's argument out=; torch.compile does not need it.
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF(m,
      "kernel_template(Tensor(a!) param, Tensor grad, Tensor(b!) momentum, float lr, float "
      "beta=0.9) -> ()",
      &step);
  DEF(m,
      "kernel_template.out(Tensor param, Tensor grad, Tensor momentum, float lr, float beta=0.9, "
      "*, Tensor(a!) param_out, Tensor(b!) momentum_out) -> ()",
      &step_out);
}

REGISTER_KERNELS(m) {
  impl(m, "kernel_template", TORCH_BOX(&step));
  impl(m, "kernel_template.out", TORCH_BOX(&step_out));
}

}  // namespace extension_cpp::kernel_template
