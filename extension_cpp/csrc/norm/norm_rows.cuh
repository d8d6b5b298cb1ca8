// What the kernels of norm_forward_cuda.cu and norm_backward_cuda.cu share: how rows meet threads.
//
// A team of TEAM threads takes a row: part of a warp, a warp, several, or a whole block. A block has THREADS threads, that is
// one team or several. Thread t of the team owns the columns t * N, (t + TEAM) * N, ... and the N - 1 behind each, at most K
// times N, where N is a 16-byte vector.
//
// ODD: the width is no multiple of N, so that most rows begin between two multiples of 16 bytes, those of all tensors alike. The
// vectors are then those of memory, but for the two at the ends of the row, which hold elements of the rows beside it: the up to
// 2 (N - 1) columns in them are shared out one a thread, its `edge`. The rows of a thread are a multiple of N apart: all begin
// alike, its columns never change, and weights and their gradients may stay in its registers.
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
template <typename T>
constexpr int VECTOR = 16 / sizeof(T);  // elements
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
  int slice;       // columns of a row that one block takes, in vectors
  int slot;        // vectors that they take in the ring
  int64_t chunks;  // shares of the rows: one a block or cluster
};

// The columns of one thread.
template <int TEAM, int K, int N, bool ODD>
struct Columns {
  int begin;  // of the block's share of the row; up to N - 1 before it
  int end;
  int first;  // of this thread
  int limit;  // of the vectors
  int edge;   // this thread's single column; -1: none

  // For `row`, and for every row a multiple of N away.
  __device__ Columns(const Geometry &g, int64_t row, int lane, int rank) : edge(-1) {
    // The row's vectors are those from `whole` to `tail`. A block takes g.slice columns of them; the first one also what is
    // before, the one that takes the last of them also what is behind.
    const int skew = ODD ? static_cast<int>(row * g.cols % N) : 0, whole = skew > 0 ? N - skew : 0;
    const int tail = ODD ? whole + max(g.cols - whole, 0) / N * N : g.cols;
    const int from = whole + rank * g.slice, to = from + g.slice;
    begin = rank == 0 ? -skew : min(from, tail);
    end = to < tail ? to : rank == 0 || from < tail ? g.cols : begin;
    first = from + lane * N;
    limit = min(to, tail);
    if constexpr (ODD) {
      static_assert(TEAM >= 2 * (N - 1));
      const int head = rank == 0 ? min(whole, g.cols) : 0;
      if (lane < head) edge = lane;
      if (lane >= head && limit + lane - head < end) edge = limit + lane - head;
    }
  }
  __device__ int column(int k) const { return first + k * TEAM * N; }
  __device__ bool has(int k) const { return column(k) < limit; }
  __device__ bool has_edge() const { return ODD && edge >= 0; }
  __device__ int count() const {
    int n = has_edge();
#pragma unroll
    for (int k = 0; k < K; ++k) n += has(k) ? N : 0;
    return n;
  }
};

// A thread's part of a row, zeros where it has no columns.
template <typename T, int TEAM, int K, int N, bool ODD>
struct Part {
  Vector<T, N> bits[K];
  T edge;

  // From the row that begins at `row`.
  __device__ void load(const T *row, const Columns<TEAM, K, N, ODD> &columns) {
#pragma unroll
    for (int k = 0; k < K; ++k) bits[k] = columns.has(k) ? load_vector<T, N>(row + columns.column(k)) : Vector<T, N>{};
    if (ODD) edge = columns.has_edge() ? row[columns.edge] : from_acc<T>(0);
  }
  // From shared memory, where column `begin` is at `slot`.
  __device__ void load_slot(const uint4 *slot, const Columns<TEAM, K, N, ODD> &columns) {
    const uint4 *const first = slot + (ODD ? (columns.first - columns.begin) / N : threadIdx.x % TEAM);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      bits[k] = {};
      if (columns.has(k)) bits[k] = load_shared(first + k * TEAM);
    }
    if (ODD) {
      edge = from_acc<T>(0);
      if (columns.has_edge()) edge = reinterpret_cast<const T *>(slot)[columns.edge - columns.begin];
    }
  }
};

// weight or bias, as the kernels read it.
struct Weights {
  const void *data;  // NULL: `missing` everywhere
  float missing;
  bool is_float;

  // Whether they are there, and of x's type.
  __device__ bool is_plain() const { return data != nullptr && !is_float; }

  // N of them from column c on; ALIGNED: vectors begin at multiples of 16 bytes.
  template <typename T, int N, bool ALIGNED = true>
  __device__ void load(float (&w)[N], int c) const {
    if (data == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = missing;
    } else if (is_float) {
      load_as<float, N, ALIGNED>(w, c);
    } else {
      load_as<T, N, ALIGNED>(w, c);
    }
  }

