// index_sum as a pybind11 module: out[index[r]] += scale * x[r], and its derivative. The module is
// deliberately written like many existing extensions, with their usual mistakes. docs/port.md shows
// how to port it to this package.
#include <ATen/Parallel.h>
#include <torch/extension.h>

torch::Tensor forward_cuda(torch::Tensor x, torch::Tensor index, int64_t n, double scale);
torch::Tensor backward_cuda(torch::Tensor grad_out, torch::Tensor index, double scale);

template <typename T>
static void atomic_add(T *sum, T term) {
#pragma omp atomic
  *sum += term;
}

static torch::Tensor forward(torch::Tensor x, torch::Tensor index, int64_t n, double scale) {
  TORCH_CHECK(x.dim() == 2 && index.dim() == 1 && x.size(0) == index.size(0), "wrong shapes");
  TORCH_CHECK(x.is_contiguous() && index.is_contiguous(), "inputs must be contiguous");
#ifdef WITH_CUDA
  if (x.is_cuda()) return forward_cuda(x, index, n, scale);
#endif
  const int64_t cols = x.size(1);
  torch::Tensor out = torch::zeros({n, cols}, x.options());
  const int64_t *to = index.data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "index_sum", [&] {
    const scalar_t *in = x.data_ptr<scalar_t>();
    scalar_t *sums = out.data_ptr<scalar_t>();
    at::parallel_for(0, x.numel(), 2048, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t place = to[i / cols] * cols + i % cols;
        atomic_add(sums + place, static_cast<scalar_t>(scale) * in[i]);
      }
    });
  });
  return out;
}

static torch::Tensor backward(torch::Tensor grad_out, torch::Tensor index, double scale) {
  grad_out = grad_out.contiguous();
#ifdef WITH_CUDA
  if (grad_out.is_cuda()) return backward_cuda(grad_out, index, scale);
#endif
  const int64_t cols = grad_out.size(1);
  torch::Tensor grad_x = torch::empty({index.size(0), cols}, grad_out.options());
  const int64_t *from = index.data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES(grad_out.scalar_type(), "index_sum_backward", [&] {
    const scalar_t *g = grad_out.data_ptr<scalar_t>();
    scalar_t *grad = grad_x.data_ptr<scalar_t>();
    at::parallel_for(0, grad_x.numel(), 2048, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        grad[i] = static_cast<scalar_t>(scale) * g[from[i / cols] * cols + i % cols];
    });
  });
  return grad_x;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("forward", &forward);
  m.def("backward", &backward);
}
