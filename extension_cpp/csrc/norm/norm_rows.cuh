// How the fast kernels of norm_forward_cuda.cu and norm_backward_cuda.cu walk over rows.
//
// A team of TEAM threads takes a row; a block of THREADS threads is one team or several, or the blocks of a cluster together
// are one. The blocks are persistent. Thread t of a team owns the 16-byte vectors t, t + TEAM, ... of every row it meets, at most
// K of them, so that weights and sums over the rows stay in its registers. The rows pass through a ring in shared memory: a
// thread copies its own vectors several rows ahead, asynchronously, and no other thread reads them. No load ever waits for
// a sum.
//
// Odd widths. Row r begins (phase + r * cols) % N elements past an aligned address. Rows whose numbers differ by a multiple of
// `classes` share that offset: a block takes its rows class by class, and within a class every access is aligned and every
// column has its place. Of a vector that straddles the end of a row, what lies outside is set to zero in shared memory.
#ifndef EXTENSION_CPP_NORM_ROWS_CUH
#define EXTENSION_CPP_NORM_ROWS_CUH

#include <algorithm>
#include <type_traits>

#include "common/cuda_async.cuh"
#include "common/cuda_reduce.cuh"
#include "common/cuda_vector.cuh"
#include "norm/norm.h"

namespace norm_cuda {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int MAX_CLUSTER = 16;
constexpr int MAX_STAGES = 4;

// What the walk over the rows depends on, besides the template's TEAM and K.
struct Geometry {
  int64_t rows;
  int cols;
  float per_col;   // 1 / cols
  int classes;     // 1 where rows are aligned alike
  int phase;       // elements from an aligned address to the first row; for all tensors the same
  int stages;      // rows in flight
  int cluster;     // blocks that share a row
  int slice;       // vectors of a row that one block of the cluster takes
  int64_t chunks;  // shares of the rows: one a block or cluster
};

// Where class p begins when the rows are listed class by class.
__host__ __device__ inline int64_t class_begin(const Geometry &g, int64_t p) {
  const int64_t more = g.rows % g.classes;
  return p * (g.rows / g.classes) + (p < more ? p : more);
}

// The columns of one thread in the rows of one class: `present` vectors, of which the first may begin before the row (left)
// and the last may end behind it (right).
template <typename T, int TEAM, int K>
struct Columns {
  static constexpr int N = 16 / sizeof(T);
  static constexpr int STEP = TEAM * N;  // from vector to vector
  static_assert(K * N <= 32, "a thread's columns are the bits of a word");
  int first;       // column of vector 0; negative where that begins before the row
  int present;     // vectors
  uint32_t valid;  // bit k * N + j: element j of vector k lies in the row
  bool left, right;

  __device__ Columns(const Geometry &g, int klass, int lane, int rank) {
    const int phase = static_cast<int>((g.phase + static_cast<int64_t>(klass) * g.cols) % N);
    const int limit = g.cluster == 1 ? g.cols : min(g.cols, (rank + 1) * g.slice * N - phase);
    first = (rank * g.slice + lane) * N - phase;
    present = 0;
    valid = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * STEP >= limit) continue;
      ++present;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int c = first + k * STEP + j;
        if (c >= 0 && c < g.cols) valid |= 1u << (k * N + j);
      }
    }
    left = present > 0 && first < 0;
    right = present > 0 && first + (present - 1) * STEP + N > g.cols;
  }
  __device__ bool in_row(int k, int j) const { return valid >> (k * N + j) & 1; }
  __device__ bool whole(int k) const { return k < present - right && k >= left; }
  __device__ uint32_t valid_of(int k) const { return valid >> (k * N) & ((1u << N) - 1); }
};

// Element by element between a slot and a row, where `valid` has bits: of vectors that straddle an end of the row.
template <typename T>
__device__ inline void load_elements(uint4 *slot, const T *from, uint32_t valid) {
  constexpr int N = 16 / sizeof(T);
  T v[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = valid >> j & 1 ? from[j] : from_acc<T>(0.0f);
  uint4 bits;
  memcpy(&bits, v, sizeof bits);
  store_shared(slot, bits);
}

template <typename T>
__device__ inline void store_elements(T *to, const uint4 *slot, uint32_t valid) {
  constexpr int N = 16 / sizeof(T);
  const uint4 bits = load_shared(slot);
  T v[N];
  memcpy(v, &bits, sizeof v);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (valid >> j & 1) to[j] = v[j];
  }
}

