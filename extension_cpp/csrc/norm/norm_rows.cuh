// What the kernels of norm_forward_cuda.cu and norm_backward_cuda.cu share: how rows meet threads.
//
// A team of TEAM threads takes a row: part of a warp, a warp, several, or a whole block. A block is one team or several, most often
// THREADS threads. Thread t of the team owns the columns t * N, (t + TEAM) * N, ... and the N - 1 behind each, at most K
// times N, where N is a 16-byte vector.
//
// ODD: the width is no multiple of N, so that most rows begin between two multiples of 16 bytes, those of all tensors alike. The
// vectors are then those of memory, but for the two at the ends of the row, which hold elements of the rows beside it: the up to
// 2 (N - 1) columns in them are shared out one a thread, its `edge`. The rows of a thread are a multiple of N apart: all begin
// alike, its columns never change, and weights and their gradients may stay in its registers (norm_shares.cuh). Clusters that
// stay also take aligned rows so, where these begin between two lines of 128 bytes. norm_ring.cuh: how rows come to those who stay.
#ifndef EXTENSION_CPP_NORM_ROWS_CUH
#define EXTENSION_CPP_NORM_ROWS_CUH

#include "common/cuda_async.cuh"
#include "common/cuda_cache.cuh"
#include "common/cuda_dropout.cuh"
#include "common/cuda_reduce.cuh"
#include "common/cuda_vector.cuh"
#include "norm/norm.h"
#include "norm/norm_shares.cuh"

namespace norm_cuda {

// Threads of a block: a wide team's own, else of as many teams as give 256 or the next more.
template <int TEAM>
constexpr int THREADS = TEAM >= 192 ? TEAM : (255 / TEAM + 1) * TEAM;
// Threads and blocks that a multiprocessor of the chip compiled for holds at most (some of the others hold 24 blocks).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int MOST_RESIDENT = 1024, MOST_BLOCKS = 16;
#elif defined(__CUDA_ARCH__) && \
    ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int MOST_RESIDENT = 1536, MOST_BLOCKS = 16;
#else
constexpr int MOST_RESIDENT = 2048, MOST_BLOCKS = 32;
#endif
// Of `blocks`, those that it has room for, or one.
constexpr int resident(int threads, int blocks) {
  const int most = MOST_RESIDENT / threads < MOST_BLOCKS ? MOST_RESIDENT / threads : MOST_BLOCKS;
  return blocks > most ? most : blocks == 0 ? 1 : blocks;
}
template <typename T>
constexpr int VECTOR = 16 / sizeof(T);  // elements
constexpr int MAX_CLUSTER = 16;
// Lanes that add up the numbers of a team's warps: a power of two.
template <int TEAM>
constexpr int LANES = TEAM <= 64 ? 2 : 2 * LANES<(TEAM + 1) / 2>;
constexpr int MAX_STAGES = 6;

// What stands beside the norm (norm.h): nothing, a residual before it, or dropout behind it.
enum Fused { ALONE, ADDED, DROPPED };

// What the walk over the rows depends on, besides the template's TEAM, K and N. A kernel's parameters come to it in pieces of 64 bytes,
// each with a latency that shows where rows are few: so these are the first, and what other kernels need alone comes last.
struct Geometry {
  int64_t rows;
  uint64_t policy;  // of what is read in passing (cuda_cache.cuh)
  int64_t let_go;   // the first of the rows whose lines are let go again; g.rows: none
  int cols;
  float per_col;  // 1 / cols
  int slice;      // columns of a row that one block takes, in vectors
  float eps;      // of forward
};

// Besides that, of kernels whose blocks stay for many rows, or share one.
struct Sharing {
  int stages;      // rows of a team in the ring
  int cluster;     // blocks that share a row
  int slot;        // vectors that they take in the ring
  int apart;       // ODD blocks: vectors from a row of a team to its next in x, modulo 8
  int64_t chunks;  // shares of the rows: one a block or cluster
  Shares shares;   // ODD clusters: those
};

// The columns of one thread.
template <int TEAM, int K, int N, bool ODD>
struct Columns {
  int begin;  // of the block's share of the row; up to N - 1 before it
  int end;
  int first;  // of this thread
  int limit;  // of the vectors
  int left;   // from `first` to there
  int edges;  // the columns beside them; those of the first threads of the first warp
  int edge;   // this thread's single column; -1: none

