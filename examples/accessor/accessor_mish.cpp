// accessor_mish: y[b][d] = f(x[b][d]) on [B, D], float32, the ATen way: at::Tensor,
// TORCH_LIBRARY, and accessors that know the strides. This file has the schemas, the checks and the
// CPU kernels; accessor_mish_cuda.cu has the CUDA kernels.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace accessor_mish {

// ---- the arithmetic: y = x tanh(softplus(x)) and dy/dx. The CUDA file repeats the formulas ----

// tanh(log(1 + e)) = e (e + 2) / (e^2 + 2 e + 2), with e = exp(x). For x > 20, mish(x) rounded to
// float32 is x.
static float f(float x) {
  const float e = std::exp(x);
  return x > 20 ? x : x * (e * (e + 2) / (e * (e + 2) + 2));
}

static float derivative(float x) {
  const float e = std::exp(x), denominator = e * (e + 2) + 2;
  return x > 20 ? 1 : e * ((e + 2) * denominator + 4 * x * (1 + e)) / (denominator * denominator);
}

// ---- checks, for both devices ----

void check_input(const char *name, const at::Tensor &x) {
  TORCH_CHECK(x.scalar_type() == at::kFloat, "expected ", name, " to be float32, but got ",
              x.scalar_type());
  TORCH_CHECK(x.dim() == 2, "expected ", name, " of shape [B, D], but got ", x.sizes());
}

// The dispatcher picks the CUDA kernel if any argument is on a GPU. The other argument may be
// elsewhere.
void check_inputs(const at::Tensor &grad_out, const at::Tensor &x) {
  check_input("x", x);
  check_input("grad_out", grad_out);
  TORCH_CHECK(grad_out.device() == x.device(), "expected grad_out on ", x.device(),
              " like x, but got ", grad_out.device());
  TORCH_CHECK(grad_out.sizes() == x.sizes(), "expected grad_out of shape ", x.sizes(),
              " like x, but got ", grad_out.sizes());
}

// ---- CPU: rows on PyTorch's threads ----

// Returns the least number of rows per thread: about 32768 elements. Empty rows count as one.
static int64_t grain(int64_t cols) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, cols));
}

static at::Tensor forward(const at::Tensor &x) {
  check_input("x", x);
  const at::Tensor y = at::empty(x.sizes(), x.options());
  const at::TensorAccessor<const float, 2> in = x.accessor<const float, 2>();
  at::TensorAccessor<float, 2> out = y.accessor<float, 2>();
  at::parallel_for(0, in.size(0), grain(in.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t d = 0; d < in.size(1); ++d) out[b][d] = f(in[b][d]);
    }
  });
  return y;
}

static at::Tensor backward(const at::Tensor &grad_out, const at::Tensor &x) {
  check_inputs(grad_out, x);
  const at::Tensor grad_x = at::empty(x.sizes(), x.options());
  const at::TensorAccessor<const float, 2> g = grad_out.accessor<const float, 2>(),
                                           in = x.accessor<const float, 2>();
  at::TensorAccessor<float, 2> out = grad_x.accessor<float, 2>();
  at::parallel_for(0, in.size(0), grain(in.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t d = 0; d < in.size(1); ++d) out[b][d] = g[b][d] * derivative(in[b][d]);
    }
  });
  return grad_x;
}

TORCH_LIBRARY(accessor_mish, m) {
  m.def("forward(Tensor x) -> Tensor");
  m.def("backward(Tensor grad_out, Tensor x) -> Tensor");
}

TORCH_LIBRARY_IMPL(accessor_mish, CPU, m) {
  m.impl("forward", &forward);
  m.impl("backward", &backward);
}

}  // namespace accessor_mish
