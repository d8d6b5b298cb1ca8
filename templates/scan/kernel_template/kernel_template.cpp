// kernel_template: schemas, checks, allocation and registration. Formulas: kernel_template.h.
#include "kernel_template/kernel_template.h"

#include <algorithm>
#include <sstream>

#include "common/shim/op.h"

namespace extension_cpp::kernel_template {

static dtype_t check_rows(const char *op, const char *name, const Tensor &x, double decay) {
  const dtype_t dtype = check_dtype(op, name, x);
  if (x.dim() == 0) {
    fail(op, std::string("expected ") + name + " to have at least one dimension, but got shape []");
  }
  if (!(decay >= 0 && decay <= 1)) {
    std::ostringstream text;
    text << decay;
    fail(op, "expected decay to be between 0 and 1, but got " + text.str());
  }
  return dtype;
}

// Returns the smallest number of rows per CPU thread, for about 128 KiB of memory traffic.
static int64_t row_grain(const Tensor &x) {
  return ceil_div(128 << 10, std::max<int64_t>(2 * x.size(-1) * x.element_size(), 1));
}

static Tensor scan(const char *op, const char *name, const Tensor &x, double decay, bool reverse) {
  const dtype_t dtype = check_rows(op, name, x, decay);
  const Tensor y = allocate(x.sizes(), dtype, x);
  if (x.numel() == 0) return y;
  const Tensor x_rows = as_contiguous(x);  // a local keeps a copy alive until the launch
  kernel_template_args args{};
  args.x = x_rows.const_data_ptr();
  args.y = y.mutable_data_ptr();
  args.rows = x.numel() / x.size(-1);
  args.steps = x.size(-1);
  args.decay = decay;
  args.reverse = reverse;
  args.dtype = dtype;
  launch(op, KERNEL(kernel_template), args, x, args.rows, row_grain(x));
  return y;
}

static Tensor forward(const Tensor &x, double decay) {
  return scan("kernel_template", "x", x, decay, false);
}

static Tensor backward(const Tensor &grad_out, double decay) {
  return scan("kernel_template_backward", "grad_out", grad_out, decay, true);
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "kernel_template(Tensor x, float decay) -> Tensor", &forward);
  DEF_WITH_NO_GRAD(m, "kernel_template_backward(Tensor grad_out, float decay) -> Tensor",
                   &backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "kernel_template", TORCH_BOX(&forward));
  impl_with_no_grad(m, "kernel_template_backward", TORCH_BOX(&backward));
}

}  // namespace extension_cpp::kernel_template
