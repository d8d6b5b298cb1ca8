// What the kernels of norm_forward_cuda.cu and norm_backward_cuda.cu share: how rows meet threads.
//
// A team of TEAM threads takes a row: part of a warp, a warp, several, or a whole block. A block has THREADS threads, that is
// one team or several. Thread t of the team owns the columns t * N, (t + TEAM) * N, ... and the N - 1 behind each, at most K
// times N. N is a 16-byte vector where all rows of all tensors are aligned, else 1: odd widths go element by element, side by
// side, so that no row has ends to treat apart.
//
// The ring. Persistent blocks read ahead: one thread of a team asks for a row several turns before its time, by one bulk copy
// into shared memory (from sm_90 on; before, a row is read when its turn comes). Too many bytes on their way are slower than
// too few: reads then crowd out the writes (docs/performance.md).
//
// Clusters. A row wider than a block's registers is shared by the blocks of a cluster, a slice each. The row's sums go to all
// of them with st.async, and the sums of row i + 1 are sent before row i is finished, so that nobody waits for them.
#ifndef EXTENSION_CPP_NORM_ROWS_CUH
#define EXTENSION_CPP_NORM_ROWS_CUH

#include <algorithm>
#include <type_traits>

#include "common/cuda_async.cuh"
#include "common/cuda_dropout.cuh"
#include "common/cuda_reduce.cuh"
#include "common/cuda_vector.cuh"
#include "norm/norm.h"

namespace norm_cuda {

template <int TEAM>
constexpr int THREADS = TEAM > 256 ? TEAM : 256;
constexpr int MAX_CLUSTER = 16;
constexpr int MAX_STAGES = 6;

// What stands beside the norm (norm.h): nothing, a residual before it, or dropout behind it.
enum Fused { ALONE, ADDED, DROPPED };

// What the walk over the rows depends on, besides the template's TEAM, K and N.
struct Geometry {
  int64_t rows;
  int cols;
  float per_col;   // 1 / cols
  int stages;      // rows of a team in the ring
  int cluster;     // blocks that share a row
  int slice;       // columns of a row that one block of the cluster takes
  int64_t chunks;  // shares of the rows: one a block or cluster
};

// The columns of one thread.
template <int TEAM, int K, int N>
struct Columns {
  int begin;  // of the block's slice
  int end;
  int first;  // of this thread

  __device__ Columns(const Geometry &g, int lane, int rank)
      : begin(rank * g.slice), end(g.cluster > 1 ? min(begin + g.slice, g.cols) : g.cols), first(begin + lane * N) {}
  __device__ int column(int k) const { return first + k * TEAM * N; }
  __device__ bool has(int k) const { return column(k) < end; }
  __device__ int count() const {
    int n = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) n += has(k) ? N : 0;
    return n;
  }
};

// This thread's part of a row that begins at `row`, zeros where it has no columns.
template <typename T, int TEAM, int K, int N>
__device__ inline void load_row(Vector<T, N> (&bits)[K], const T *row, const Columns<TEAM, K, N> &columns) {
#pragma unroll
  for (int k = 0; k < K; ++k) bits[k] = columns.has(k) ? load_vector<T, N>(row + columns.column(k)) : Vector<T, N>{};
}

// weight or bias, as the kernels read it.
struct Weights {
  const void *data;  // NULL: `missing` everywhere
  float missing;
  bool is_float;

  // Whether they are there, and of x's type.
  __device__ bool is_plain() const { return data != nullptr && !is_float; }

  // N of them from column c on.
  template <typename T, int N>
  __device__ void load(float (&w)[N], int c) const {
    if (data == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = missing;
    } else if (is_float) {
      constexpr int M = N < 4 ? N : 4;
#pragma unroll
      for (int j = 0; j < N; j += M) {
        ::load<float, M>(reinterpret_cast<float(&)[M]>(w[j]), static_cast<const float *>(data) + c + j);
      }
    } else {
      ::load<T, N>(w, static_cast<const T *>(data) + c);
    }
  }
};

// This thread's part of a row of weights, 0 where it has no columns.
template <typename T, int TEAM, int K, int N>
__device__ inline void load_weights(float (&w)[K][N], const Weights &weights, const Columns<TEAM, K, N> &columns) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    memset(w[k], 0, sizeof w[k]);
    if (columns.has(k)) weights.load<T>(w[k], columns.column(k));
  }
}

