// layer_norm and rms_norm of wide rows by clusters that stay for many of them, where those that end with their rows
// (norm_forward_cluster.cuh) are slower: the weights of ODD rows have to be moved into place, layer_norm's two come for every row, and
// float ones beside half types are twice as long. Here they wait in registers.
//
// A cluster shares a row (norm_ring.cuh): every warp takes the moments of its part, and all warps join them. The rows are dealt out
// (norm_shares.cuh), for those of a cluster have to begin alike.
#ifndef EXTENSION_CPP_NORM_FORWARD_RING_CUH
#define EXTENSION_CPP_NORM_FORWARD_RING_CUH

#include "norm/norm_forward.cuh"
#include "norm/norm_ring.cuh"

namespace norm_cuda {

// OWN: weight and bias are own, and wait in x's type; else in float. Threads have K vectors, but for the last perhaps.
template <typename T, bool CENTERED, bool OWN, int TEAM, int K>
struct RingRows {
  static constexpr int N = VECTOR<T>, WARPS = TEAM / 32;
  using Exchange = norm_cuda::Exchange<TEAM, true, Moments>;
  using Mine = Part<T, TEAM, K, N, true>;

  const Forward<T> &p;
  Ring<T, 1, TEAM, K, N, true, true, false, Moments> ring;
  const int rank;
  const Share share;
  const Columns<TEAM, K, N, true> columns;
  const float count;  // columns of this warp
  std::conditional_t<OWN, Vector<T, N>, float[N]> weight[K], bias[CENTERED ? K : 1];
  float edge_weight[1], edge_bias[1];

  __device__ RingRows(const Forward<T> &p, uint4 *slots, Exchange &exchange, int chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages, p.slot},
        rank(rank),
        share(share_of(p.shares, chunk)),
        columns(p, share.first, threadIdx.x, rank),
        count(columns.count_of(threadIdx.x / 32)) {
    ring.line_up(p.x + share.first * p.x_stride, static_cast<int>(share.step * p.x_stride / N % 8),
                 columns);
  }

  __device__ int64_t row(int i) const { return share.first + i * share.step; }

  // Asks for row number i of the cluster, if there is one.
  __device__ void fetch(int i) {
    if (threadIdx.x > 0 || i >= share.rows) return;
    const T *const starts[1] = {p.x + row(i) * p.x_stride};
    ring.fetch(i, starts, columns, row(i) == p.rows - 1, p.policy);
  }

  // Row number i from the ring; its moments go to the other warps.
  __device__ void read(Mine &part, int i) {
    ring.wait();
    ring.load(part, 0, i, p.x + row(i) * p.x_stride, columns, ring.now);
    ring.now.advance(p.stages);
    ring.exchange.post(i, moments_of<T, CENTERED, false>(part, columns, count), rank, p.cluster);
  }

  __device__ void finish(int i, const Mine &part, const Moments &moments) const {
    const float mean = moments.mean, rstd = rstd_of(moments, p.per_col, p.eps);
    if (threadIdx.x == 0 && rank == 0) write_statistics<CENTERED>(p, row(i), mean, rstd);
    T *const y = p.y + row(i) * p.cols;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N];
      unpack<T, N>(x, part.bits[k]);
      if constexpr (OWN) {
        float w[N], b[N];
        unpack<T, N>(w, anew(weight[k]));
        if (CENTERED) unpack<T, N>(b, anew(bias[k]));
        normalize<CENTERED>(x, mean, rstd, w, b);
      } else {
        normalize<CENTERED>(x, mean, rstd, weight[k], bias[CENTERED ? k : 0]);
      }
      store(y + columns.column(k), x);
    }
    if (!columns.has_edge()) return;
    float x[1] = {to_acc(part.edge)};
    normalize<CENTERED>(x, mean, rstd, edge_weight, edge_bias);
    store(y + columns.edge, x);
  }

  __device__ void run() {
    __builtin_assume(columns.left > (K - 2) * TEAM * N);
    for (int i = 0; i < p.stages; ++i) fetch(i);
    if constexpr (OWN) {
      load_packed<T>(weight, p.weight, columns);
      if constexpr (CENTERED) load_packed<T>(bias, p.bias, columns);
      if (columns.has_edge()) {
        p.weight.template load<T>(edge_weight, columns.edge);
        if (CENTERED) p.bias.template load<T>(edge_bias, columns.edge);
      }
    } else {
      load_weights<T>(weight, edge_weight, p.weight, columns);
      if constexpr (CENTERED) load_weights<T>(bias, edge_bias, p.bias, columns);
    }
    Mine part{}, following;
    if (share.rows > 0) read(part, 0);
    for (int i = 0; i < share.rows; ++i) {
      if (i + 1 < share.rows)
        read(following, i + 1);  // so that nobody waits for the moments of row i
      const Moments *parts = ring.exchange.collect(i);
      const Moments moments =
          join<CENTERED, 32, MAX_CLUSTER * WARPS>(parts, p.cluster * WARPS, p.per_col);
      fetch(i + p.stages);  // all warps have posted row i, so they have read it
      finish(i, part, moments);
      part = following;
    }
    let_go(p, p.x, p.x_stride);
  }
};

template <typename T, bool CENTERED, bool OWN, int TEAM, int K, int BLOCKS>
__global__ void __launch_bounds__(TEAM, BLOCKS)
    ring_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  using Rows = RingRows<T, CENTERED, OWN, TEAM, K>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ typename Rows::Exchange exchange;
  exchange.open(threadIdx.x);
  Rows(p, shared, exchange, blockIdx.x / p.cluster, cluster_rank()).run();
  sync_cluster();  // no block ends while another still sends to it
#endif
}

}  // namespace norm_cuda

#endif
