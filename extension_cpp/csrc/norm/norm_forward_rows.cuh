// layer_norm and rms_norm of rows that go through the ring (norm_rows.cuh), and what every forward kernel is told.
//
// In a cluster every warp takes mean and squared deviations of its part of the row, and the parts are then joined: the row's mean
// is that of the parts' means, and each part's distance from it counts as many times as the part has columns.
#ifndef EXTENSION_CPP_NORM_FORWARD_ROWS_CUH
#define EXTENSION_CPP_NORM_FORWARD_ROWS_CUH

#include "norm/norm_rows.cuh"

namespace norm_cuda {

template <typename T>
struct Forward : Geometry {
  const T *x;
  Weights weight;
  Weights bias;
  T *y;
  float *mean;  // NULL: rms_norm
  float *rstd;
  float eps;
  int64_t x_stride;
  const T *residual;
  int64_t residual_stride;
  T *sum;
  dropout_t dropout;  // ADDED: of x, perhaps none; DROPPED: of y
};

// x becomes residual + dropout(x), which is also written.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void add_residual(Part<T, TEAM, K, N, ODD> &part, const Part<T, TEAM, K, N, ODD> &residual,
                                    const Forward<T> &p, int64_t row, const Mask<TEAM, K, N, ODD> &mask,
                                    const Columns<TEAM, K, N, ODD> &columns) {
  const auto add = [&](auto &x, const auto &r, uint32_t kept, int64_t i) {
    if (p.dropout.seed != nullptr) drop(x, p.dropout, kept);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof x / sizeof x[0]); ++j) x[j] += r[j];
    store(p.sum + i, x);
  };
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float x[N], r[N];
    unpack<T, N>(x, part.bits[k]);
    unpack<T, N>(r, residual.bits[k]);
    add(x, r, mask.of(k), row * p.cols + columns.column(k));
    part.bits[k] = pack<T, N>(x);
  }
  if (!columns.has_edge()) return;
  float x[1] = {to_acc(part.edge)}, r[1] = {to_acc(residual.edge)};
  add(x, r, mask.edge, row * p.cols + columns.edge);
  part.edge = from_acc<T>(x[0]);
}

// The rows of one team of persistent blocks; the walk is that of BackwardRows.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool CLUSTER, bool ODD>
struct ForwardRows {
  static constexpr int N = VECTOR<T>, TEAMS = THREADS<TEAM> / TEAM;
  static constexpr int GROUP = TEAM < 32 ? TEAM : 32;  // threads whose numbers are one part of a row
  // Parts of a row that one lane joins.
  static constexpr int PARTS = ((CLUSTER ? MAX_CLUSTER : 1) * TEAM / 32 + 31) / 32;
  static constexpr int TENSORS = FUSED == ADDED ? 2 : 1;
  using TeamRing = Ring<T, TENSORS, TEAM, K, N, CLUSTER, ODD>;
  // A thread's part of a row.
  struct Mine : Part<T, TEAM, K, N, ODD> {
    Mask<TEAM, K, N, ODD> mask;
  };

  const Forward<T> &p;
  TeamRing ring;
  const int64_t seed;
  const int rank;
  const int64_t first;  // row; from there on every (p.chunks * TEAMS)-th
  const int rows;
  const Columns<TEAM, K, N, ODD> columns;
  float per_count;                      // 1 / the columns of this part
  float counts[PARTS > 0 ? PARTS : 1];  // those of the parts that this lane joins
  float weight[K][N], bias[CENTERED ? K : 1][N], edge_weight[1], edge_bias[1];

  __device__ ForwardRows(const Forward<T> &p, uint4 *slots, Exchange<TEAM, CLUSTER> &exchange, int64_t chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages, p.slot},
        seed(FUSED == ALONE ? 0 : seed_of(p.dropout)),
        rank(rank),
        first(chunk * TEAMS + team()),
        rows(rows_from(first)),
        columns(p, first, lane(), rank),
        per_count(p.per_col) {}

