// layer_norm and rms_norm of wide rows: the blocks of a cluster share a row, or a few, and end with them.
//
// A thread copies its vectors to shared memory, asynchronously, and is the only one to read them there, for the moments and again
// for y. So what is on its way takes no registers, and a multiprocessor has room for many blocks, which load while others wait. (Where
// few registers are needed otherwise, rows of some odd shapes stay there: they are not STAGED.)
//
// Each block joins its warps' moments and sends them to all. It may send to another when that one has set up its mbarrier: each says so
// first thing, and looks whether the others have only before it sends. And each may end alone: it has got all that it is sent.
//
// The weights come from the caches for every cluster: the more rows it takes, the less of that. The blocks' slices begin at multiples of
// 32 vectors, or all their warps would touch a line more (docs/tuning.md).
#ifndef EXTENSION_CPP_NORM_FORWARD_CLUSTER_CUH
#define EXTENSION_CPP_NORM_FORWARD_CLUSTER_CUH

#include "norm/norm_forward.cuh"

namespace norm_cuda {

// A kernel's shape: threads a block, elements of a row a thread, rows of a cluster (of ODD rows N apart, so that they begin alike),
// blocks that a multiprocessor has registers for, the widest row it is for, and whether its rows wait in shared memory.
template <int TEAM_, int ELEMENTS_, int ROWS_, int BLOCKS_,
          int WIDEST_ = MAX_CLUSTER *TEAM_ *ELEMENTS_, bool STAGED_ = true, bool EXACT_ = false>
struct ClusterShape {
  static constexpr int TEAM = TEAM_, ELEMENTS = ELEMENTS_, ROWS = ROWS_, BLOCKS = BLOCKS_,
                       WIDEST = WIDEST_;
  static constexpr bool STAGED = STAGED_, EXACT = EXACT_;
};
// For rows that leave no thread with fewer vectors: without conditions the compiler has less to keep.
template <int TEAM, int ELEMENTS, int ROWS, int BLOCKS, int WIDEST = MAX_CLUSTER *TEAM *ELEMENTS>
using ExactShape = ClusterShape<TEAM, ELEMENTS, ROWS, BLOCKS, WIDEST, true, true>;

// W: as of forward_kernel. Weights in x's type, and float ones of aligned half rows, wait in registers; others are read where they are
// needed.
template <typename T, bool CENTERED, Fused FUSED, bool ODD, typename W, typename S>
struct ClusterRows {
  static constexpr int N = VECTOR<T>, TEAM = S::TEAM, K = S::ELEMENTS / N, WARPS = TEAM / 32,
                       ROWS = S::ROWS;
  static constexpr int TENSORS = FUSED == ADDED ? 2 : 1, STEP = ODD ? N : 1;
  static constexpr bool OWN = std::is_same_v<W, T>,
                        FLOATS = !OWN && std::is_same_v<W, float> && !ODD;
  static constexpr bool MOVED = FUSED == ALONE && ODD && !CENTERED && N == 8;
  // Whether a row behind the last is left out, by a branch around each of its vectors. Else the cluster takes its first row again in its
  // place, which every thread then writes twice: without branches vectors mix. These alone are slower so, as measured.
  static constexpr bool HALF = N == 8, OTHER_WEIGHTS = HALF && CENTERED && !OWN;
  static constexpr bool LEAVES_OUT = OTHER_WEIGHTS
                                         ? (FUSED == ALONE && !FLOATS) || (FUSED == ADDED && !ODD)
                                         : FUSED == ALONE && ODD && (HALF ? !CENTERED : CENTERED);
  static constexpr bool STAGED = S::STAGED;
  // Whether the weights are asked for at once, or when the moments are on their way. (If nothing is staged, before the rows.)
  static constexpr bool EARLY = MOVED || (FUSED == ALONE && !ODD && !(CENTERED && N == 4));
  static constexpr int SHARED = STAGED ? ROWS * TENSORS * K * TEAM * 16 : 0;  // bytes
  static_assert(STAGED || FUSED == ALONE);
  using Mine = Part<T, TEAM, K, N, ODD>;

  struct Exchange {
    Moments of_warps[ROWS][WARPS];
    Moments of_blocks[ROWS][MAX_CLUSTER];
    uint64_t arrived;
  };

  const Forward<T> &p;
  const uint32_t slots;  // of this thread
  const int rank;
  const int first;  // row; the others are STEP apart
  const Columns<TEAM, K, N, ODD> columns;
  Mine parts[STAGED ? 1 : ROWS]{};
  T edges[ROWS][TENSORS];
  Mask<TEAM, K, N, ODD> masks[ROWS];
  std::conditional_t<FLOATS, float[N], Vector<T, N>> weight[K], bias[CENTERED ? K : 1];
  float edge_weight[1], edge_bias[1];

