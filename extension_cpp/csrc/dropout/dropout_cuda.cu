// dropout on the GPU, element by element. A thread processes units of UNIT elements, so that one
// Philox call serves four or eight elements. A unit is a whole number of 16-byte vectors. The
// thread loads all its units before it computes, so that several loads are in flight. If x is not
// aligned to 16 bytes, it is read in the widest vectors that its address allows. (y is always
// aligned.)
#include "common/cuda/dropout.cuh"
#include "common/cuda/vector.cuh"
#include "common/range.h"
#include "dropout/dropout.h"

namespace dropout_cuda {

constexpr int THREADS = 128;
constexpr int UNITS = 2;

template <typename T>
constexpr int UNIT = sizeof(T) == 2 ? 8 : 4;

template <typename T>
struct Parameters {
  const T *x;
  T *y;
  dropout_t dropout;
  int64_t numel;
};

// Processes COUNT units. The first begins at element i, the next `step` elements later.
template <typename T, int N, int COUNT>
__device__ inline void some_units(const Parameters<T> &p, int64_t seed, int64_t i, int64_t step) {
  constexpr int VECTORS = UNIT<T> / N;
  Vector<T, N> raw[COUNT][VECTORS];
  int64_t first[COUNT];
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) raw[u][v] = load_vector<T, N>(p.x + i + u * step + v * N);
    first[u] = i + u * step;
  }
  RandomBits<UNIT<T>> bits[COUNT];
  draw(bits, seed, first);
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    acc_t<T> x[UNIT<T>];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v)
      unpack<T, N>(reinterpret_cast<acc_t<T>(&)[N]>(x[v * N]), raw[u][v]);
    drop(x, p.dropout, bits[u]);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      store<T, N>(p.y + i + u * step + v * N, reinterpret_cast<acc_t<T>(&)[N]>(x[v * N]));
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) forward_kernel(Parameters<T> p) {
  const int64_t seed = seed_of(p.dropout), units = p.numel / UNIT<T>;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * (THREADS * UNITS),
                first = block + threadIdx.x;
  if (block + THREADS * UNITS <= units) {
    some_units<T, N, UNITS>(p, seed, first * UNIT<T>, THREADS * UNIT<T>);
  } else {
    for (int u = 0; u < UNITS; ++u) {
      const int64_t unit = first + u * THREADS;
      if (unit < units) some_units<T, N, 1>(p, seed, unit * UNIT<T>, 0);
    }
  }
  const int64_t i = units * UNIT<T> + threadIdx.x;
  if (blockIdx.x == 0 && i < p.numel) {
    acc_t<T> x[1] = {to_acc(p.x[i])};
    drop(x, p.dropout, draw_one(seed, i));
    p.y[i] = from_acc<T>(x[0]);
  }
}

template <typename T, int N>
cudaError_t launch(const Parameters<T> &p, cudaStream_t stream) {
  if constexpr (N > 1) {
    const auto misaligned = [](const void *q) {
      return reinterpret_cast<uintptr_t>(q) % (sizeof(T) * N) != 0;
    };
    if (misaligned(p.x) || misaligned(p.y)) return launch<T, N / 2>(p, stream);
  }
  const int64_t blocks = ceil_div(p.numel / UNIT<T>, THREADS * UNITS);
  forward_kernel<T, N><<<static_cast<unsigned>(blocks > 0 ? blocks : 1), THREADS, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace dropout_cuda

extern "C" int dropout_forward_cuda(const dropout_forward_args *args, void *stream) {
  using namespace dropout_cuda;
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    const Parameters<T> p{static_cast<const T *>(args->x), static_cast<T *>(args->y), args->dropout,
                          args->numel};
    return launch<T, 16 / sizeof(T)>(p, static_cast<cudaStream_t>(stream));
  });
}
