// layer_norm and rms_norm of rows wider than a block, but for those of norm_forward_cluster.cuh: a cluster shares a row
// (norm_rows.cuh), every warp takes the moments of its part, and all warps join them.
//
// Who takes which row. Blocks that stay and take every n-th row copy memory at 93 % of the speed of blocks that come and go: some
// multiprocessors are slower, it is thought. Rows given out as they are asked for lift that (docs/performance.md). So a cluster
// draws a ticket for each row behind its first ones, and tells all its blocks together with the moments of an earlier row. Under
// load a ticket takes longer than a row: some warps draw in turn. Where that has no registers, and for ODD rows, of which those of
// a cluster have to begin alike, rows are dealt out (norm_shares.cuh).
#ifndef EXTENSION_CPP_NORM_FORWARD_WIDE_CUH
#define EXTENSION_CPP_NORM_FORWARD_WIDE_CUH

#include "norm/norm_forward.cuh"
#include "norm/norm_ring.cuh"

namespace norm_cuda {

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool ODD, bool PACKED, int FULL>
struct WideRows {
  static constexpr int N = VECTOR<T>, WARPS = TEAM / 32;
  static constexpr int TENSORS = FUSED == ADDED ? 2 : 1;
  static constexpr bool DYNAMIC = !ODD && (FULL > 0 || !CENTERED || N == 4);
  static constexpr int DRAWERS = 4;  // warps of the first block
  using Exchange = norm_cuda::Exchange<TEAM, true, Moments>;
  // A row, and a thread's part of it.
  struct Mine : Part<T, TEAM, K, N, ODD> {
    int64_t row;
    Mask<TEAM, K, N, ODD> mask;
  };

  const Forward<T> &p;
  Ring<T, TENSORS, TEAM, K, N, true, ODD, false, Moments> ring;
  const int64_t seed;
  const int rank;
  const int chunk;  // the cluster's number
  const Share share;
  const Columns<TEAM, K, N, ODD> columns;
  const float count;   // columns of this warp
  int drawn;           // row that this warp is to tell; p.rows or more: none is left
  int idle_turns = 0;  // without a row, one after the other
  int queue;           // row of a turn to come: in lane i that of turn i, i + 32 and so on
  // PACKED: in x's type, for which there are registers where float would have to be spilled.
  using Weight = std::conditional_t<PACKED, Vector<T, N>, float[N]>;
  Weight weight[K], bias[CENTERED ? K : 1];
  float edge_weight[1], edge_bias[1];

  __device__ WideRows(const Forward<T> &p, uint4 *slots, Exchange &exchange, int chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages, p.slot},
        seed(FUSED == ALONE ? 0 : seed_of(p.dropout)),
        rank(rank),
        chunk(chunk),
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

  __device__ int row_of(int turn) const { return !DYNAMIC ? dealt(turn) : __shfl_sync(0xffffffffu, queue, turn % 32); }

  // Whether there is no row from `turn` on, where there is none for it. One warp's tickets rise, but those of several may cross: none
  // of them may have another. What is known already are p.stages - 1 turns.
  __device__ bool is_end(int turn) {
    if (!DYNAMIC) return true;
    int idle = ++idle_turns;
    for (int i = 1; i < p.stages - 1 && row_of(turn + i) >= p.rows; ++i) ++idle;
    return idle >= DRAWERS;
  }

  // That `row` is the one of `turn`.
  __device__ void enqueue(int turn, int row) {
    if (DYNAMIC && threadIdx.x % 32 == turn % 32) queue = row;
    if (threadIdx.x > 0 || row >= p.rows) return;
    const T *starts[TENSORS] = {p.x + row * p.x_stride};
    if (FUSED == ADDED) starts[TENSORS - 1] = p.residual + row * p.residual_stride;
    ring.fetch(turn, starts, columns, row == p.rows - 1);
  }

