// cumsum, logcumsumexp and linear_recurrence: schemas, checks, allocation and registration. scan.h
// defines what the kernels compute, and scan_shim.h how a tensor becomes (outer, length, inner).
#include "scan/scan.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/shim/op.h"
#include "scan/scan_shim.h"

namespace extension_cpp::scan {

static Tensor cumsum(const Tensor &x, int64_t dim, bool exclusive, bool reverse) {
  const dtype_t dtype = check_dtype("cumsum", "x", x, "; torch.cumsum takes others");
  dim = check_dim("cumsum", x, dim);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  ScanView view(y, dim, reverse, dtype);
  cumsum_args args{};
  view.add(x, &args.x);
  view.add(y, &args.y);
  args.shape = view.divide();
  args.exclusive = exclusive;
  const int64_t steps = args.shape.length - (exclusive ? 1 : 0);
  launch_scan("cumsum", SCAN_KERNELS(cumsum), args, x, steps, 2 * x.element_size());
  return y;
}

// ---- logcumsumexp ----

static Tensor logcumsumexp(const Tensor &x, int64_t dim) {
  const dtype_t dtype = check_dtype("logcumsumexp", "x", x);
  dim = check_dim("logcumsumexp", x, dim);
  const Tensor y = allocate_like(x);
  if (x.numel() == 0) return y;
  ScanView view(y, dim, false, dtype);
  logcumsumexp_args args{};
  view.add(x, &args.x);
  view.add(y, &args.y);
  args.shape = view.divide();
  launch_scan("logcumsumexp", SCAN_KERNELS(logcumsumexp), args, x, args.shape.length,
              EXP_COST * x.element_size());
  return y;
}

static Tensor logcumsumexp_backward(const Tensor &grad_out, const Tensor &x, const Tensor &y,
                                    int64_t dim) {
  const char *op = "logcumsumexp_backward";
  const dtype_t dtype = check_dtype(op, "x", x);
  check_like(op, "grad_out", grad_out, "x", x);
  check_like(op, "y", y, "x", x);
  dim = check_dim(op, x, dim);
  const Tensor grad_x = allocate_like(x);
  if (x.numel() == 0) return grad_x;
  ScanView view(grad_x, dim, true, dtype);
  logcumsumexp_backward_args args{};
  view.add(grad_out, &args.grad_out);
  view.add(x, &args.x);
  view.add(y, &args.y);
  view.add(grad_x, &args.grad_x);
  args.shape = view.divide();
  launch_scan(op, SCAN_KERNELS(logcumsumexp_backward), args, x, args.shape.length,
              EXP_COST * x.element_size());
  return grad_x;
}

// ---- linear_recurrence ----

static std::vector<int64_t> without(Sizes sizes, int64_t dim) {
  std::vector<int64_t> rest(sizes.begin(), sizes.end());
  if (!rest.empty()) rest.erase(rest.begin() + dim);
  return rest;
}

// Fails unless a broadcasts to the shape of b (named `name` in errors), and h0, if given, has b's
// shape without the dimension dim. Replaces *dim by an index from 0.
static void check_recurrence(const char *op, const Tensor &a, const char *name, const Tensor &b,
                             const std::optional<Tensor> &h0, int64_t *dim) {
  check_same(op, "a", a, name, b);
  bool broadcasts = a.dim() <= b.dim();
  for (int64_t d = 1; broadcasts && d <= a.dim(); ++d)
    broadcasts = a.size(-d) == 1 || a.size(-d) == b.size(-d);
  if (!broadcasts) {
    fail(op, "expected a of a shape that broadcasts to " + to_string(b.sizes()) + ", that of " +
                 name + ", but got " + to_string(a.sizes()));
  }
  *dim = check_dim(op, b, *dim);
  if (!h0) return;
  check_same(op, "h0", *h0, name, b);
  const std::vector<int64_t> expected = without(b.sizes(), *dim);
  const Sizes sizes = h0->sizes();
  if (!std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end())) {
    fail(op, "expected h0 of shape " + to_string(expected) + ", that of " + name +
                 " without dim, but got " + to_string(sizes));
  }
}