// Zeros where `valid` has no bits.
template <typename T>
__device__ inline void clear_elements(uint4 *slot, uint32_t valid) {
  uint4 bits = load_shared(slot);
  uint32_t *words[4] = {&bits.x, &bits.y, &bits.z, &bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      *words[i] &= valid >> i & 1 ? ~0u : 0u;
    } else {
      *words[i] &= (valid >> 2 * i & 1 ? 0xffffu : 0u) | (valid >> (2 * i + 1) & 1 ? 0xffff0000u : 0u);
    }
  }
  store_shared(slot, bits);
}

// One tensor's rows on their way through one thread: `next` is where its vector 0 of the next row to fetch lies.
template <typename T, int TEAM, int K>
struct Fetcher {
  using Cols = Columns<T, TEAM, K>;
  const T *next;
  int64_t step;

  __device__ Fetcher(const T *data, int64_t row, int64_t rows_step, int64_t stride, const Cols &columns)
      : next(data + row * stride + columns.first), step(rows_step * stride) {}

  // Begins to copy the row to slots[k * THREADS]. Vectors that reach out of the tensor, of its first or last row, are
  // copied element by element, so that nothing outside is read.
  __device__ void fetch(uint4 *slots, const Cols &columns, bool is_first, bool is_last) {
    const bool skip_left = columns.left && is_first, skip_right = columns.right && is_last;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < columns.present - skip_right && k >= skip_left) copy_async(slots + k * THREADS, next + k * Cols::STEP);
    }
    const int last = columns.present - 1;
    if (skip_left) load_elements(slots, next, columns.valid_of(0));
    if (skip_right) load_elements(slots + last * THREADS, next + last * Cols::STEP, columns.valid_of(last));
    next += step;
  }
};

// Zeros in place of what this thread's vectors hold from outside the row.
template <typename T, int TEAM, int K>
__device__ inline void clear_outside(uint4 *slots, const Columns<T, TEAM, K> &columns) {
  const int last = columns.present - 1;
  if (columns.left) clear_elements<T>(slots, columns.valid_of(0));
  if (columns.right) clear_elements<T>(slots + last * THREADS, columns.valid_of(last));
}

// All K vectors of this thread, on their way before the first is used.
template <int K>
__device__ inline void load_slots(uint4 (&v)[K], const uint4 *slots) {
#pragma unroll
  for (int k = 0; k < K; ++k) v[k] = load_shared(slots + k * THREADS);
}

// Writes vector k of a row; one that straddles an end goes to its slot, for store_edges.
template <typename T, int TEAM, int K>
__device__ inline void store_vector(T *row, uint4 *slots, int k, const float (&v)[16 / sizeof(T)],
                                    const Columns<T, TEAM, K> &columns) {
  constexpr int N = 16 / sizeof(T);
  if (columns.whole(k)) {
    store<T, N>(row + k * TEAM * N, v);
  } else if (k < columns.present) {
    T elements[N];
#pragma unroll
    for (int j = 0; j < N; ++j) elements[j] = from_acc<T>(v[j]);
    uint4 bits;
    memcpy(&bits, elements, sizeof bits);
    store_shared(slots + k * THREADS, bits);
  }
}

template <typename T, int TEAM, int K>
__device__ inline void store_edges(T *row, const uint4 *slots, const Columns<T, TEAM, K> &columns) {
  const int last = columns.present - 1;
  if (columns.left) store_elements(row, slots, columns.valid_of(0));
  if (columns.right && !(columns.left && last == 0)) {
    store_elements(row + last * columns.STEP, slots + last * THREADS, columns.valid_of(last));
  }
}

// This thread's part of a row of weights; `missing` where there are none, 0 outside the row.
template <typename T, int TEAM, int K>
__device__ inline void load_weights(float (&w)[K][16 / sizeof(T)], const void *weights, bool is_float, float missing,
                                    const Columns<T, TEAM, K> &columns) {
  constexpr int N = 16 / sizeof(T);
  const T *p = static_cast<const T *>(weights) + columns.first;
  const float *floats = static_cast<const float *>(weights) + columns.first;
  const bool vectors = weights != nullptr && !is_float && reinterpret_cast<uintptr_t>(p) % 16 == 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (vectors && columns.whole(k)) {
      load<T, N>(w[k], p + k * columns.STEP);
      continue;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      w[k][j] = 0;
      if (!columns.in_row(k, j)) continue;
      const int c = k * columns.STEP + j;
      w[k][j] = weights == nullptr ? missing : is_float ? floats[c] : to_acc(p[c]);
    }
  }
}