// The sums of v.x and v.y over a warp, in all its lanes: one half of it sums x, the other y. CENTERED false: x alone.
template <bool CENTERED>
__device__ inline float2 warp_sum(float2 v) {
  if (!CENTERED) {
    float x[1] = {v.x};
    group_sum(x);
    return {x[0], 0};
  }
  const bool upper = threadIdx.x & 16;
  float mine[1] = {(upper ? v.y : v.x) + __shfl_xor_sync(0xffffffffu, upper ? v.x : v.y, 16)};
  group_sum(mine, 16);
  const float other = __shfl_xor_sync(0xffffffffu, mine[0], 16);
  return upper ? float2{other, mine[0]} : float2{mine[0], other};
}

// Where the warps of a team leave their numbers for each other. Within a block two rows are in turn, with a barrier a row; in a
// cluster four, and every warp sends its numbers to every block.
template <int TEAM, bool CLUSTER>
struct Exchange {
  static constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;
  float2 slots[CLUSTER ? 4 : 2][CLUSTER ? MAX_CLUSTER * WARPS : WARPS];
  uint64_t arrived[4];
  uint64_t filled[MAX_STAGES];  // of the ring

  __device__ void open(int lane) {
#if HAS_CLUSTERS
    if (lane == 0) {
      for (uint64_t &barrier : arrived) init_mbarrier(&barrier);
      for (uint64_t &barrier : filled) init_mbarrier(&barrier);
      fence_mbarrier_init();
    }
    if constexpr (CLUSTER) sync_cluster();
#endif
    __syncthreads();
  }

  // Gives the warp's numbers for row number i, the same in all its lanes, to the other warps of the team.
  __device__ void post(int i, float2 value, int rank, int cluster) {
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    if constexpr (CLUSTER) {
#if HAS_CLUSTERS
      if (threadIdx.x == 0) expect_bytes(&arrived[i % 4], cluster * WARPS * sizeof(float2));
      if (lane < cluster) send(&slots[i % 4][rank * WARPS + warp], &arrived[i % 4], lane, value);
#endif
    } else if constexpr (TEAM > 32) {
      if (lane == 0) slots[i % 2][warp] = value;
    }
  }

  // Waits for the numbers of row i; they are then at the address returned, one a warp of the team.
  __device__ const float2 *collect(int i) {
    if constexpr (CLUSTER) {
#if HAS_CLUSTERS
      wait_phase(&arrived[i % 4], i / 4 % 2);
#endif
      return slots[i % 4];
    } else {
      sync_group(1 + threadIdx.x / TEAM, TEAM);
      return slots[i % 2];
    }
  }
};

// A place in the ring, and how often the ring has gone round.
struct Place {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void advance(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The rows of TENSORS tensors on their way to one team.
template <typename T, int TENSORS, int TEAM, int K, int N, bool CLUSTER>
struct Ring {
  static constexpr int A_VECTOR = 16 / sizeof(T);
  // Vectors that a row takes: it may begin and end within one.
  static constexpr int SLOT = (K * TEAM * N + A_VECTOR - 1) / A_VECTOR + (N == 1 ? 1 : 0);
  static constexpr int STAGE = TENSORS * SLOT;
  uint4 *slots;  // of this team
  Exchange<TEAM, CLUSTER> &exchange;
  int stages;
  Place next, now;  // of the next row to ask for, and of the next one to read

  // Elements from an aligned address to `p`.
  __device__ static int skew(const T *p) { return N == 1 ? reinterpret_cast<uintptr_t>(p) % 16 / sizeof(T) : 0; }

  // By one thread of the team, when nobody reads the place any more. A tensor may be NULL. is_last: of the tensors, behind
  // which nothing is read.
  __device__ void fetch(const T *const (&rows)[TENSORS], const Columns<TEAM, K, N> &columns, bool is_last) {
#if HAS_CLUSTERS
    uint64_t *const filled = &exchange.filled[next.slot];
    uint4 *const slot = slots + next.slot * STAGE;
    int vectors[TENSORS], sum = 0;
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      vectors[t] = 0;
      if (rows[t] == nullptr) continue;
      const T *const from = rows[t] + columns.begin;
      const int elements = max(columns.end - columns.begin, 0) + skew(from);
      vectors[t] = (elements + A_VECTOR - 1) / A_VECTOR;
      if (N == 1 && is_last && elements % A_VECTOR > 0) {
        --vectors[t];
        for (int e = vectors[t] * A_VECTOR; e < elements; ++e) {
          if (e >= skew(from)) reinterpret_cast<T *>(slot + t * SLOT)[e] = from[e - skew(from)];
        }
      }
      sum += vectors[t];
    }
    expect_bytes(filled, sum * 16);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      const T *const from = rows[t] + columns.begin;
      if (vectors[t] > 0) copy_bulk(slot + t * SLOT, from - skew(from), vectors[t] * 16, filled);
    }
    next.advance(stages);
#endif
  }

