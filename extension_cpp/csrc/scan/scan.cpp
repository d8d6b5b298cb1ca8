// cumsum, logcumsumexp and linear_recurrence: schemas, checks, allocation and registration. scan.h has
// the kernels' contract, scan_shim.h says how a tensor becomes (outer, length, inner).
#include "scan/scan.h"

#include "common/op.h"
#include "scan/scan_shim.h"

namespace extension_cpp {

static Tensor cumsum(const Tensor &x, int64_t dim, bool exclusive, bool reverse) {
  const dtype_t dtype = check_dtype("cumsum", "x", x, "; torch.cumsum takes others");
  dim = check_dim("cumsum", x, dim);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  ScanView view(y, dim, reverse, dtype);
  cumsum_args args{view.shape(), view.input(x), view.output(y), exclusive};
  const int64_t steps = args.shape.length - (exclusive ? 1 : 0);
  launch_scan("cumsum", SCAN_KERNELS(cumsum), args, x, steps, 1, 2 * x.element_size());
  return y;
}

STABLE_TORCH_LIBRARY_FRAGMENT(extension_cpp, m) {
  def_with_twin(m, "cumsum(Tensor x, int dim, bool exclusive=False, bool reverse=False) -> Tensor");
}

REGISTER_KERNELS(m) { impl_with_twin(m, "cumsum", TORCH_BOX(&cumsum)); }

}  // namespace extension_cpp