static Tensor linear_recurrence(const Tensor &a, const Tensor &b, const std::optional<Tensor> &h0,
                                int64_t dim, bool reverse) {
  const dtype_t dtype = check_dtype("linear_recurrence", "b", b);
  check_recurrence("linear_recurrence", a, "b", b, h0, &dim);
  const Tensor h = allocate_like(b);
  if (b.numel() == 0) return h;
  ScanView view(h, dim, reverse, dtype);
  linear_recurrence_args args{};
  view.add(a, &args.a);
  view.add(b, &args.b);
  if (h0) view.add(*h0, &args.h0, false);
  view.add(h, &args.h);
  args.shape = view.divide();
  launch_scan("linear_recurrence", SCAN_KERNELS(linear_recurrence), args, b, args.shape.length,
              3 * b.element_size());
  return h;
}

static std::tuple<Tensor, Tensor, Tensor> linear_recurrence_backward(
    const Tensor &grad_h, const Tensor &a, const Tensor &h, const std::optional<Tensor> &h0,
    int64_t dim, bool reverse) {
  const char *op = "linear_recurrence_backward";
  const dtype_t dtype = check_dtype(op, "h", h);
  check_like(op, "grad_h", grad_h, "h", h);
  check_recurrence(op, a, "h", h, h0, &dim);
  const Tensor grad_a = allocate_like(h), grad_b = allocate_like(h);
  const Tensor grad_h0 = h0 ? allocate(h0->sizes(), dtype, h) : allocate({0}, dtype, h);
  if (h.numel() == 0) {
    // Without steps no state depends on h0, so its gradient is 0.
    if (grad_h0.numel() > 0) {
      Tensor zeros = grad_h0;
      torch::stable::zero_(zeros);
    }
    return {grad_a, grad_b, grad_h0};
  }
  ScanView view(grad_b, dim, !reverse, dtype);
  linear_recurrence_backward_args args{};
  view.add(grad_h, &args.grad_h);
  view.add(a, &args.a);
  view.add(h, &args.h);
  view.add(grad_a, &args.grad_a);
  view.add(grad_b, &args.grad_b);
  if (h0) {
    view.add(*h0, &args.h0, false);
    view.add(grad_h0, &args.grad_h0, false);
  }
  args.shape = view.divide();
  launch_scan(op, SCAN_KERNELS(linear_recurrence_backward), args, h, args.shape.length,
              5 * h.element_size());
  return {grad_a, grad_b, grad_h0};
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(
      m, "cumsum(Tensor x, int dim, bool exclusive=False, bool reverse=False) -> Tensor", &cumsum);
  DEF_WITH_NO_GRAD(m, "logcumsumexp(Tensor x, int dim) -> Tensor", &logcumsumexp);
  DEF_WITH_NO_GRAD(m,
                   "logcumsumexp_backward(Tensor grad_out, Tensor x, Tensor y, int dim) -> Tensor",
                   &logcumsumexp_backward);
  DEF_WITH_NO_GRAD(m,
                   "linear_recurrence(Tensor a, Tensor b, Tensor? h0=None, int dim=-2, "
                   "bool reverse=False) -> Tensor",
                   &linear_recurrence);
  DEF_WITH_NO_GRAD(
      m,
      "linear_recurrence_backward(Tensor grad_h, Tensor a, Tensor h, Tensor? h0, int dim, "
      "bool reverse) -> (Tensor, Tensor, Tensor)",
      &linear_recurrence_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "cumsum", TORCH_BOX(&cumsum));
  impl_with_no_grad(m, "logcumsumexp", TORCH_BOX(&logcumsumexp));
  impl_with_no_grad(m, "logcumsumexp_backward", TORCH_BOX(&logcumsumexp_backward));
  impl_with_no_grad(m, "linear_recurrence", TORCH_BOX(&linear_recurrence));
  impl_with_no_grad(m, "linear_recurrence_backward", TORCH_BOX(&linear_recurrence_backward));
}

}  // namespace extension_cpp::scan