  __device__ void wait() const {
#if HAS_CLUSTERS
    wait_copies(&exchange.filled[now.slot], now.parity);
#endif
  }

  // This thread's part of tensor t at `now`; the row begins at `row`.
  __device__ void load(Vector<T, N> (&bits)[K], int t, const T *row, const Columns<TEAM, K, N> &columns) const {
#if HAS_CLUSTERS
    const uint4 *const slot = slots + now.slot * STAGE + t * SLOT;
    if constexpr (N == 1) {
      const auto *from = reinterpret_cast<const Vector<T, 1> *>(slot) + skew(row + columns.begin) - columns.begin;
#pragma unroll
      for (int k = 0; k < K; ++k) bits[k] = columns.has(k) ? from[columns.column(k)] : Vector<T, 1>{};
    } else {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        bits[k] = {};
        if (columns.has(k)) bits[k] = load_shared(slot + threadIdx.x % TEAM + k * TEAM);
      }
    }
#else
    load_row<T>(bits, row, columns);
#endif
  }
};

// ---- host: which kernel for which rows ----

// Most partial rows of the weight gradients: as many as blocks, or clusters, run at once on the largest chip; narrow rows have two
// blocks a multiprocessor. Not fewer than 64, for the plain kernel's sake.
inline int64_t max_parts(int64_t cols) {
  if (cols <= 1024) return 320;
  return std::clamp<int64_t>(160 * 8192 / cols, 64, 160);
}

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

// Fills in what the shape fixes; false if it is beyond the fast kernels' indices.
inline bool set_shape(Geometry &g, int64_t rows, int64_t cols) {
  if (cols > 1 << 24) return false;
  g.rows = rows;
  g.cols = static_cast<int>(cols);
  g.per_col = 1 / static_cast<float>(cols);
  g.cluster = 1;
  return true;
}

// Whether rows from `data` on, `stride` elements apart, all begin at a multiple of 16 bytes.
template <typename T>
bool is_aligned(const void *data, int64_t stride = 0) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

// A kernel's shape: threads a row, and elements a thread.
template <int TEAM_, int ELEMENTS_>
struct Shape {
  static constexpr int TEAM = TEAM_, ELEMENTS = ELEMENTS_;
};
template <typename...>
struct Shapes {};

// Calls f(shape) with the first of the shapes that has room for a row; cudaErrorNotSupported if none has.
template <typename F, typename... S>
cudaError_t with_shape(int cols, Shapes<S...>, F &&f) {
  cudaError_t error = cudaErrorNotSupported;
  (void)((cols <= S::TEAM * S::ELEMENTS && (error = f(S{}), true)) || ...);
  return error;
}

// Launches `kernel` on as many blocks (or clusters) as run at once. Where the chip has no room for two rows, nothing is launched.
template <typename RING, int TEAM, int K, int N, bool CLUSTER, int BLOCKS, typename P>
cudaError_t launch_ring(void (*kernel)(P), P &p, int ring_bytes, int64_t max_blocks, cudaStream_t stream,
                        bool &launched) {
  constexpr int threads = THREADS<TEAM>, teams = threads / TEAM, stage = teams * RING::STAGE * 16;
  constexpr int own = teams * static_cast<int>(sizeof(Exchange<TEAM, CLUSTER>));
  const auto function = reinterpret_cast<const void *>(kernel);
  const bool for_sm_90 = is_for_sm_90(function);
  int device, processors, most, most_a_block;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  cudaDeviceGetAttribute(&most_a_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int room = std::min(most / BLOCKS - 1024, most_a_block) - own;
  p.stages = for_sm_90 ? std::min({MAX_STAGES, std::max(2, ring_bytes / stage), room / stage}) : 0;
  // The blocks also add their teams' sums there, a float a column and team.
  const int bytes = std::max(p.stages * stage, teams > 1 ? teams * p.cols * 4 : 0);
  if ((for_sm_90 && p.stages < 2) || bytes > room || (CLUSTER && !for_sm_90)) return cudaSuccess;
  cudaError_t error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  Launch launch(1, threads, bytes, stream);
  p.chunks = std::min<int64_t>(ceil_div(p.rows, teams), processors * BLOCKS);
  if (CLUSTER) {
    for (p.cluster = 2; p.cluster * TEAM * K * N < p.cols;) p.cluster *= 2;
    if (p.cluster > MAX_CLUSTER) return cudaSuccess;
    p.slice = static_cast<int>(ceil_div(p.cols, p.cluster * N)) * N;
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
  p.chunks = std::min(p.chunks, max_blocks);
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

}  // namespace norm_cuda

#endif
