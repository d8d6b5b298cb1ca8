// kernel_template on the GPU. Each CTA processes one chunk, and a launch up to 100 tensors. Their
// rows of the table are passed to the kernel by value, so nothing has to be copied to the GPU or
// kept alive after the launch. (PyTorch's multi_tensor_apply also passes a list of the chunks, and
// therefore has room for only 320 chunks. Here a CTA finds its tensor by bisection in the kernel's
// arguments, which the constant cache holds.)
#include "kernel_template/kernel_template.h"

#include "common/cuda/vector.cuh"

namespace kernel_template_kernels {

using args_t = kernel_template_args;

constexpr int THREADS = 256;
constexpr int TENSORS = 100;  // in one launch; the arguments of a kernel have at most 4 KB

struct Table {
  kernel_template_tensor tensors[TENSORS];
  int count;
};
static_assert(sizeof(Table) <= 4096);

// Returns the index of a chunk's tensor: the last with a first chunk not after this chunk.
static __device__ int tensor_of(const Table &table, int64_t chunk) {
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.tensors[middle].first_chunk <= chunk)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Multiplies N elements of x and y, and writes the products to out.
template <typename T, int N>
static __device__ void multiply(const T *x, const T *y, T *out) {
  acc_t<T> a[N], b[N];
  load<T, N>(a, x);
  load<T, N>(b, y);
  for (int k = 0; k < N; ++k) a[k] = a[k] * b[k];
  store<T, N>(out, a);
}

template <typename T>
__global__ void __launch_bounds__(THREADS) kernel(const __grid_constant__ Table table) {
  constexpr int N = 16 / sizeof(T);
  const int64_t chunk = table.tensors[0].first_chunk + blockIdx.x;
  const kernel_template_tensor &tensor = table.tensors[tensor_of(table, chunk)];
  const int64_t begin = (chunk - tensor.first_chunk) * CHUNK;
  const int n = static_cast<int>(tensor.numel - begin < CHUNK ? tensor.numel - begin : CHUNK);
  const T *x = static_cast<const T *>(tensor.x) + begin;
  const T *y = static_cast<const T *>(tensor.y) + begin;
  T *out = static_cast<T *>(tensor.out) + begin;
  const auto ends = reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(y) |
                    reinterpret_cast<uintptr_t>(out);
  // Vectors are used if all three tensors are aligned. The other elements are processed one by one.
  const int vectors = ends % 16 == 0 ? n / N : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < vectors; i += THREADS)
    multiply<T, N>(x + i * N, y + i * N, out + i * N);
  for (int i = vectors * N + threadIdx.x; i < n; i += THREADS)
    multiply<T, 1>(x + i, y + i, out + i);
}

extern "C" int kernel_template_cuda(const args_t *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    cudaError_t error = cudaSuccess;
    for (int64_t first = 0; first < args->count && error == cudaSuccess; first += TENSORS) {
      const int64_t left = args->count - first;
      Table table;
      table.count = static_cast<int>(left < TENSORS ? left : TENSORS);
      for (int i = 0; i < table.count; ++i) table.tensors[i] = args->tensors[first + i];
      const int64_t end =
          left > TENSORS ? args->tensors[first + TENSORS].first_chunk : args->chunks;
      const auto chunks = static_cast<unsigned>(end - table.tensors[0].first_chunk);
      kernel<decltype(zero)><<<chunks, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(table);
      error = cudaGetLastError();
    }
    return error;
  });
}

}  // namespace kernel_template_kernels
