// layer_norm of wide rows where clusters that stay for many rows are faster than those that end with theirs
// (norm_forward_cluster.cuh): ODD ones, those that begin between two lines of memory, which go as ODD ones, and 131072 columns of float.
// Its two weights take twice the time of rms_norm's to come for every row, and of ODD rows have to be moved into place as well.
//
// A cluster shares a row (norm_ring.cuh): every warp takes the moments of its part, and all warps join them.
//
// Who takes which row. Blocks that stay and take every n-th row copy memory at 93 % of the speed of blocks that come and go: some
// multiprocessors are slower, it is thought. Rows given out as they are asked for lift that (docs/performance.md). So a cluster
// draws a ticket for each row behind its first ones, and tells all its blocks together with the moments of an earlier row. Under
// load a ticket takes longer than a row: some warps draw in turn. ODD rows are dealt out (norm_shares.cuh), for those of a cluster
// have to begin alike.
#ifndef EXTENSION_CPP_NORM_FORWARD_RING_CUH
#define EXTENSION_CPP_NORM_FORWARD_RING_CUH

#include "norm/norm_forward.cuh"
#include "norm/norm_ring.cuh"

namespace norm_cuda {

// weight and bias are there, in x's type. FULL: vectors that every thread has.
template <typename T, int TEAM, int K, bool ODD, int FULL>
struct RingRows {
  static constexpr int N = VECTOR<T>, WARPS = TEAM / 32;
  static constexpr int DRAWERS = 4;  // warps of the first block
  using Exchange = norm_cuda::Exchange<TEAM, true, Moments>;
  // A row, and a thread's part of it.
  struct Mine : Part<T, TEAM, K, N, ODD> {
    int64_t row;
  };

  const Forward<T> &p;
  Ring<T, 1, TEAM, K, N, true, ODD, false, Moments> ring;
  const int rank;
  const Share share;
  const Columns<TEAM, K, N, ODD> columns;
  const float count;   // columns of this warp
  int drawn;           // row that this warp is to tell; p.rows or more: none is left
  int idle_turns = 0;  // without a row, one after the other
  int queue;           // row of a turn to come: in lane i that of turn i, i + 32 and so on
  Vector<T, N> weight[K], bias[K];
  float edge_weight[1], edge_bias[1];

  __device__ RingRows(const Forward<T> &p, uint4 *slots, Exchange &exchange, int chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages, p.slot},
        rank(rank),
        share(ODD ? share_of(p.shares, chunk) : Share{chunk, p.chunks, 0}),
        columns(p, share.first, threadIdx.x, rank),
        count(columns.count_of(threadIdx.x / 32)) {
    ring.line_up(p.x + share.first * p.x_stride, static_cast<int>(share.step * p.x_stride / N % 8), columns);
  }

  // Row number `turn` of those that are dealt out; p.rows or more: there is none.
  __device__ int dealt(int turn) const {
    if (ODD && turn >= share.rows) return static_cast<int>(p.rows);
    return static_cast<int>(share.first) + turn * static_cast<int>(share.step);
  }

  // The row of a turn behind the first p.stages; for one warp in its lane 0.
  __device__ void draw(int turn) {
    if (p.tickets == nullptr) {
      drawn = dealt(turn);
    } else if (threadIdx.x % 32 == 0) {
      drawn = p.stages * static_cast<int>(p.chunks) + static_cast<int>(atomicAdd(p.tickets, 1));
    }
  }

  __device__ int row_of(int turn) const { return ODD ? dealt(turn) : __shfl_sync(0xffffffffu, queue, turn % 32); }

  // Whether there is no row from `turn` on, where there is none for it. One warp's tickets rise, but those of several may cross: none
  // of them may have another. What is known already are p.stages - 1 turns.
  __device__ bool is_end(int turn) {
    if (ODD) return true;
    int idle = ++idle_turns;
    for (int i = 1; i < p.stages - 1 && row_of(turn + i) >= p.rows; ++i) ++idle;
    return idle >= DRAWERS;
  }