  template <typename W, int N, bool ALIGNED>
  __device__ void load_as(float (&w)[N], int c) const {
    constexpr int VECTOR_OF_W = 16 / sizeof(W), M = !ALIGNED ? 1 : N < VECTOR_OF_W ? N : VECTOR_OF_W;
#pragma unroll
    for (int j = 0; j < N; j += M) {
      ::load<W, M>(reinterpret_cast<float(&)[M]>(w[j]), static_cast<const W *>(data) + c + j);
    }
  }
};

// This thread's part of a row of weights, 0 where it has no columns.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void load_weights(float (&w)[K][N], float (&edge)[1], const Weights &weights,
                                    const Columns<TEAM, K, N, ODD> &columns) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    memset(w[k], 0, sizeof w[k]);
    if (columns.has(k)) weights.load<T, N, !ODD>(w[k], columns.column(k));
  }
  edge[0] = 0;
  if (columns.has_edge()) weights.load<T, 1>(edge, columns.edge);
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

// Where the warps of a team leave their numbers for each other, for up to four rows at a time. Within a block a barrier a row
// follows; in a cluster every warp sends its numbers to every block.
template <int TEAM, bool CLUSTER>
struct Exchange {
  static constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;
  float2 slots[4][CLUSTER ? MAX_CLUSTER * WARPS : WARPS];
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
      if (lane == 0) slots[i % 4][warp] = value;
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
      return slots[i % 4];
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
template <typename T, int TENSORS, int TEAM, int K, int N, bool CLUSTER, bool ODD>
struct Ring {
  using Mine = Columns<TEAM, K, N, ODD>;
  uint4 *slots;  // of this team
  Exchange<TEAM, CLUSTER> &exchange;
  int stages;
  int size;         // of one tensor's slot
  Place next, now;  // of the next row to ask for, and of the next one to read