  // For `row`, and for every row a multiple of N away.
  __device__ Columns(const Geometry &g, int64_t row, int lane, int rank) : edges(0), edge(-1) {
    // The row's vectors are those from `whole` to `tail`. A block takes g.slice columns of them; the first one also what is
    // before, the one that takes the last of them also what is behind.
    const int skew = ODD ? static_cast<int>(row * g.cols % N) : 0, whole = skew > 0 ? N - skew : 0;
    const int tail = ODD ? whole + max(g.cols - whole, 0) / N * N : g.cols;
    const int from = whole + rank * g.slice, to = from + g.slice;
    begin = rank == 0 ? -skew : min(from, tail);
    end = to < tail ? to : rank == 0 || from < tail ? g.cols : begin;
    first = from + lane * N;
    limit = min(to, tail);
    left = limit - first;
    if constexpr (ODD) {
      static_assert(TEAM >= 2 * (N - 1));
      const int head = rank == 0 ? min(whole, g.cols) : 0;
      edges = head + max(end - limit, 0);
      if (lane < edges) edge = lane < head ? lane : limit + lane - head;
    }
  }
  __device__ int column(int k) const { return first + k * TEAM * N; }
  __device__ bool has(int k) const { return k * TEAM * N < left; }
  // Columns of the row in any case, if it has a vector.
  __device__ int clamped(int k) const { return min(column(k), limit - N); }
  __device__ bool has_edge() const { return ODD && edge >= 0; }
  // Where the block's vectors begin (that of the team, if there are several), and how many columns it has.
  __device__ int from() const { return first - static_cast<int>(threadIdx.x % TEAM) * N; }
  __device__ int count() const { return edges + max(limit - from(), 0); }
  // How many the block's warp `warp` has (TEAM < 32: the team).
  __device__ int count_of(int warp) const {
    constexpr int GROUP = TEAM < 32 ? TEAM : 32;
    const int from = this->from() + warp * GROUP * N;
    int n = warp == 0 ? edges : 0;
#pragma unroll
    for (int k = 0; k < K; ++k) n += min(max(limit - from - k * TEAM * N, 0), GROUP * N);
    return n;
  }
};

// A thread's part of a row, zeros where it has no columns.
template <typename T, int TEAM, int K, int N, bool ODD>
struct Part {
  Vector<T, N> bits[K];
  T edge;

  // From the row that begins at `row`.
  __device__ void load(const T *row, const Columns<TEAM, K, N, ODD> &columns, uint64_t policy) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      bits[k] = load_cached(row + columns.column(k), columns.has(k), policy);
    if (ODD) edge = columns.has_edge() ? row[columns.edge] : from_acc<T>(0);
  }
  __device__ void load(const T *row, const Columns<TEAM, K, N, ODD> &columns) {
#pragma unroll
    for (int k = 0; k < K; ++k)
      bits[k] = columns.has(k) ? load_vector<T, N>(row + columns.column(k)) : Vector<T, N>{};
    if (ODD) edge = columns.has_edge() ? row[columns.edge] : from_acc<T>(0);
  }
  // From shared memory, where column `begin` is at `slot`.
  __device__ void load_slot(const uint4 *slot, const Columns<TEAM, K, N, ODD> &columns) {
    const int vector = ODD ? (columns.first - columns.begin) / N : threadIdx.x % TEAM;
    const uint32_t first =
        shared_address(slot + vector);  // one for all k: else each would be a chain of its own
#pragma unroll
    for (int k = 0; k < K; ++k) {
      bits[k] = {};
      if (columns.has(k)) bits[k] = load_shared(first + 16 * k * TEAM);
    }
    if (ODD) {
      edge = from_acc<T>(0);
      if (columns.has_edge())
        edge = reinterpret_cast<const T *>(slot)[columns.edge - columns.begin];
    }
  }
};

// By all threads of a team that have read their block's part of `row`.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void let_go(const T *row, const Columns<TEAM, K, N, ODD> &columns) {
  let_lines_go(row + columns.begin, row + columns.end, threadIdx.x % TEAM, TEAM);
}