  __device__ static int team() { return TEAMS > 1 ? threadIdx.x / TEAM : 0; }
  __device__ static int lane() { return TEAMS > 1 ? threadIdx.x % TEAM : threadIdx.x; }
  __device__ int64_t row(int i) const { return first + i * (p.chunks * TEAMS); }
  __device__ int rows_from(int64_t first) const {
    return static_cast<int>((p.rows - first + p.chunks * TEAMS - 1) / (p.chunks * TEAMS));
  }

  __device__ void fetch(int i) {
    if (lane() > 0 || i >= rows) return;
    const T *starts[TENSORS] = {p.x + row(i) * p.x_stride};
    if (FUSED == ADDED) starts[TENSORS - 1] = p.residual + row(i) * p.residual_stride;
    ring.fetch(starts, columns, row(i) == p.rows - 1);
  }

  // Row i from the ring; returns this part's numbers, and gives them to the others for turn number `turn`.
  __device__ float2 read(Mine &part, int i, int turn) {
    if (TEAM >= 32 || i < rows) {
      if (FUSED != ALONE && p.dropout.seed != nullptr) part.mask.make(p.dropout, seed, row(i) * p.cols, columns);
      ring.wait();
      ring.load(part, 0, p.x + row(i) * p.x_stride, columns, ring.now);
      if constexpr (FUSED == ADDED) {
        Part<T, TEAM, K, N, ODD> residual;
        ring.load(residual, 1, p.residual + row(i) * p.residual_stride, columns, ring.now);
        add_residual(part, residual, p, row(i), part.mask, columns);
      }
      ring.now.advance(p.stages);
    }
    const float2 mine = deviations(part);
    ring.exchange.post(turn, mine, rank, p.cluster);
    return mine;
  }

