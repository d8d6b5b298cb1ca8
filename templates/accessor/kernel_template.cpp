// kernel_template: y[b][d] = f(x[b][d]) on [B, D], float32, with accessors, which know the strides.
// It uses PyTorch's stable ABI and headers of torch/headeronly alone, so that what is compiled here
// works with every PyTorch from 2.10 on. This file has the schemas, the checks and the CPU kernels;
// kernel_template_cuda.cu has the CUDA kernels.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/TensorAccessor.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace kernel_template {

using torch::stable::Tensor;
using In = torch::headeronly::HeaderOnlyTensorAccessor<const float, 2>;
using Out = torch::headeronly::HeaderOnlyTensorAccessor<float, 2>;

// ---- the arithmetic: y = f(x) = x^2 and dy/dx; the CUDA file repeats these two functions ----

static float f(float x) { return x * x; }
static float derivative(float x) { return 2 * x; }

// ---- checks, for both devices ----

// Python sees a RuntimeError with exactly this text.
void check(bool is_right, const char *name, const std::string &expected, const std::string &got) {
  if (is_right) return;
  throw std::runtime_error("kernel_template: expected " + std::string(name) + " " + expected +
                           ", but got " + got);
}

static std::string device_of(const Tensor &x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : "cpu";
}

static std::string shape_of(const Tensor &x) {
  std::string text;
  for (const int64_t size : x.sizes()) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

void check_input(const char *name, const Tensor &x) {
  check(x.scalar_type() == torch::headeronly::ScalarType::Float, name, "to be float32",
        torch::headeronly::toString(x.scalar_type()));
  check(x.dim() == 2, name, "of shape [B, D]", shape_of(x));
}

// The dispatcher picks the CUDA kernel if any argument is on a GPU. The other argument may be
// elsewhere.
void check_inputs(const Tensor &grad_out, const Tensor &x) {
  check_input("x", x);
  check_input("grad_out", grad_out);
  const std::string device = device_of(x), shape = shape_of(x);
  check(device_of(grad_out) == device, "grad_out", "on " + device + " like x", device_of(grad_out));
  check(shape_of(grad_out) == shape, "grad_out", "of shape " + shape + " like x",
        shape_of(grad_out));
}

// ---- CPU: rows on PyTorch's threads ----

static In read(const Tensor &x) {
  return In(static_cast<const float *>(x.const_data_ptr()), x.sizes().data(), x.strides().data());
}

static Out write(const Tensor &x) {
  return Out(static_cast<float *>(x.mutable_data_ptr()), x.sizes().data(), x.strides().data());
}

// Returns the least number of rows per thread: about 32768 elements. Empty rows count as one.
static int64_t grain(int64_t cols) {
  return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, cols));
}

static Tensor forward(const Tensor &x) {
  check_input("x", x);
  const Tensor y = torch::stable::new_empty(x, x.sizes());
  const In in = read(x);
  Out out = write(y);
  torch::stable::parallel_for(0, x.size(0), grain(x.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t d = 0; d < in.size(1); ++d) out[b][d] = f(in[b][d]);
    }
  });
  return y;
}

static Tensor backward(const Tensor &grad_out, const Tensor &x) {
  check_inputs(grad_out, x);
  const Tensor grad_x = torch::stable::new_empty(x, x.sizes());
  const In g = read(grad_out), in = read(x);
  Out out = write(grad_x);
  torch::stable::parallel_for(0, x.size(0), grain(x.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int64_t d = 0; d < in.size(1); ++d) out[b][d] = g[b][d] * derivative(in[b][d]);
    }
  });
  return grad_x;
}

STABLE_TORCH_LIBRARY(kernel_template, m) {
  m.def("forward(Tensor x) -> Tensor");
  m.def("backward(Tensor grad_out, Tensor x) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(kernel_template, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

}  // namespace kernel_template
