// swiglu and geglu: schemas, checks, allocation and registration. gate.h has the formulas.
#include "gate/gate.h"

#include "common/shim/op.h"

namespace extension_cpp::gate {

static dtype_t check_inputs(const char *op, const Tensor &gate, const Tensor &up) {
  const dtype_t dtype = check_dtype(op, "gate", gate);
  check_like(op, "up", up, "gate", gate);
  return dtype;
}

// Returns x as rows, for a kernel whose outputs have the strides of `out`. If `out` is not
// contiguous, x is read as a single row, in the order of out's elements.
static Rows input_rows(const Tensor &x, const Tensor &out) {
  if (out.dim() > 0 && out.is_contiguous()) return as_rows(x, 1);
  return {with_strides_of(x, out), out.numel()};
}

struct Shape {
  int64_t rows, cols;
};

static Shape shape_of(const Tensor &out) {
  if (out.dim() == 0 || !out.is_contiguous()) return {1, out.numel()};
  return {out.numel() / out.size(-1), out.size(-1)};
}

static Tensor forward(const char *op, activation_t kind, const Tensor &gate, const Tensor &up) {
  const dtype_t dtype = check_inputs(op, gate, up);
  const Tensor y = allocate_like(gate);
  if (y.numel() == 0) return y;
  const Rows gate_rows = input_rows(gate, y), up_rows = input_rows(up, y);
  const Shape shape = shape_of(y);
  gate_forward_args args{gate_rows.tensor.const_data_ptr(),
                         up_rows.tensor.const_data_ptr(),
                         y.mutable_data_ptr(),
                         gate_rows.stride,
                         up_rows.stride,
                         shape.rows,
                         shape.cols,
                         kind,
                         dtype};
  launch(op, KERNEL(gate_forward), args, y, ceil_div(y.numel(), CHUNK),
         flat_grain(EXP_COST * 3 * y.element_size()));
  return y;
}

static std::tuple<Tensor, Tensor> backward(const char *op, activation_t kind,
                                           const Tensor &grad_out, const Tensor &gate,
                                           const Tensor &up) {
  const dtype_t dtype = check_inputs(op, gate, up);
  check_like(op, "grad_out", grad_out, "gate", gate);
  const Tensor grad_gate = allocate_like(gate), grad_up = allocate_like(gate);
  if (gate.numel() == 0) return {grad_gate, grad_up};
  const Rows grad_rows = input_rows(grad_out, grad_gate), gate_rows = input_rows(gate, grad_gate),
             up_rows = input_rows(up, grad_gate);
  const Shape shape = shape_of(grad_gate);
  gate_backward_args args{grad_rows.tensor.const_data_ptr(),
                          gate_rows.tensor.const_data_ptr(),
                          up_rows.tensor.const_data_ptr(),
                          grad_gate.mutable_data_ptr(),
                          grad_up.mutable_data_ptr(),
                          grad_rows.stride,
                          gate_rows.stride,
                          up_rows.stride,
                          shape.rows,
                          shape.cols,
                          kind,
                          dtype};
  launch(op, KERNEL(gate_backward), args, gate, ceil_div(gate.numel(), CHUNK),
         flat_grain(EXP_COST * 5 * gate.element_size()));
  return {grad_gate, grad_up};
}

static Tensor swiglu(const Tensor &gate, const Tensor &up) {
  return forward("swiglu", SILU, gate, up);
}
static std::tuple<Tensor, Tensor> swiglu_backward(const Tensor &grad_out, const Tensor &gate,
                                                  const Tensor &up) {
  return backward("swiglu_backward", SILU, grad_out, gate, up);
}

static Tensor geglu(const Tensor &gate, const Tensor &up, bool tanh) {
  return forward("geglu", tanh ? GELU_TANH : GELU, gate, up);
}
static std::tuple<Tensor, Tensor> geglu_backward(const Tensor &grad_out, const Tensor &gate,
                                                 const Tensor &up, bool tanh) {
  return backward("geglu_backward", tanh ? GELU_TANH : GELU, grad_out, gate, up);
}

STABLE_TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  DEF_WITH_NO_GRAD(m, "swiglu(Tensor gate, Tensor up) -> Tensor", &swiglu);
  DEF_WITH_NO_GRAD(m,
                   "swiglu_backward(Tensor grad_out, Tensor gate, Tensor up) -> (Tensor, Tensor)",
                   &swiglu_backward);
  DEF_WITH_NO_GRAD(m, "geglu(Tensor gate, Tensor up, bool tanh=False) -> Tensor", &geglu);
  DEF_WITH_NO_GRAD(m,
                   "geglu_backward(Tensor grad_out, Tensor gate, Tensor up, bool tanh) -> (Tensor, "
                   "Tensor)",
                   &geglu_backward);
}

REGISTER_KERNELS(m) {
  impl_with_no_grad(m, "swiglu", TORCH_BOX(&swiglu));
  impl_with_no_grad(m, "swiglu_backward", TORCH_BOX(&swiglu_backward));
  impl_with_no_grad(m, "geglu", TORCH_BOX(&geglu));
  impl_with_no_grad(m, "geglu_backward", TORCH_BOX(&geglu_backward));
}

}  // namespace extension_cpp::gate
