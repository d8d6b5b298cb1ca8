// kernel_template: schema, checks, layouts and registration. kernel_template.h has the kernel's
// contract.
#include "kernel_template/kernel_template.h"

#include "common/shim/match.h"

namespace extension_cpp::kernel_template {

static void step(const Tensor &param, const Tensor &grad, const Tensor &momentum, double lr,
                 double beta) {
  const char *op = "kernel_template";
  Match match(op);
  match("param", param, FLOATING);
  match("grad", grad, SAME, "like param");
  match("momentum", momentum, SAME, "like param");
  check_writable(op, "param", param);
  check_writable(op, "momentum", momentum);
  check_no_partial_overlap(op, "param", param, "grad", grad);
  check_no_partial_overlap(op, "param", param, "momentum", momentum);
  check_no_partial_overlap(op, "momentum", momentum, "grad", grad);
  if (param.numel() == 0) return;
  // Locals: copies must live until the launch. The kernel writes a dense param itself, and momentum
  // if it has the same strides. Of others it writes a copy, which copy_into brings back.
  const Tensor p = is_dense(param) ? param : as_contiguous(param);
  const Tensor m = with_strides_of(momentum, p), g = with_strides_of(grad, p);
  kernel_template_args args{};
  args.param = p.mutable_data_ptr();
  args.grad = g.const_data_ptr();
  args.momentum = m.mutable_data_ptr();
  args.lr = lr;
  args.beta = beta;
  args.numel = param.numel();
  args.dtype = match.dtype();
  launch_flat(op, KERNEL(kernel_template), args, param, 5 * param.element_size());
  copy_into(param, p);
  copy_into(momentum, m);
}

// An operator that writes has no derivative, and so no overload for calls without gradients.
STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF(m,
      "kernel_template(Tensor(a!) param, Tensor grad, Tensor(b!) momentum, float lr, float "
      "beta=0.9) -> ()",
      &step);
}

REGISTER_KERNELS(m) { impl(m, "kernel_template", TORCH_BOX(&step)); }

}  // namespace extension_cpp::kernel_template
