// layer_norm and rms_norm of rows wider than a block, where blocks that come and go are faster than those of
// norm_forward_wide.cuh, which stay: a cluster takes a row, or two, and ends.
//
// Nobody waits for more than the moments. A block may send to another when that one has set up its mbarrier: each says so first
// thing, and looks whether the others have only before it sends. And each may end alone: it has got all that it is sent.
//
// The weights come from the caches for every row. Two rows share them for layer_norm, which has twice as many, and at odd widths,
// where they come word by word.
#ifndef EXTENSION_CPP_NORM_FORWARD_CLUSTER_CUH
#define EXTENSION_CPP_NORM_FORWARD_CLUSTER_CUH

#include "norm/norm_forward.cuh"

namespace norm_cuda {

// Rows of a cluster; ODD: N apart, so that they begin alike.
template <bool CENTERED, bool ODD>
constexpr int CLUSTER_ROWS = CENTERED || ODD ? 2 : 1;

template <typename T, bool CENTERED, bool ODD, int TEAM, int K, int BLOCKS>
__global__ void __launch_bounds__(TEAM, BLOCKS) cluster_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  constexpr int N = VECTOR<T>, WARPS = TEAM / 32, ROWS = CLUSTER_ROWS<CENTERED, ODD>, STEP = ODD ? N : 1;
  __shared__ Moments moments[ROWS][MAX_CLUSTER * WARPS];
  __shared__ uint64_t arrived;
  const int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_mbarrier(&arrived, 1);
    fence_mbarrier_init();
    expect_bytes(&arrived, ROWS * p.cluster * WARPS * sizeof(Moments));
  }
  arrive_at_cluster();
  const int cluster = cluster_number(), first = cluster / STEP * (STEP * ROWS) + cluster % STEP;
  const auto row = [&](int i) { return static_cast<int64_t>(first + i * STEP); };
  const auto is_row = [&](int i) { return row(i) < p.rows; };
  const Columns<TEAM, K, N, ODD> columns(p, first, threadIdx.x, rank);
  Vector<T, N> weight[K], bias[K];
  float edge_weight[1], edge_bias[1];
  const auto load_all_weights = [&] {
    load_packed<T>(weight, edge_weight, p.weight, columns);
    if (CENTERED) load_packed<T>(bias, edge_bias, p.bias, columns);
  };
  if (!ODD) load_all_weights();
  Part<T, TEAM, K, N, ODD> parts[ROWS]{};
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (is_row(i)) parts[i].load(p.x + row(i) * p.x_stride, columns);
  }
  if (ODD) load_all_weights();  // word by word, which the row must not wait for
  Moments mine[ROWS];
  const float count = columns.count_of(warp);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) mine[i] = moments_of<T, CENTERED, sizeof(T) == 2>(parts[i], columns, count);
  wait_for_cluster();
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (lane < p.cluster) send(&moments[i][rank * WARPS + warp], &arrived, lane, mine[i]);
  }
  wait_cluster(&arrived, 0);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const Moments m = join<CENTERED, 32, MAX_CLUSTER * WARPS>(moments[i], p.cluster * WARPS, p.per_col);
    if (!is_row(i)) continue;
    const float mean = m.mean, rstd = rsqrtf(fmaf(m.squares, p.per_col, p.eps));
    if (threadIdx.x == 0 && rank == 0) write_statistics<CENTERED>(p, row(i), mean, rstd);
    T *const y = p.y + row(i) * p.cols;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N], w[N], b[N];
      unpack<T, N>(x, parts[i].bits[k]);
      unpack<T, N>(w, weight[k]);
      if (CENTERED) unpack<T, N>(b, bias[k]);
      normalize<CENTERED>(x, mean, rstd, w, b);
      store<T, N>(y + columns.column(k), x);
    }
    if (!columns.has_edge()) continue;
    float x[1] = {to_acc(parts[i].edge)};
    normalize<CENTERED>(x, mean, rstd, edge_weight, edge_bias);
    store(y + columns.edge, x);
  }
#endif
}

}  // namespace norm_cuda

#endif