// Rows from g.let_go on, by all threads of all blocks, each when it has no rows left. Not if there is no such tensor, nor if most of what
// lies between the rows is not theirs.
template <typename T>
__device__ inline void let_go(const Geometry &g, const T *tensor, int64_t stride) {
  if (tensor == nullptr || g.let_go >= g.rows || stride > 2 * g.cols) return;
  let_lines_go(tensor + g.let_go * stride, tensor + (g.rows - 1) * stride + g.cols,
               blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// Which of a thread's elements dropout keeps, a bit each. Made while the row is on its way: seven rounds of Philox a vector would
// be long to wait for behind it, and backward needs them twice.
template <int TEAM, int K, int N, bool ODD>
struct Mask {
  uint32_t bits[(K * N + 31) / 32], edge;

  // For the row whose first element is number `first`.
  __device__ void make(const dropout_t &dropout, int64_t seed, int64_t first,
                       const Columns<TEAM, K, N, ODD> &columns) {
    constexpr int BATCH = K % 4 == 0   ? 4
                          : K % 3 == 0 ? 3
                          : K % 5 == 0 ? 5
                                       : K;  // more would need more registers
    memset(bits, 0, sizeof bits);
#pragma unroll
    for (int k = 0; k < K; k += BATCH) {
      uint32_t masks[BATCH];
      int64_t vectors[BATCH];
#pragma unroll
      for (int v = 0; v < BATCH; ++v) vectors[v] = first + columns.column(k + v);
      keep<N>(masks, dropout, seed, vectors);
#pragma unroll
      for (int v = 0; v < BATCH; ++v) bits[(k + v) * N / 32] |= masks[v] << (k + v) * N % 32;
    }
    if (columns.has_edge()) edge = keep_one(dropout, seed, first + columns.edge);
  }
  __device__ uint32_t of(int k) const { return bits[k * N / 32] >> k * N % 32; }
};

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

// The sums over a warp of a.x, a.y, b.x and b.y, in all its lanes: a quarter of it sums each. CENTERED false: a.x and b.x alone.
template <bool CENTERED>
__device__ inline void warp_sums(float2 &a, float2 &b) {
  const bool upper = threadIdx.x & 16;
  const float2 other = upper ? a : b;
  float2 mine = upper ? b : a;
  mine.x += __shfl_xor_sync(0xffffffffu, other.x, 16);
  if (!CENTERED) {
    float x[1] = {mine.x};
    group_sum(x, 16);
    a.x = __shfl_sync(0xffffffffu, x[0], 0);
    b.x = __shfl_sync(0xffffffffu, x[0], 16);
    return;
  }
  mine.y += __shfl_xor_sync(0xffffffffu, other.y, 16);
  const bool right = threadIdx.x & 8;
  float v[1] = {(right ? mine.y : mine.x) +
                __shfl_xor_sync(0xffffffffu, right ? mine.x : mine.y, 8)};
  group_sum(v, 8);
  a = {__shfl_sync(0xffffffffu, v[0], 0), __shfl_sync(0xffffffffu, v[0], 8)};
  b = {__shfl_sync(0xffffffffu, v[0], 16), __shfl_sync(0xffffffffu, v[0], 24)};
}

// Waits for the other warps of the team. A kernel that works out a barrier's number takes all 16, and a multiprocessor has those for four
// blocks (docs/tuning.md): only where a block may have several teams.
template <int TEAM, int BLOCK = THREADS<TEAM>>
__device__ inline void sync_team() {
  if constexpr (BLOCK == TEAM) {
    __syncthreads();
  } else {
    static_assert(BLOCK / TEAM < 16);  // barriers, beside that of the block
    sync_group(1 + threadIdx.x / TEAM, TEAM);
  }
}

// Sums of v over a team; `shared` is for the warps of the block, and for this sum alone.
template <int TEAM, int COUNT, int BLOCK_WARPS>
__device__ inline void team_sum(float (&v)[COUNT], float (&shared)[BLOCK_WARPS][COUNT]) {
  if constexpr (TEAM >= 32 && COUNT == 2) {
    const float2 both = warp_sum<true>({v[0], v[1]});
    v[0] = both.x, v[1] = both.y;
  } else {
    group_sum(v, TEAM < 32 ? TEAM : 32);
  }
  if constexpr (TEAM > 32) {
    constexpr int WARPS = TEAM / 32;
    const int warp = threadIdx.x % LANES<TEAM>;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) shared[threadIdx.x / 32][n] = v[n];
    }
    sync_team<TEAM, BLOCK_WARPS * 32>();
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
      v[n] = warp < WARPS ? shared[threadIdx.x / TEAM * WARPS + warp][n] : 0;
    group_sum(v, LANES<TEAM>);
  }
}

}  // namespace norm_cuda

#endif