  __device__ ClusterRows(const Forward<T> &p, const uint4 *shared, int cluster, int rank)
      : p(p),
        slots(in_each_thread(shared_address(shared + threadIdx.x))),
        rank(rank),
        first(first_of(cluster)),
        columns(p, first, threadIdx.x, rank) {}

  __device__ static int first_of(int cluster) {
    return cluster / STEP * (STEP * ROWS) + cluster % STEP;
  }

  // The same number, in a register of each thread: of addresses that have a part in common ptxas (of CUDA 13.0) makes copies that do
  // not run where they have a policy, too.
  __device__ static uint32_t in_each_thread(uint32_t address) {
    return __shfl_sync(0xffffffffu, address, threadIdx.x % 32);
  }

  __device__ int64_t row(int i) const {
    return LEAVES_OUT || first + i * STEP < p.rows ? first + i * STEP : first;
  }
  __device__ bool is_row(int i) const { return !LEAVES_OUT || row(i) < p.rows; }
  __device__ uint32_t slot(int number, int k) const { return slots + 16 * (number * K + k) * TEAM; }

  // Asks for this thread's part of `row`, zeros where it has none.
  __device__ void copy(int number, const T *row, bool is_row) {
    const T *mine = row + columns.first;
    if (!LEAVES_OUT)
      asm("" : "+l"(mine));  // or the compiler would work it out for each vector anew
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const bool has = columns.has(k) && is_row;
      copy_async(slot(number, k),
                 !has         ? p.x
                 : LEAVES_OUT ? row + columns.column(k)
                              : mine + k * TEAM * N,
                 has, p.policy);
    }
  }

  // Asks for row number i of the cluster: x, and the residual.
  __device__ void fetch(int i) {
    if constexpr (STAGED) {
      const T *const rows[2] = {p.x + row(i) * p.x_stride, p.residual + row(i) * p.residual_stride};
#pragma unroll
      for (int t = 0; t < TENSORS; ++t) {
        copy(i * TENSORS + t, rows[t], is_row(i));
        edges[i][t] = columns.has_edge() && is_row(i) ? rows[t][columns.edge] : from_acc<T>(0);
      }
      commit_copies();
    } else {
      if (is_row(i)) parts[i].load(p.x + row(i) * p.x_stride, columns, p.policy);
      edges[i][0] = parts[i].edge;
    }
  }

