// dropout: schema, checks, allocation and registration. dropout.h has the formula.
#include "dropout/dropout.h"

#include "common/shim/op.h"

namespace extension_cpp::dropout {

static Tensor dropout(const Tensor &x, double p, const Tensor &seed) {
  const dtype_t dtype = check_dtype("dropout", "x", x);
  check_probability("dropout", p);
  check_seed("dropout", seed, x);
  const Tensor y = allocate(x.sizes(), dtype, x);
  if (x.numel() == 0) return y;
  if (p == 0) return copy_into(y, x);
  const Tensor x_contiguous = as_contiguous(x);
  dropout_forward_args args{x_contiguous.const_data_ptr(), y.mutable_data_ptr(),
                            dropout_of(p, static_cast<const int64_t *>(seed.const_data_ptr())),
                            x.numel(), dtype};
  launch_flat("dropout", KERNEL(dropout_forward), args, x, 2 * x.element_size());
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "dropout(Tensor x, float p, Tensor seed) -> Tensor", &dropout);
}

REGISTER_KERNELS(m) { impl_with_no_grad(m, "dropout", TORCH_BOX(&dropout)); }

}  // namespace extension_cpp::dropout
