// Shared by softmax and the losses on the GPU: everything but rows in registers, that is other
// dimensions than the last, float64, unaligned tensors and rows too wide for a cluster.
//
// Inner elements that lie side by side are processed in strips. A cluster of CTAs has a strip, and
// each CTA an equal part of the strip's columns. Threads of the same threadIdx.x have the same N
// neighbouring inner elements, and threadIdx.y counts the columns that they read at once.
#ifndef EXTENSION_CPP_ROWS_STRIPS_CUH
#define EXTENSION_CPP_ROWS_STRIPS_CUH

#include <algorithm>

#include "rows/launch.cuh"

namespace rows {

constexpr int STRIP_THREADS = 256;
// Per SM, which limits the registers per thread: to 80, and in backward to 128.
constexpr int STRIP_CTAS = 3, STRIP_BACKWARD_CTAS = 2;
constexpr int STRIP_COLUMNS = 4;  // that a thread loads at once

struct StripShape {
  dim3 threads;
  int cluster;
  int64_t strips;  // per outer index
};

template <typename Args>
struct StripParams : Args {
  StripShape shape;
};

// ---- in kernels ----

// The part of a strip that a thread has.
struct Strip {
  int64_t outer, i;    // indices of the first of the thread's elements
  int64_t begin, end;  // the CTA's columns; none if the thread has no elements
  bool is_there;       // whether it has

  __device__ Strip(int64_t strip, const StripShape &shape, int64_t cols, int64_t inner, int n)
      : outer(strip / shape.strips), i((strip % shape.strips * blockDim.x + threadIdx.x) * n) {
    const int64_t part = (cols + shape.cluster - 1) / shape.cluster;
    is_there = i < inner;
    begin = min(cluster_rank() * part, cols);
    end = is_there ? min(begin + part, cols) : begin;
  }

  // Calls f(c) with the first of the columns c, c + blockDim.y, ... that the thread loads at once.
  template <typename F>
  __device__ void for_columns(F &&f) const {
    for (int64_t c = begin + threadIdx.y; c < end; c += STRIP_COLUMNS * blockDim.y) f(c);
  }

  // In reverse order, for a second pass: what was read last is in the caches.
  template <typename F>
  __device__ void for_columns_backward(F &&f) const {
    const int64_t step = STRIP_COLUMNS * blockDim.y, first = begin + threadIdx.y;
    if (first >= end) return;
    for (int64_t c = first + (end - 1 - first) / step * step; c >= first; c -= step) f(c);
  }

  __device__ bool has(int64_t c, int u) const { return c + u * blockDim.y < end; }
};

// Loads N elements of each of the columns c, c + blockDim.y, ... `data` points at column 0.
template <typename T, int N>
__device__ inline void load_columns(acc_t<T> (&values)[STRIP_COLUMNS][N], const T *data,
                                    const Strip &strip, int64_t c, int64_t inner,
                                    acc_t<T> missing) {
  Vector<T, N> bits[STRIP_COLUMNS];
#pragma unroll
  for (int u = 0; u < STRIP_COLUMNS; ++u) {
    if (strip.has(c, u)) bits[u] = load_vector<T, N>(data + (c + u * blockDim.y) * inner);
  }
#pragma unroll
  for (int u = 0; u < STRIP_COLUMNS; ++u) {
    if (strip.has(c, u)) {
      unpack<T, N>(values[u], bits[u]);
    } else {
      for (int j = 0; j < N; ++j) values[u][j] = missing;
    }
  }
}

// The sum over a strip's columns.
template <typename A>
struct PlainSum {
  A sum = 0;
  __device__ void join(const PlainSum &other) { sum += other.sum; }
};

// Joins what the threads of a strip have of each inner element. The order depends on the shape of
// the launch alone, so that every run gives the same bits.
template <typename V, int N>
class StripJoin {
 public:
  using Slots = char[N][STRIP_THREADS][sizeof(V)];
  struct Shared {
    alignas(16) Slots threads, ctas;
  };

  __device__ StripJoin(Shared &shared, int cluster) : shared(shared), cluster(cluster) {}