// Where the warps of a team leave their numbers for each other: a float2 a warp, `slots` rows in turn. Within a block two rows
// do, with a barrier a row. In a cluster every warp sends its numbers to every block, nobody waits before the next row's
// numbers are sent, and four rows are on their way at most.
struct Exchange {
  float2 slots[4][MAX_CLUSTER * WARPS];
  uint64_t arrived[4];
};

template <bool CLUSTER>
__device__ inline void open_exchange(Exchange &exchange) {
#if HAS_CLUSTERS
  if constexpr (CLUSTER) {
    if (threadIdx.x == 0) {
      for (uint64_t &barrier : exchange.arrived) init_mbarrier(&barrier);
      fence_mbarrier_init();
    }
    sync_cluster();
  }
#endif
}

// Gives the warp's numbers for row number i of this block, the same in all its lanes, to the other warps of the team.
template <int TEAM, bool CLUSTER>
__device__ inline void post(Exchange &exchange, int i, float2 value, int rank, int cluster) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (CLUSTER) {
#if HAS_CLUSTERS
    if (threadIdx.x == 0) expect_bytes(&exchange.arrived[i % 4], cluster * WARPS * sizeof(float2));
    if (lane < cluster) send(&exchange.slots[i % 4][rank * WARPS + warp], &exchange.arrived[i % 4], lane, value);
#endif
  } else if constexpr (TEAM > 32) {
    if (lane == 0) exchange.slots[i % 2][warp] = value;
  }
}

// Waits for the numbers of row i; they are then at the address returned, one a warp of the team.
template <int TEAM, bool CLUSTER>
__device__ inline const float2 *collect(Exchange &exchange, int i) {
  if constexpr (CLUSTER) {
#if HAS_CLUSTERS
    wait_phase(&exchange.arrived[i % 4], i / 4 % 2);
#endif
    return exchange.slots[i % 4];
  } else {
    const int team = threadIdx.x / TEAM;
    sync_group(1 + team, TEAM);
    return exchange.slots[i % 2] + team * (TEAM / 32);
  }
}

// ---- host: which kernel for which rows ----

constexpr int MAX_CLASSES = 8;
// Most partial rows: two blocks on each multiprocessor of the largest chip.
constexpr int64_t MAX_PARTS = 2 * 160 + MAX_CLASSES;

// A launch and its attributes.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Launch(unsigned blocks, dim3 threads, size_t shared, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
  }
  // Blocks run in clusters of this size.
  void cluster(int size) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  }
  // May be started before the kernel ahead of it has ended (which it then waits for itself).
  void overlap() {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
};

// Whether what runs of this function was compiled for sm_90 or later: an older build that the driver translates for a newer
// chip neither waits for the kernel ahead of it nor knows clusters.
inline bool is_for_sm_90(const void *function) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, function) == cudaSuccess && attributes.ptxVersion >= 90;
}

template <typename T>
struct RowsOf {
  const T *data;  // NULL: is not there
  int64_t stride;
};

// Fills in rows, cols, phase and classes; false if the rows of the tensors are not all misaligned alike.
template <typename T>
bool align_rows(Geometry &g, int64_t rows, int64_t cols, const RowsOf<T> *tensors, int count) {
  constexpr int N = 16 / sizeof(T);
  g.rows = rows;
  g.cols = static_cast<int>(cols);
  g.per_col = 1 / static_cast<float>(cols);
  if (cols > THREADS * 32 * MAX_CLUSTER) return false;
  g.phase = static_cast<int>(reinterpret_cast<uintptr_t>(tensors[0].data) / sizeof(T) % N);
  for (int i = 0; i < count; ++i) {
    if (tensors[i].data == nullptr) continue;
    const int phase = static_cast<int>(reinterpret_cast<uintptr_t>(tensors[i].data) / sizeof(T) % N);
    if (phase != g.phase || (rows > 1 && (tensors[i].stride - cols) % N != 0)) return false;
  }
  g.classes = 1;
  while (g.classes * cols % N != 0) g.classes *= 2;
  if (g.classes > rows) g.classes = static_cast<int>(rows);
  return true;
}

