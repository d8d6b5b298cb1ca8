// muladd: schemas, checks, allocation and registration. muladd.h has the formulas.
#include "muladd/muladd.h"

#include "common/shim/op.h"

namespace extension_cpp::muladd {

static void check_inputs(const Tensor &a, const Tensor &b) {
  check_dtype("muladd", "a", a);
  check_like("muladd", "b", b, "a", a);
}

// Computes `out`, which is dense and has a's shape. a and b are read in out's order of elements.
static void run_forward(const Tensor &a, const Tensor &b, double c, const Tensor &out) {
  if (out.numel() == 0) return;
  const Tensor a_like_out = with_strides_of(a, out), b_like_out = with_strides_of(b, out);
  muladd_forward_args args{a_like_out.const_data_ptr(),
                           b_like_out.const_data_ptr(),
                           out.mutable_data_ptr(),
                           c,
                           out.numel(),
                           check_dtype("muladd", "a", a)};
  launch_flat("muladd", KERNEL(muladd_forward), args, out, 3 * out.element_size());
}

static Tensor muladd(const Tensor &a, const Tensor &b, double c) {
  check_inputs(a, b);
  const Tensor out = allocate_like(a);
  run_forward(a, b, c, out);
  return out;
}

static void muladd_out(const Tensor &a, const Tensor &b, double c, const Tensor &out) {
  check_inputs(a, b);
  check_like("muladd", "out", out, "a", a);
  check_writable("muladd", "out", out);
  check_no_partial_overlap("muladd", "out", out, "a", a);
  check_no_partial_overlap("muladd", "out", out, "b", b);
  if (is_dense(out)) return run_forward(a, b, c, out);
  copy_into(out, muladd(a, b, c));
}

static std::tuple<Tensor, Tensor> muladd_backward(const Tensor &grad_out, const Tensor &a,
                                                  const Tensor &b) {
  const dtype_t dtype = check_dtype("muladd_backward", "a", a);
  check_like("muladd_backward", "grad_out", grad_out, "a", a);
  check_like("muladd_backward", "b", b, "a", a);
  const Tensor grad_a = allocate_like(a), grad_b = allocate_like(a);
  if (a.numel() == 0) return {grad_a, grad_b};
  const Tensor g = with_strides_of(grad_out, grad_a), a_like = with_strides_of(a, grad_a),
               b_like = with_strides_of(b, grad_a);
  muladd_backward_args args{g.const_data_ptr(),
                            a_like.const_data_ptr(),
                            b_like.const_data_ptr(),
                            grad_a.mutable_data_ptr(),
                            grad_b.mutable_data_ptr(),
                            a.numel(),
                            dtype};
  launch_flat("muladd_backward", KERNEL(muladd_backward), args, a, 5 * a.element_size());
  return {grad_a, grad_b};
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "muladd(Tensor a, Tensor b, float c) -> Tensor", &muladd);
  DEF(m, "muladd.out(Tensor a, Tensor b, float c, *, Tensor(a!) out) -> ()", &muladd_out);
  DEF_WITH_NO_GRAD(m, "muladd_backward(Tensor grad_out, Tensor a, Tensor b) -> (Tensor, Tensor)",
                   &muladd_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "muladd", TORCH_BOX(&muladd));
  impl(m, "muladd.out", TORCH_BOX(&muladd_out));
  impl_with_no_grad(m, "muladd_backward", TORCH_BOX(&muladd_backward));
}

}  // namespace extension_cpp::muladd