  // The parts of the row that this lane joins: f(j, numbers of the part).
  template <typename F>
  __device__ void for_parts(const float2 *parts, F &&f) const {
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int part = threadIdx.x % 32 + 32 * j;
      if (part < p.cluster * (TEAM / 32)) f(j, parts[part]);
    }
  }

  // Counts the columns, of this part and of all.
  __device__ void count_columns() {
    float v[1] = {static_cast<float>(columns.count())};
    group_sum(v);
    per_count = 1 / fmaxf(v[0], 1);
    ring.exchange.post(0, {v[0], 0}, rank, p.cluster);
    for_parts(ring.exchange.collect(0), [&](int j, float2 part) { counts[j] = part.x; });
  }

  // Mean and squared deviations of one part of a row; for rms_norm, 0 and the sum of squares. Half types take one pass, around
  // an element of it: were that far away from all others, 9 of 24 bits would be lost.
  __device__ float2 deviations(const Mine &part) const {
    float x[K][N], sum[1] = {}, edge = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      unpack<T, N>(x[k], part.bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[0] = CENTERED ? sum[0] + x[k][j] : fmaf(x[k][j], x[k][j], sum[0]);
    }
    if (ODD) {
      edge = to_acc(part.edge);
      sum[0] = CENTERED ? sum[0] + edge : fmaf(edge, edge, sum[0]);
    }
    if (!CENTERED || sizeof(T) == 4) group_sum(sum, GROUP);
    if (!CENTERED) return {0, sum[0]};
    const float center = sizeof(T) == 4 ? sum[0] * per_count : __shfl_sync(0xffffffffu, x[0][0], 0, GROUP);
    float2 v = {};
    const auto add = [&](float d) {
      v.x += d;
      v.y = fmaf(d, d, v.y);
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) add(x[k][j] - center);
    }
    if (columns.has_edge()) add(edge - center);
    if constexpr (TEAM >= 32) {
      v = warp_sum<true>(v);
    } else {
      float both[2] = {v.x, v.y};
      group_sum(both, GROUP);
      v = {both[0], both[1]};
    }
    return {center + v.x * per_count, isinf(v.y) ? v.y : v.y - v.x * v.x * per_count};
  }

  // Mean and rstd of the row that is number `turn` of this team, around the mean of its first part.
  __device__ float2 statistics(int turn, float2 mine) const {
    if constexpr (TEAM <= 32) {
      __syncwarp();
      return {mine.x, rsqrtf(fmaf(mine.y, p.per_col, p.eps))};
    } else {
      const float2 *parts = ring.exchange.collect(turn);
      const float center = CENTERED ? parts[0].x : 0;
      float2 v = {};
      for_parts(parts, [&](int j, float2 part) {
        const float d = part.x - center;
        const float square = CENTERED ? fmaf(counts[j] * d, d, part.y) : part.y;
        if (CENTERED) v.x = fmaf(counts[j], d, v.x);
        v.y += square;
      });
      if (CENTERED) {
        v = warp_sum<true>(v);
        if (!isinf(v.y)) v.y -= v.x * v.x * p.per_col;
      } else {
        v.y = warp_sum<false>({v.y, 0}).x;
      }
      return {fmaf(v.x, p.per_col, center), rsqrtf(fmaf(v.y, p.per_col, p.eps))};
    }
  }

  __device__ void finish(int i, const Mine &part, float2 statistics) const {
    const int64_t r = row(i);
    const float mean = statistics.x, rstd = statistics.y;
    if (lane() == 0 && rank == 0) {
      if (CENTERED) p.mean[r] = mean;
      p.rstd[r] = rstd;
    }
    const auto write = [&](auto &x, const auto &w, const auto &b, uint32_t kept, int c) {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof x / sizeof x[0]); ++j) {
        const float xhat = (CENTERED ? x[j] - mean : x[j]) * rstd;
        x[j] = CENTERED ? fmaf(xhat, w[j], b[j]) : xhat * w[j];
      }
      if (FUSED == DROPPED) drop(x, p.dropout, kept);
      store(p.y + r * p.cols + c, x);
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N];
      unpack<T, N>(x, part.bits[k]);
      write(x, weight[k], bias[CENTERED ? k : 0], part.mask.of(k), columns.column(k));
    }
    if (!columns.has_edge()) return;
    float x[1] = {to_acc(part.edge)};
    write(x, edge_weight, edge_bias, part.mask.edge, columns.edge);
  }

  __device__ void run() {
    for (int i = 0; i < p.stages; ++i) fetch(i);
    load_weights<T>(weight, edge_weight, p.weight, columns);
    if constexpr (CENTERED) {
      load_weights<T>(bias, edge_bias, p.bias, columns);
      if constexpr (TEAM > 32) count_columns();
    }
    constexpr int COUNTED = CENTERED && TEAM > 32 ? 1 : 0;  // turns
    // Of a warp: the rows of its busiest team.
    const int turns = TEAM < 32 ? rows_from(first - team()) : rows;
    Mine part{};  // what a team without a row of its own goes on with
    float2 mine = {};
    if (CLUSTER && turns > 0) read(part, 0, COUNTED);
    for (int i = 0; i < turns; ++i) {
      Mine following;
      if (!CLUSTER) {
        mine = read(part, i, i + COUNTED);
      } else if (i + 1 < turns) {
        read(following, i + 1, i + 1 + COUNTED);  // so that nobody waits for the numbers of row i
      }
      const float2 s = statistics(i + COUNTED, mine);
      fetch(i + p.stages);  // all warps have posted row i, so they have read it
      if (TEAM >= 32 || i < rows) finish(i, part, s);
      if (CLUSTER) part = following;
    }
  }
};

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool CLUSTER, bool ODD, int BLOCKS>
__global__ void __launch_bounds__(THREADS<TEAM>, BLOCKS) ring_forward_kernel(const __grid_constant__ Forward<T> p) {
  if constexpr (CLUSTER && !HAS_CLUSTERS) return;
  using Rows = ForwardRows<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ Exchange<TEAM, CLUSTER> exchanges[Rows::TEAMS];
  Exchange<TEAM, CLUSTER> &exchange = exchanges[Rows::team()];
  int rank = 0;
#if HAS_CLUSTERS
  if (CLUSTER) rank = cluster_rank();
#endif
  exchange.open(Rows::lane());
  uint4 *const slots = shared + Rows::team() * p.stages * Rows::TENSORS * p.slot;
  Rows(p, slots, exchange, blockIdx.x / p.cluster, rank).run();
#if HAS_CLUSTERS
  if (CLUSTER) sync_cluster();  // no block ends while another still sends to it
#endif
}

}  // namespace norm_cuda

#endif
