// Softmax and the losses on the GPU for rows that are not held in registers: dimensions other than
// the last, float64, unaligned tensors, and rows too wide for a cluster.
//
// A strip consists of neighbouring inner elements with all their columns. A cluster of CTAs
// processes a strip, and each of its CTAs processes an equal share of the columns. Threads with the
// same threadIdx.x have the same N neighbouring inner elements. Threads with different threadIdx.y
// read different columns of these elements at the same time.
#ifndef EXTENSION_CPP_ROWS_STRIPS_CUH
#define EXTENSION_CPP_ROWS_STRIPS_CUH

#include <algorithm>

#include "rows/launch.cuh"

namespace rows {

constexpr int STRIP_THREADS = 256;
// Numbers of CTAs per SM. They limit the registers per thread: to 80, and in backward to 128.
constexpr int STRIP_CTAS = 3, STRIP_BACKWARD_CTAS = 2;
constexpr int STRIP_COLUMNS = 4;  // columns that a thread loads at once

struct StripShape {
  dim3 threads;
  int cluster;
  int64_t strips;  // number of strips per outer index
};

template <typename Args>
struct StripParams : Args {
  StripShape shape;
};

// ---- in kernels ----

// The part of a strip that a thread processes.
struct Strip {
  int64_t outer, i;    // outer and inner index of the thread's first element
  int64_t begin, end;  // the CTA's columns; an empty range if the thread has no elements
  bool is_there;       // whether the thread has elements

  __device__ Strip(int64_t strip, const StripShape &shape, int64_t cols, int64_t inner, int n)
      : outer(strip / shape.strips), i((strip % shape.strips * blockDim.x + threadIdx.x) * n) {
    const int64_t part = (cols + shape.cluster - 1) / shape.cluster;
    is_there = i < inner;
    begin = min(cluster_rank() * part, cols);
    end = is_there ? min(begin + part, cols) : begin;
  }

  // Calls f(c) for each group of columns c, c + blockDim.y, ... that the thread loads at once.
  template <typename F>
  __device__ void for_columns(F &&f) const {
    for (int64_t c = begin + threadIdx.y; c < end; c += STRIP_COLUMNS * blockDim.y) f(c);
  }

  // Does the same as for_columns() in reverse order. A second pass uses it, because the columns
  // that the first pass read last are still in the caches.
  template <typename F>
  __device__ void for_columns_backward(F &&f) const {
    const int64_t step = STRIP_COLUMNS * blockDim.y, first = begin + threadIdx.y;
    if (first >= end) return;
    for (int64_t c = first + (end - 1 - first) / step * step; c >= first; c -= step) f(c);
  }

  __device__ bool has(int64_t c, int u) const { return c + u * blockDim.y < end; }
};

// Loads N elements of each of the columns c, c + blockDim.y, ... `data` points to column 0. Values
// of columns that the CTA does not process are `missing`.
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

// A sum over the columns of a strip.
template <typename A>
struct PlainSum {
  A sum = 0;
  __device__ void join(const PlainSum &other) { sum += other.sum; }
};

// Joins the partial results that the threads of a strip have for each inner element. The order of
// the joins depends only on the shape of the launch, so that every run gives the same bits.
template <typename V, int N>
class StripJoin {
 public:
  using Slots = char[N][STRIP_THREADS][sizeof(V)];
  struct Shared {
    alignas(16) Slots threads, ctas;
  };

  __device__ StripJoin(Shared &shared, int cluster) : shared(shared), cluster(cluster) {}

  // Replaces `own` by the result over all columns. All threads of the cluster must call it.
  __device__ void join(V (&own)[N]) const {
    join_threads(own, blockDim.y);
    if (HAS_CLUSTERS && cluster > 1) {
      sync_cluster();  // waits until the other CTAs have read the previous call's values
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

  // Joins the values of the first `count` threads with the same inner elements, for all threads.
  __device__ void join_threads(V (&own)[N], int count) const {
    __syncthreads();  // waits until the previous call's values have been read
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

// Returns the shape of a launch. The shape does not depend on outer, and on inner only up to the
// width of a strip, because the bits of a row must not depend on the number of other rows.
inline StripShape strip_shape(int64_t cols, int64_t inner, int64_t vector_bytes, int n,
                              bool has_clusters) {
  constexpr int64_t LINE = 128, SHARE = 32 << 10;  // bytes
  const int64_t lanes = ceil_div(inner, n);
  // Returns cols, rounded up to a multiple of the columns that a CTA with x lanes reads at once.
  const auto padded = [&](int x) {
    const int64_t at_once = STRIP_THREADS / x * STRIP_COLUMNS;
    return ceil_div(cols, at_once) * at_once;
  };
  int x = 1;
  while (x < STRIP_THREADS && x < lanes &&
         (x * vector_bytes < LINE || 5 * padded(2 * x) <= 4 * padded(x))) {
    x *= 2;
  }
  // A CTA of a cluster reads at least SHARE bytes, which takes longer than the cluster's barriers.
  const int y = STRIP_THREADS / x;
  int cluster = 1;
  while (has_clusters && 2 * cluster <= std::min(y, 8) &&
         cols * x * vector_bytes >= 2 * cluster * SHARE) {
    cluster *= 2;
  }
  return {dim3(x, y), cluster, ceil_div(lanes, int64_t{x})};
}

// Calls f(N) with a constant N, the number of elements that a thread loads at once.
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