  // By one thread of the team, when nobody reads the place any more. A tensor may be NULL. is_last: of the tensors, behind
  // which nothing is read.
  __device__ void fetch(const T *const (&rows)[TENSORS], const Mine &columns, bool is_last) {
#if HAS_CLUSTERS
    uint64_t *const filled = &exchange.filled[next.slot];
    uint4 *const slot = slots + next.slot * TENSORS * size;
    const int elements = max(columns.end - columns.begin, 0);
    int vectors = (elements + N - 1) / N, sum = 0;
    if constexpr (ODD) {
      if (is_last) {
        vectors = elements / N;
        for (int e = max(vectors * N, -columns.begin); e < elements; ++e) {
          for (int t = 0; t < TENSORS; ++t) {
            if (rows[t] != nullptr) reinterpret_cast<T *>(slot + t * size)[e] = rows[t][columns.begin + e];
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) sum += rows[t] == nullptr ? 0 : vectors;
    expect_bytes(filled, sum * 16);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      if (rows[t] != nullptr && vectors > 0) copy_bulk(slot + t * size, rows[t] + columns.begin, vectors * 16, filled);
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
  __device__ void load(Part<T, TEAM, K, N, ODD> &part, int t, const T *row, const Mine &columns) const {
#if HAS_CLUSTERS
    part.load_slot(slots + (now.slot * TENSORS + t) * size, columns);
#else
    part.load(row, columns);
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

// Whether what runs of this kernel was compiled for sm_90 or later: an older build that the driver translates for a newer chip
// neither waits for the kernel ahead of it nor knows clusters. Asked once for the device that a thread uses.
template <auto KERNEL>
bool is_for_sm_90(int device) {
  thread_local int known = -1;
  thread_local bool is = false;
  if (device != known) {
    cudaFuncAttributes attributes;
    is = cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.ptxVersion >= 90;
    known = device;
  }
  return is;
}

// Fills in what the shape fixes; false if it is beyond the fast kernels' indices.
inline bool set_shape(Geometry &g, int64_t rows, int64_t cols) {
  if (cols > 1 << 24) return false;
  g.rows = rows;
  g.cols = static_cast<int>(cols);
  g.per_col = 1 / static_cast<float>(cols);
  g.cluster = 1;
  g.slice = g.cols;
  return true;
}

inline bool is_aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether rows `stride` elements apart begin between multiples of 16 bytes as those of contiguous tensors do.
template <typename T>
bool is_in_step(const Geometry &g, const void *data, int64_t stride) {
  constexpr int N = 16 / sizeof(T);
  return data == nullptr || (is_aligned(data) && (g.rows == 1 || (stride - g.cols) % N == 0));
}

// A kernel's shape: threads a row, and elements a thread.
template <int TEAM_, int ELEMENTS_>
struct Shape {
  static constexpr int TEAM = TEAM_, ELEMENTS = ELEMENTS_;
};
template <typename...>
struct Shapes {};

// Calls f(shape) with the first of the shapes that has room for a row's vectors; cudaErrorNotSupported if none has.
template <int N, typename F, typename... S>
cudaError_t with_shape(int cols, Shapes<S...>, F &&f) {
  cudaError_t error = cudaErrorNotSupported;
  (void)((cols / N * N <= S::TEAM * S::ELEMENTS && (error = f(S{}), true)) || ...);
  return error;
}

// A multiple of `step`, so that the rows of a thread begin alike, near `at_once` (which run at once) or a multiple of that, so
// that few of them idle in the last round.
inline int64_t alike(int64_t at_once, int64_t step, int64_t most) {
  int64_t best = 0;
  double best_share = 0;
  for (int64_t rounds = 1; rounds <= 8 && rounds * at_once <= most; ++rounds) {
    const int64_t chunks = rounds * at_once / step * step;
    const double share = static_cast<double>(chunks) / static_cast<double>(rounds * at_once) - 0.01 * rounds;
    if (share > best_share) best = chunks, best_share = share;
  }
  return best;
}

// What launch_ring asks the driver about a kernel and its device: once for the device that a thread uses.
struct Facts {
  int device = -1;
  int processors;
  int room;  // shared memory for a block's ring
  bool for_sm_90;
  int clusters[MAX_CLUSTER + 1];  // that run at once, by their size
};

// Launches a kernel on as many blocks (or clusters) as run at once. Where the chip has no room for two rows, nothing is launched.
template <auto KERNEL, int TENSORS, int TEAM, int K, int N, bool CLUSTER, int BLOCKS, bool ODD, typename P>
cudaError_t launch_ring(P &p, int ring_bytes, int64_t max_blocks, cudaStream_t stream, bool &launched) {
  constexpr int threads = THREADS<TEAM>, teams = threads / TEAM;
  constexpr int own = (teams * static_cast<int>(sizeof(Exchange<TEAM, CLUSTER>)) + 127) / 128 * 128;
  thread_local Facts facts;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device != facts.device) {
    int most, most_a_block;
    cudaDeviceGetAttribute(&facts.processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    cudaDeviceGetAttribute(&most_a_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    facts.room = std::min(most / BLOCKS - 1024, most_a_block) - own;
    facts.for_sm_90 = is_for_sm_90<KERNEL>(device);
    error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.room);
    if (error != cudaSuccess) return error;
    if (CLUSTER && facts.for_sm_90) {
      error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
      for (int size = 2; size <= MAX_CLUSTER && error == cudaSuccess; ++size) {
        Launch launch(size, threads, facts.room, stream);
        launch.cluster(size);
        error = cudaOccupancyMaxActiveClusters(&facts.clusters[size], KERNEL, &launch.config);
      }
      if (error != cudaSuccess) return error;
    }
    facts.device = device;
  }
  if (CLUSTER && !facts.for_sm_90) return cudaSuccess;
  p.chunks = std::min<int64_t>(ceil_div(p.rows, teams), facts.processors * BLOCKS);
  const int vectors = p.cols / N;
  p.cluster = 1;
  if (CLUSTER) {
    // The size with the most rows a time: a thread's work is its vectors, and for each row about as much as two more.
    double best = 0;
    for (int size = std::max<int>(2, ceil_div(vectors, TEAM * K)); size <= MAX_CLUSTER; ++size) {
      const double rate = facts.clusters[size] / (static_cast<double>(vectors) / (size * TEAM) + 2);
      if (rate > best) best = rate, p.cluster = size;
    }
    if (best == 0) return cudaSuccess;
    p.chunks = std::min<int64_t>(p.rows, facts.clusters[p.cluster]);
  }
  p.slot = static_cast<int>(ceil_div(vectors, p.cluster));
  p.slice = p.slot * N;
  if (ODD) p.slot += 2;
  const int stage = teams * TENSORS * p.slot * 16;
  p.stages = facts.for_sm_90 ? std::min({MAX_STAGES, std::max(2, ring_bytes / stage), facts.room / stage}) : 0;
  // The blocks also add their teams' sums there, a float a column and team.
  const int bytes = std::max(p.stages * stage, teams > 1 ? teams * p.cols * 4 : 0);
  if ((facts.for_sm_90 && p.stages < 2) || bytes > facts.room) return cudaSuccess;
  p.chunks = std::min(p.chunks, max_blocks);
  if (ODD && p.rows > p.chunks * teams) p.chunks = alike(p.chunks, std::max(1, N / teams), max_blocks);
  if (p.chunks == 0) return cudaSuccess;
  Launch launch(static_cast<unsigned>(p.chunks * p.cluster), threads, bytes, stream);
  if (CLUSTER) launch.cluster(p.cluster);
  launched = true;
  return cudaLaunchKernelEx(&launch.config, KERNEL, p);
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