  // All threads of the cluster call it.
  __device__ void join(V (&own)[N]) const {
    join_threads(own, blockDim.y);
    if (HAS_CLUSTERS && cluster > 1) {
      sync_cluster();  // after the other CTAs' reads of the previous call
      if (threadIdx.y < cluster) {
        const int slot = cluster_rank() * blockDim.x + threadIdx.x;
        for (int j = 0; j < N; ++j) send_to(threadIdx.y, &shared.ctas[j][slot], own[j]);
      }
      sync_cluster();
      if (threadIdx.y < cluster) {
        for (int j = 0; j < N; ++j) own[j] = at(shared.ctas, j, thread());
      }
      join_threads(own, cluster);
    }
  }

 private:
  Shared &shared;
  const int cluster;

  __device__ static V &at(Slots &slots, int j, int slot) {
    return *reinterpret_cast<V *>(&slots[j][slot]);
  }
  __device__ static int thread() { return threadIdx.y * blockDim.x + threadIdx.x; }

  // Joins the first `count` of the threads that have the same elements. All threads get the result.
  __device__ void join_threads(V (&own)[N], int count) const {
    __syncthreads();  // after all reads of the previous call
    if (threadIdx.y < count) {
      for (int j = 0; j < N; ++j) at(shared.threads, j, thread()) = own[j];
    }
    for (int half = count / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y >= half) continue;
      for (int j = 0; j < N; ++j) {
        own[j].join(at(shared.threads, j, thread() + half * blockDim.x));
        at(shared.threads, j, thread()) = own[j];
      }
    }
    __syncthreads();
    for (int j = 0; j < N; ++j) own[j] = at(shared.threads, j, threadIdx.x);
  }
};

// ---- on the host ----

// The shape depends neither on outer nor, beyond a strip's width, on inner: these are other rows,
// and the bits of a row may not depend on them.
inline StripShape strip_shape(int64_t cols, int64_t inner, int64_t vector_bytes, int n,
                              bool has_clusters) {
  constexpr int64_t LINE = 128, SHARE = 32 << 10;  // bytes
  const int64_t lanes = ceil_div(inner, n);
  // The columns that x lanes process, with those that are past the end.
  const auto padded = [&](int x) {
    const int64_t at_once = STRIP_THREADS / x * STRIP_COLUMNS;
    return ceil_div(cols, at_once) * at_once;
  };
  int x = 1;
  while (x < STRIP_THREADS && x < lanes &&
         (x * vector_bytes < LINE || 5 * padded(2 * x) <= 4 * padded(x))) {
    x *= 2;
  }
  // A CTA of a cluster has at least SHARE bytes, which take longer than the cluster's barriers.
  const int y = STRIP_THREADS / x;
  int cluster = 1;
  while (has_clusters && 2 * cluster <= std::min(y, 8) &&
         cols * x * vector_bytes >= 2 * cluster * SHARE) {
    cluster *= 2;
  }
  return {dim3(x, y), cluster, ceil_div(lanes, int64_t{x})};
}

// Calls f(N) with the number of elements that a thread loads at once, as a constant.
template <typename T, typename F>
cudaError_t with_strip_vector(bool is_aligned, int64_t inner, F &&f) {
  if constexpr (!std::is_same_v<T, double>) {
    if (is_aligned && inner % VECTOR<T> == 0) return f(std::integral_constant<int, VECTOR<T>>{});
  }
  return f(std::integral_constant<int, 1>{});
}

// Launches a kernel whose threads load N elements of type T at once.
template <typename T, int N, typename Args>
cudaError_t launch_strips(void (*kernel)(StripParams<Args>), const Args &args, int64_t outer,
                          int64_t cols, int64_t inner, cudaStream_t stream) {
  Device device;
  cudaError_t error = current_device(device);
  if (error != cudaSuccess) return error;
  const bool has_clusters = device.has_sm_90_code && device.clusters[3] > 0;
  StripParams<Args> params{args, strip_shape(cols, inner, N * sizeof(T), N, has_clusters)};
  const int cluster = params.shape.cluster;
  const int64_t clusters = std::min<int64_t>(outer * params.shape.strips, INT32_MAX / cluster);
  LaunchConfig config(clusters * cluster, params.shape.threads, stream);
  const auto function = reinterpret_cast<const void *>(kernel);
  if (cluster > 1) error = config.set_cluster(function, 0, cluster);
  void *parameters[] = {&params};
  return error == cudaSuccess ? cudaLaunchKernelExC(&config, function, parameters) : error;
}

}  // namespace rows

#endif