// Calls f(team, k, cluster) with the smallest shape that has room for a row.
template <typename T, typename F>
cudaError_t with_shape(const Geometry &g, F &&f) {
  constexpr int N = 16 / sizeof(T);
  const int64_t vectors = ceil_div(g.cols + (g.classes > 1 || g.phase > 0 ? N - 1 : 0), N), slots = vectors * N;
  using std::integral_constant;
  const auto with = [&](auto team, auto elements) {
    return f(team, integral_constant<int, elements / N>{}, integral_constant<bool, false>{});
  };
  if (slots <= 64) return with(integral_constant<int, 8>{}, integral_constant<int, 8>{});
  if (slots <= 256) return with(integral_constant<int, 32>{}, integral_constant<int, 8>{});
  if (slots <= 512) return with(integral_constant<int, 32>{}, integral_constant<int, 16>{});
  if (slots <= 768) return with(integral_constant<int, 32>{}, integral_constant<int, 24>{});
  if (slots <= 1024) return with(integral_constant<int, 32>{}, integral_constant<int, 32>{});
  if (slots <= 1536) return with(integral_constant<int, 64>{}, integral_constant<int, 24>{});
  if (slots <= 2048) return with(integral_constant<int, 64>{}, integral_constant<int, 32>{});
  if (slots <= 3072) return with(integral_constant<int, 128>{}, integral_constant<int, 24>{});
  if (slots <= 4096) return with(integral_constant<int, 128>{}, integral_constant<int, 32>{});
  if (slots <= 6144) return with(integral_constant<int, 256>{}, integral_constant<int, 24>{});
  if (slots <= 8192) return with(integral_constant<int, 256>{}, integral_constant<int, 32>{});
  return f(integral_constant<int, 256>{}, integral_constant<int, 32 / N>{}, integral_constant<bool, true>{});
}

// Launches `kernel`, whose ring has `tensors` vectors for each of K, on as many blocks as run at once. Where the chip has no
// room for the ring or no clusters, nothing is launched.
template <int TENSORS, int TEAM, int K, bool CLUSTER, int BLOCKS, typename P>
cudaError_t launch_rows(void (*kernel)(P), P &p, int64_t max_blocks, cudaStream_t stream, bool &launched) {
  constexpr int stage = TENSORS * K * THREADS * 16, own = sizeof(Exchange) + 1024;
  int device, processors, most, most_a_block;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&most_a_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int shared = std::min(most / BLOCKS - own, most_a_block - static_cast<int>(sizeof(Exchange)));
  p.stages = std::min(MAX_STAGES, shared / stage);
  if (p.stages < 2) return cudaSuccess;
  const auto function = reinterpret_cast<const void *>(kernel);
  const size_t bytes = static_cast<size_t>(p.stages) * stage;
  cudaError_t error =
      cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  Launch launch(1, THREADS, bytes, stream);
  p.cluster = 1;
  p.chunks = std::min<int64_t>(ceil_div(p.rows, THREADS / TEAM), processors * BLOCKS);
  if (CLUSTER) {
    if (!is_for_sm_90(function)) return cudaSuccess;
    const int N = 32 / K;
    const int64_t vectors = ceil_div(p.cols + (p.classes > 1 || p.phase > 0 ? N - 1 : 0), N);
    for (p.cluster = 2; p.cluster * TEAM * K < vectors;) p.cluster *= 2;
    if (p.cluster > MAX_CLUSTER) return cudaSuccess;
    p.slice = static_cast<int>(ceil_div(vectors, p.cluster));
    if (p.cluster > 8) {
      error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      if (error != cudaSuccess) return error;
    }
    launch.cluster(p.cluster);
    launch.config.gridDim = p.cluster;
    int clusters;
    error = cudaOccupancyMaxActiveClusters(&clusters, function, &launch.config);
    if (error != cudaSuccess) return error;
    if (clusters == 0) return cudaSuccess;
    p.chunks = std::min<int64_t>(p.rows, clusters);
  }
  p.chunks = std::min(p.chunks, max_blocks - p.classes + 1);
  launch.config.gridDim = static_cast<unsigned>(p.chunks * p.cluster);
  launched = true;
  return cudaLaunchKernelEx(&launch.config, kernel, p);
}

// The C++ type of a dtype but float64.
template <typename F>
cudaError_t with_half_or_float(dtype_t dtype, F &&f) {
  switch (dtype) {
    case DTYPE_FLOAT32: return f(float{});
    case DTYPE_BFLOAT16: return f(__nv_bfloat16{});
    case DTYPE_FLOAT16: return f(__half{});
    default: return cudaErrorInvalidValue;
  }
}

// One weight; `missing` where there are none.
template <typename T>
__device__ inline acc_t<T> weight_at(const void *weights, dtype_t dtype, double missing, int64_t c) {
  if (weights == nullptr) return static_cast<acc_t<T>>(missing);
  if (dtype == DTYPE_FLOAT32) return static_cast<const float *>(weights)[c];
  return to_acc(static_cast<const T *>(weights)[c]);
}

}  // namespace norm_cuda

#endif