  // The row of `turn`, if it has one, from the ring; its moments go to the other warps. false: there is none from here on.
  __device__ bool read(Mine &part, int turn) {
    part.row = row_of(turn);
    if (part.row < p.rows) {
      idle_turns = 0;
      if (FUSED != ALONE && p.dropout.seed != nullptr) part.mask.make(p.dropout, seed, part.row * p.cols, columns);
      ring.wait();
      ring.load(part, 0, turn, p.x + part.row * p.x_stride, columns, ring.now);
      if constexpr (FUSED == ADDED) {
        Part<T, TEAM, K, N, ODD> residual;
        ring.load(residual, 1, turn, p.residual + part.row * p.residual_stride, columns, ring.now);
        add_residual(part, residual, p, part.row, part.mask, columns);
      }
      ring.now.advance(p.stages);
    } else if (is_end(turn)) {
      return false;
    }
    Moments mine = moments_of<T, CENTERED, false>(part, columns, count);
    const bool tells = DYNAMIC && rank == 0 && threadIdx.x / 32 == turn % DRAWERS;
    if (tells) mine.told = __shfl_sync(0xffffffffu, drawn, 0);
    ring.exchange.post(turn, mine, rank, p.cluster);
    if (tells) draw(turn + DRAWERS + p.stages);
    return true;
  }

  __device__ void finish(const Mine &part, const Moments &moments) const {
    if (DYNAMIC && part.row >= p.rows) return;
    const float mean = moments.mean, rstd = rsqrtf(fmaf(moments.squares, p.per_col, p.eps));
    if (threadIdx.x == 0 && rank == 0) write_statistics<CENTERED>(p, part.row, mean, rstd);
    T *const y = p.y + part.row * p.cols;
    const auto write = [&](auto &x, const auto &w, const auto &b, uint32_t kept, int c) {
      normalize<CENTERED>(x, mean, rstd, w, b);
      if (FUSED == DROPPED) drop(x, p.dropout, kept);
      store(y + c, x);
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N], w[N], b[N];
      unpack<T, N>(x, part.bits[k]);
      if constexpr (PACKED) {
        unpack<T, N>(w, weight[k]);
        if (CENTERED) unpack<T, N>(b, bias[k]);
        write(x, w, b, part.mask.of(k), columns.column(k));
      } else {
        write(x, weight[k], bias[CENTERED ? k : 0], part.mask.of(k), columns.column(k));
      }
    }
    if (!columns.has_edge()) return;
    float x[1] = {to_acc(part.edge)};
    write(x, edge_weight, edge_bias, part.mask.edge, columns.edge);
  }

  // FULL: vectors that every thread has.
  __device__ void run() {
    if (FULL > 0) __builtin_assume(columns.left > (FULL - 1) * TEAM * N);
    for (int i = 0; i < p.stages; ++i) enqueue(i, dealt(i));
    if (DYNAMIC && rank == 0 && threadIdx.x / 32 < DRAWERS) draw(threadIdx.x / 32 + p.stages);
    if constexpr (PACKED) {
      load_packed<T>(weight, edge_weight, p.weight, columns);
      if constexpr (CENTERED) load_packed<T>(bias, edge_bias, p.bias, columns);
    } else {
      load_weights<T>(weight, edge_weight, p.weight, columns);
      if constexpr (CENTERED) load_weights<T>(bias, edge_bias, p.bias, columns);
    }
    Mine part{}, following;
    bool is_row = read(part, 0);
    for (int i = 0; is_row; ++i) {
      is_row = read(following, i + 1);  // so that nobody waits for the moments of row i
      const Moments *parts = ring.exchange.collect(i);
      const Moments moments = join<CENTERED, 32, MAX_CLUSTER * WARPS>(parts, p.cluster * WARPS, p.per_col);
      enqueue(i + p.stages, !DYNAMIC ? dealt(i + p.stages)
                                     : parts[i % DRAWERS].told);  // all warps have posted row i, so they have read it
      finish(part, moments);
      part = following;
    }
  }
};

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool ODD, bool PACKED, int FULL, int BLOCKS>
__global__ void __launch_bounds__(TEAM, BLOCKS) wide_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  using Rows = WideRows<T, CENTERED, FUSED, TEAM, K, ODD, PACKED, FULL>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ typename Rows::Exchange exchange;
  exchange.open(threadIdx.x);
  Rows(p, shared, exchange, blockIdx.x / p.cluster, cluster_rank()).run();
  sync_cluster();  // no block ends while another still sends to it
#endif
}

}  // namespace norm_cuda

#endif