  // That `row` is the one of `turn`.
  __device__ void enqueue(int turn, int row) {
    if (!ODD && threadIdx.x % 32 == turn % 32) queue = row;
    if (threadIdx.x > 0 || row >= p.rows) return;
    const T *const starts[1] = {p.x + row * p.x_stride};
    ring.fetch(turn, starts, columns, row == p.rows - 1, p.policy);
  }

  // The row of `turn`, if it has one, from the ring; its moments go to the other warps. false: there is none from here on.
  __device__ bool read(Mine &part, int turn) {
    part.row = row_of(turn);
    if (part.row < p.rows) {
      idle_turns = 0;
      ring.wait();
      ring.load(part, 0, turn, p.x + part.row * p.x_stride, columns, ring.now);
      ring.now.advance(p.stages);
    } else if (is_end(turn)) {
      return false;
    }
    Moments mine = moments_of<T, true, false>(part, columns, count);
    const bool tells = !ODD && rank == 0 && threadIdx.x / 32 == turn % DRAWERS;
    if (tells) mine.told = __shfl_sync(0xffffffffu, drawn, 0);
    ring.exchange.post(turn, mine, rank, p.cluster);
    if (tells) draw(turn + DRAWERS + p.stages);
    return true;
  }

  __device__ void finish(const Mine &part, const Moments &moments) const {
    if (part.row >= p.rows) return;
    const float mean = moments.mean, rstd = rsqrtf(fmaf(moments.squares, p.per_col, p.eps));
    if (threadIdx.x == 0 && rank == 0) write_statistics<true>(p, part.row, mean, rstd);
    T *const y = p.y + part.row * p.cols;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N], w[N], b[N];
      unpack<T, N>(x, part.bits[k]);
      unpack<T, N>(w, anew(weight[k]));
      unpack<T, N>(b, anew(bias[k]));
      normalize<true>(x, mean, rstd, w, b);
      store(y + columns.column(k), x);
    }
    if (!columns.has_edge()) return;
    float x[1] = {to_acc(part.edge)};
    normalize<true>(x, mean, rstd, edge_weight, edge_bias);
    store(y + columns.edge, x);
  }

  __device__ void run() {
    __builtin_assume(columns.left > (FULL - 1) * TEAM * N);
    for (int i = 0; i < p.stages; ++i) enqueue(i, dealt(i));
    if (!ODD && rank == 0 && threadIdx.x / 32 < DRAWERS) draw(threadIdx.x / 32 + p.stages);
    load_packed<T>(weight, p.weight, columns);
    load_packed<T>(bias, p.bias, columns);
    if (columns.has_edge()) {
      p.weight.template load<T>(edge_weight, columns.edge);
      p.bias.template load<T>(edge_bias, columns.edge);
    }
    Mine part{}, following;
    bool is_row = read(part, 0);
    for (int i = 0; is_row; ++i) {
      is_row = read(following, i + 1);  // so that nobody waits for the moments of row i
      const Moments *parts = ring.exchange.collect(i);
      const Moments moments = join<true, 32, MAX_CLUSTER * WARPS>(parts, p.cluster * WARPS, p.per_col);
      // All warps have posted row i, so they have read it.
      enqueue(i + p.stages, ODD ? dealt(i + p.stages) : parts[i % DRAWERS].told);
      finish(part, moments);
      part = following;
    }
    let_go(p, p.x, p.x_stride);
  }
};

template <typename T, int TEAM, int K, bool ODD, int FULL, int BLOCKS>
__global__ void __launch_bounds__(TEAM, BLOCKS) ring_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  using Rows = RingRows<T, TEAM, K, ODD, FULL>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ typename Rows::Exchange exchange;
  exchange.open(threadIdx.x);
  Rows(p, shared, exchange, blockIdx.x / p.cluster, cluster_rank()).run();
  sync_cluster();  // no block ends while another still sends to it
#endif
}

}  // namespace norm_cuda

#endif
