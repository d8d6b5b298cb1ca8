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
#elif defined(__CUDA_ARCH__) && ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
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
    for (int k = 0; k < K; ++k) bits[k] = load_cached(row + columns.column(k), columns.has(k), policy);
    if (ODD) edge = columns.has_edge() ? row[columns.edge] : from_acc<T>(0);
  }
  __device__ void load(const T *row, const Columns<TEAM, K, N, ODD> &columns) {
#pragma unroll
    for (int k = 0; k < K; ++k) bits[k] = columns.has(k) ? load_vector<T, N>(row + columns.column(k)) : Vector<T, N>{};
    if (ODD) edge = columns.has_edge() ? row[columns.edge] : from_acc<T>(0);
  }
  // From shared memory, where column `begin` is at `slot`.
  __device__ void load_slot(const uint4 *slot, const Columns<TEAM, K, N, ODD> &columns) {
    const int vector = ODD ? (columns.first - columns.begin) / N : threadIdx.x % TEAM;
    const uint32_t first = shared_address(slot + vector);  // one for all k: else each would be a chain of its own
#pragma unroll
    for (int k = 0; k < K; ++k) {
      bits[k] = {};
      if (columns.has(k)) bits[k] = load_shared(first + 16 * k * TEAM);
    }
    if (ODD) {
      edge = from_acc<T>(0);
      if (columns.has_edge()) edge = reinterpret_cast<const T *>(slot)[columns.edge - columns.begin];
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
  __device__ void make(const dropout_t &dropout, int64_t seed, int64_t first, const Columns<TEAM, K, N, ODD> &columns) {
    constexpr int BATCH = K % 4 == 0 ? 4 : K % 3 == 0 ? 3 : K % 5 == 0 ? 5 : K;  // more would need more registers
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

// weight or bias, as the kernels read it.
struct Weights {
  const void *data;  // NULL: `missing` everywhere
  float missing;
  bool is_float;

  // Whether they are there, and of x's own type.
  __host__ __device__ bool is_own() const { return data != nullptr && !is_float; }

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

// Columns c to c + N - 1 of an aligned row, which begin anywhere.
template <typename T, int N>
__device__ inline Vector<T, N> load_shifted(const T *row, int c) {
  if constexpr (N == 8) {
    // The words that hold them, and where these begin half a word early, the last half word.
    const int odd = c % 2;
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(row + c - odd);
    const uint32_t w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
    const uint32_t last = reinterpret_cast<const uint16_t *>(row)[c + 7];
    return {__funnelshift_r(w0, w1, 16 * odd), __funnelshift_r(w1, w2, 16 * odd), __funnelshift_r(w2, w3, 16 * odd),
            __funnelshift_r(w3, last, 16 * odd)};
  } else {
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(row + c);
    return {words[0], words[1], words[2], words[3]};
  }
}

// The same of a row of float: the pairs that hold them, and where these begin one column early, the last column.
template <int N>
__device__ inline void load_pairs(float (&w)[N], const float *row, int c) {
  const int odd = c % 2;
  const float2 *const pairs = reinterpret_cast<const float2 *>(row + c - odd);
  float all[N + 1];
#pragma unroll
  for (int j = 0; j < N; j += 2) {
    const float2 pair = pairs[j / 2];
    all[j] = pair.x, all[j + 1] = pair.y;
  }
  all[N] = row[c + N - 1];
#pragma unroll
  for (int j = 0; j < N; ++j) w[j] = odd ? all[j + 1] : all[j];
}

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

// This thread's part of weight or bias, both there and of x's type, which its vectors stay in. ODD: any numbers where it has no columns,
// for with a branch around each vector, all of its words would come one by one.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void load_packed(Vector<T, N> (&w)[K], const Weights &weights,
                                   const Columns<TEAM, K, N, ODD> &columns) {
  const T *const data = static_cast<const T *>(weights.data);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if constexpr (ODD) {
      w[k] = load_shifted<T, N>(data, columns.clamped(k));
    } else {
      w[k] = {};
      if (columns.has(k)) w[k] = load_vector<T, N>(data + columns.column(k));
    }
  }
}

// The same vector, unknown to the compiler each time: what a loop over rows unpacks from it is then not unpacked once before the loop, to
// be kept in twice as many registers.
__device__ inline uint4 anew(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

// Elements SHIFT to SHIFT + N - 1 of two neighbouring vectors.
template <typename T, int SHIFT>
__device__ inline uint4 elements_from(const uint4 &a, const uint4 &b) {
  constexpr int first = SHIFT * sizeof(T) / 4, bits = SHIFT * sizeof(T) % 4 * 8;
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  return {__funnelshift_r(words[first], words[first + 1], bits),
          __funnelshift_r(words[first + 1], words[first + 2], bits),
          __funnelshift_r(words[first + 2], words[first + 3], bits),
          __funnelshift_r(words[first + 3], words[first + 4], bits)};
}

// The same as load_packed of ODD rows by whole vectors: a block's all begin alike, SHIFT or more elements behind a
// multiple of N. Faster where that is much of the work.
template <typename T, int SHIFT, int TEAM, int K, int N>
__device__ inline void load_moved(Vector<T, N> (&w)[K], const T *data, const Columns<TEAM, K, N, true> &columns,
                                  int cols) {
  if constexpr (SHIFT + 1 < N) {
    if (columns.first % N != SHIFT) return load_moved<T, SHIFT + 1>(w, data, columns, cols);
  }
  // Behind the weights nothing is read.
  const auto has_next = [&](int k) { return SHIFT > 0 && columns.clamped(k) - SHIFT + 2 * N <= cols; };
  Vector<T, N> next[K]{};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const T *const vector = data + columns.clamped(k) - SHIFT;
    w[k] = load_vector<T, N>(vector);
    if (has_next(k)) next[k] = load_vector<T, N>(vector + N);
  }
  if constexpr (SHIFT > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      w[k] = has_next(k) ? elements_from<T, SHIFT>(w[k], next[k]) : load_shifted<T, N>(data, columns.clamped(k));
    }
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
  float v[1] = {(right ? mine.y : mine.x) + __shfl_xor_sync(0xffffffffu, right ? mine.x : mine.y, 8)};
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
    for (int n = 0; n < COUNT; ++n) v[n] = warp < WARPS ? shared[threadIdx.x / TEAM * WARPS + warp][n] : 0;
    group_sum(v, LANES<TEAM>);
  }
}

}  // namespace norm_cuda

#endif