  // Of vectors that are not there zeros. By load_cached, for other loads nvcc puts off until the weights are needed.
  __device__ void load_floats(float (&w)[K][N], const Weights &weights) const {
    const float *mine = static_cast<const float *>(weights.data) + columns.first;
    asm("" : "+l"(mine));  // as in copy()
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const uint4 four = load_cached(mine + k * TEAM * N + j, columns.has(k), USUAL);
        memcpy(w[k] + j, &four, sizeof four);
      }
    }
  }

  __device__ void load_weights() {
    if (columns.has_edge()) {
      p.weight.template load<T>(edge_weight, columns.edge);
      if (CENTERED) p.bias.template load<T>(edge_bias, columns.edge);
    }
    if constexpr (FLOATS) {
      load_floats(weight, p.weight);
      if constexpr (CENTERED) load_floats(bias, p.bias);
    } else if constexpr (OWN && MOVED) {
      load_moved<T, 0>(weight, static_cast<const T *>(p.weight.data), columns, p.cols);
    } else if constexpr (OWN) {
      load_packed<T>(weight, p.weight, columns);
      if constexpr (CENTERED) load_packed<T>(bias, p.bias, columns);
    }
  }

  __device__ Vector<T, N> vector(int i, int tensor, int k) const {
    if constexpr (STAGED) return load_shared(slot(i * TENSORS + tensor, k));
    return parts[i].bits[k];
  }

  __device__ void load(Mine &part, int i, int tensor) const {
#pragma unroll
    for (int k = 0; k < K; ++k) part.bits[k] = vector(i, tensor, k);
    part.edge = edges[i][tensor];
  }

  // Of this warp's part of row i, which has arrived; the sum with the residual then stands in its place.
  __device__ Moments moments(int i, float count) {
    Mine part;
    load(part, i, 0);
    if constexpr (FUSED == ADDED) {
      Mine residual;
      load(residual, i, 1);
      if (is_row(i)) add_residual(part, residual, p, row(i), masks[i], columns);
#pragma unroll
      for (int k = 0; k < K; ++k) store_shared(slot(i * TENSORS, k), part.bits[k]);
      edges[i][0] = part.edge;
    }
    return moments_of<T, CENTERED, N == 8>(part, columns, count);
  }

  template <int I>
  __device__ void all_moments(Moments (&all)[ROWS], float count) {
    if (STAGED) wait_copies<ROWS - 1 - I>();
    all[I] = moments(I, count);
    if constexpr (I + 1 < ROWS) all_moments<I + 1>(all, count);
  }

  // Of vector k.
  __device__ void weights_of(float (&w)[N], float (&b)[N], int k) const {
    if constexpr (FLOATS) {
      memcpy(w, weight[k], sizeof w);
      if constexpr (CENTERED) memcpy(b, bias[k], sizeof b);
    } else if constexpr (OWN) {
      unpack<T, N>(w, weight[k]);
      if constexpr (CENTERED) unpack<T, N>(b, bias[k]);
    } else if constexpr (!std::is_same_v<W, Any>) {
      p.weight.template load_as<W, N, !ODD>(w, columns.clamped(k));
      if (CENTERED) p.bias.template load_as<W, N, !ODD>(b, columns.clamped(k));
    } else {
      p.weight.template load<T, N, !ODD>(w, columns.clamped(k));
      if (CENTERED) p.bias.template load<T, N, !ODD>(b, columns.clamped(k));
    }
  }

  // y of all rows.
  __device__ void finish(const Moments (&all)[ROWS]) const {
    float mean[ROWS], rstd[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      mean[i] = all[i].mean, rstd[i] = rstd_of(all[i], p.per_col, p.eps);
      if (threadIdx.x == 0 && rank == 0 && is_row(i))
        write_statistics<CENTERED>(p, row(i), mean[i], rstd[i]);
    }
    const auto write = [&](auto &x, int i, const auto &w, const auto &b, uint32_t kept, int c) {
      normalize<CENTERED>(x, mean[i], rstd[i], w, b);
      if (FUSED == DROPPED) drop(x, p.dropout, kept);
      store(p.y + row(i) * p.cols + c, x);
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float w[N], b[N];
      weights_of(w, b, k);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        float x[N];
        unpack<T, N>(x, vector(i, 0, k));
        if (columns.has(k) && is_row(i)) write(x, i, w, b, masks[i].of(k), columns.column(k));
      }
    }
    if (!columns.has_edge()) return;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      float x[1] = {to_acc(edges[i][0])};
      if (is_row(i)) write(x, i, edge_weight, edge_bias, masks[i].edge, columns.edge);
    }
  }

  __device__ void run(Exchange &exchange) {
#if HAS_CLUSTERS
    if (S::EXACT) __builtin_assume(columns.left > (K - 1) * TEAM * N);
    if (!STAGED) load_weights();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) fetch(i);
    if (STAGED && EARLY) load_weights();
    if (FUSED != ALONE && p.dropout.seed != nullptr) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i)
        masks[i].make(p.dropout, *p.dropout.seed, row(i) * p.cols, columns);
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Moments mine[ROWS];
    all_moments<0>(mine, columns.count_of(warp));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (lane == 0) exchange.of_warps[i][warp] = mine[i];
    }
    __syncthreads();
    wait_for_cluster();
    const float count = columns.count();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (warp != i % WARPS) continue;
      Moments block = join<CENTERED, LANES<TEAM>, WARPS>(exchange.of_warps[i], WARPS,
                                                         __fdividef(1, fmaxf(count, 1)));
      block.count = count;
      if (lane < p.cluster) send(&exchange.of_blocks[i][rank], &exchange.arrived, lane, block);
    }
    if (STAGED && !EARLY) load_weights();
    wait_cluster(&exchange.arrived, 0);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      mine[i] =
          join<CENTERED, MAX_CLUSTER, MAX_CLUSTER>(exchange.of_blocks[i], p.cluster, p.per_col);
    }
    finish(mine);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (row(i) < p.let_go || !is_row(i)) continue;
      let_go(p.x + row(i) * p.x_stride, columns);
      if (FUSED == ADDED) let_go(p.residual + row(i) * p.residual_stride, columns);
    }
#endif
  }
};

template <typename T, bool CENTERED, Fused FUSED, bool ODD, typename W, typename S>
__global__ void __launch_bounds__(S::TEAM, resident(S::TEAM, S::BLOCKS))
    cluster_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  using Rows = ClusterRows<T, CENTERED, FUSED, ODD, W, S>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ typename Rows::Exchange exchange;
  if (!Rows::LEAVES_OUT && Rows::first_of(cluster_number()) >= p.rows)
    return;  // all blocks of the cluster
  if (threadIdx.x == 0) {
    init_mbarrier(&exchange.arrived, 1);
    fence_mbarrier_init();
    expect_bytes(&exchange.arrived, sizeof exchange.of_blocks[0][0] * Rows::ROWS * p.cluster);
  }
  arrive_at_cluster();
  Rows(p, shared, cluster_number(), cluster_rank()).run(exchange);
#endif
}

}  // namespace norm_cuda

#endif
