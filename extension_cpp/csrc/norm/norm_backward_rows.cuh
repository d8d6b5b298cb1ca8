// The gradients of layer_norm and rms_norm, in one pass over x and grad_out (norm_rows.cuh says how rows meet threads).
//
// A row comes from the ring into registers, where its sums of g * xhat and of g are taken, and, when the whole team's are
// there, grad_x. The weights and the sums of the weight gradients stay in registers over all rows of a block; at the end a block
// writes them as one partial row.
#ifndef EXTENSION_CPP_NORM_BACKWARD_ROWS_CUH
#define EXTENSION_CPP_NORM_BACKWARD_ROWS_CUH

#include "norm/norm_backward.cuh"
#include "norm/norm_ring.cuh"

namespace norm_cuda {

// Blocks that a multiprocessor holds: two, so that one computes while the other waits for its sums, where registers allow.
template <bool CENTERED, Fused FUSED, int TEAM, int K, int N, bool CLUSTER, bool ODD>
constexpr int BLOCKS = !CLUSTER && FUSED == ALONE && TEAM <= 256 &&
                               K * N <= (ODD                     ? 2 * N
                                         : CENTERED || TEAM > 32 ? 16
                                                                 : 24)
                           ? 2
                           : 1;

// Whether a row's xhat and g stay in registers between its sums and grad_x; else x and grad_out are read from the ring again,
// for which there is time where elements are long, or need less work.
template <typename T, bool CENTERED, Fused FUSED, int E>
constexpr bool KEEPS = sizeof(T) == 2 && CENTERED &&FUSED != ADDED &&E <= 32;

// Whether a cluster's rows, too, are read from the ring again, in place of waiting for their sums in registers: where these are
// few for three tensors, or, of layer_norm, for more than four vectors or many threads.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K>
constexpr bool REREADS = sizeof(T) == 2 && (FUSED == ADDED || (CENTERED && (K > 4 || TEAM > 256)));

// One team's rows. FULL: vectors that every thread has, so that they need no condition. PACKED: weights stay in x's type, which takes
// fewer registers; they are own.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool CLUSTER, bool ODD, int FULL,
          bool PACKED>
struct BackwardRows {
  static constexpr int N = VECTOR<T>;
  static constexpr int TEAMS = THREADS<TEAM> / TEAM;
  static constexpr bool KEEP = !CLUSTER && KEEPS<T, CENTERED, FUSED, K * N>;
  static constexpr bool REREAD = CLUSTER && REREADS<T, CENTERED, FUSED, TEAM, K>;
  // Whether grad_x is made from x with xhat written out, for an operation less. An infinite weight then gives NaN in place of inf.
  static constexpr bool FROM_X = CLUSTER && sizeof(T) == 2 && FUSED == ALONE;
  static constexpr int TENSORS = FUSED == ADDED ? 3 : 2;
  static constexpr int KEPT = KEEP ? K : 1;
  // Whether the mask is made before the row is there; the one of grad_dropped is needed last, but might not find registers then.
  static constexpr bool EARLY = FUSED == DROPPED || (ODD && N == 4);
  // Whether a row's sums are added over the warp at once with those of the next, in half the time. These then leave a little later,
  // which is too late where rows are as little work as rms_norm's in float.
  static constexpr bool TOGETHER = CENTERED || sizeof(T) == 2;
  // Who asks for rows. In a cluster the last warp does, for the first has the rows' ends to do.
  static constexpr int ASKER = CLUSTER ? TEAM - 32 : 0;
  static_assert(!(REREAD && EARLY));  // a row's mask would have to outlast the next one's
  using TeamRing = Ring<T, TENSORS, TEAM, K, N, CLUSTER, ODD, REREAD>;
  using Mine = Part<T, TEAM, K, N, ODD>;
  // A row's part of each tensor.
  struct Loaded {
    Mine x, grad_out;
    Mask<TEAM, K, N, ODD> mask;  // if EARLY
    std::conditional_t<FUSED == ADDED, Mine, Part<T, TEAM, 1, N, false>> grad_sum;
  };

  const Backward<T> &p;
  TeamRing ring;
  const int64_t seed;
  const int rank;
  const Share share;
  const int turns;  // the rows of the block's busiest team: all teams pass as many barriers
  const Columns<TEAM, K, N, ODD> columns;
  std::conditional_t<PACKED, Vector<T, N>, float[N]> weight[K];
  float grad_weight[K][N], grad_bias[CENTERED ? K : 1][N];
  float edge_weight[1], edge_grad_weight[1], edge_grad_bias[1];
  float xhat[KEPT][N], g[KEPT][N];

  __device__ BackwardRows(const Backward<T> &p, uint4 *slots, Exchange<TEAM, CLUSTER> &exchange,
                          int64_t chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages, p.slot},
        seed(FUSED == ALONE ? 0 : seed_of(p.dropout)),
        rank(rank),
        share(rows_of(p, chunk)),
        turns(CLUSTER ? share.rows
                      : static_cast<int>((p.rows - chunk * TEAMS + share.step - 1) / share.step)),
        columns(p, share.first, lane(), rank) {
    // For blocks a parameter, which takes no register.
    const int apart = CLUSTER ? static_cast<int>(share.step * p.x_stride / N % 8) : p.apart;
    ring.line_up(p.x + row(0) * p.x_stride, apart, columns);
  }

  __device__ static Share rows_of(const Backward<T> &p, int64_t chunk) {
    if (ODD && CLUSTER) return share_of(p.shares, static_cast<int>(chunk));
    const int64_t first = chunk * TEAMS + team(), step = p.chunks * TEAMS;
    return {first, step, static_cast<int>((p.rows - first + step - 1) / step)};
  }

  __device__ static int team() { return TEAMS > 1 ? threadIdx.x / TEAM : 0; }
  __device__ static int lane() { return TEAMS > 1 ? threadIdx.x % TEAM : threadIdx.x; }
  __device__ int64_t row(int i) const { return share.first + i * share.step; }

  __device__ void fetch(int i) {
    if (lane() != ASKER || i >= share.rows) return;
    const T *starts[TENSORS] = {p.x + row(i) * p.x_stride, p.grad_out + row(i) * p.grad_out_stride};
    if (FUSED == ADDED)
      starts[TENSORS - 1] =
          p.grad_sum == nullptr ? nullptr : p.grad_sum + row(i) * p.grad_sum_stride;
    ring.fetch(i, starts, columns, row(i) == p.rows - 1, p.policy);
  }

  // Row i, which is at `place`.
  __device__ void load(Loaded &loaded, int i, const Place &place) const {
    ring.load(loaded.x, 0, i, p.x + row(i) * p.x_stride, columns, place);
    ring.load(loaded.grad_out, 1, i, p.grad_out + row(i) * p.grad_out_stride, columns, place);
    if constexpr (FUSED == ADDED) {
      if (p.grad_sum == nullptr) {
        loaded.grad_sum = {};
      } else {
        ring.load(loaded.grad_sum, 2, i, p.grad_sum + row(i) * p.grad_sum_stride, columns, place);
      }
    }
  }

  __device__ void make_mask(Mask<TEAM, K, N, ODD> &mask, int i) const {
    if (FUSED == DROPPED || (FUSED == ADDED && p.grad_dropped != nullptr)) {
      mask.make(p.dropout, seed, row(i) * p.cols, columns);
    }
  }

  __device__ Statistics statistics(int i) const {
    if (i >= share.rows) return {0, 0};
    return {CENTERED ? p.mean[row(i)] : 0, p.rstd[row(i)]};
  }

  __device__ void weight_of(float (&w)[N], int k) const {
    if constexpr (PACKED) {
      unpack<T, N>(w, weight[k]);
    } else {
      memcpy(w, weight[k], sizeof w);
    }
  }

  // The row's part in the weight gradients, and this thread's sums of g * xhat and of g = weighted().
  __device__ float2 sums(const Loaded &loaded, const Statistics &s) {
    float along[2] = {}, sum[2] = {};  // two of each: shorter chains
    // Leaves xhat in x and g in grad.
    const auto add = [&](auto &x, auto &grad, const auto &w, auto &to_weight, auto &to_bias,
                         uint32_t kept) {
      if (FUSED == DROPPED) drop(grad, p.dropout, kept);
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof x / sizeof x[0]); ++j) {
        x[j] = normalize<T, CENTERED>(x[j], s);
        to_weight[j] = fmaf(grad[j], x[j], to_weight[j]);
        if (CENTERED) to_bias[j] += grad[j];
        grad[j] = weighted<T>(grad[j], w[j], s);
        along[j % 2] = fmaf(grad[j], x[j], along[j % 2]);
        if (CENTERED) sum[j % 2] += grad[j];
      }
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float x[N], grad[N], w[N];
      unpack<T, N>(x, loaded.x.bits[k]);
      unpack<T, N>(grad, loaded.grad_out.bits[k]);
      weight_of(w, k);
      add(x, grad, w, grad_weight[k], grad_bias[CENTERED ? k : 0], loaded.mask.of(k));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (KEEP) xhat[KEEP ? k : 0][j] = x[j], g[KEEP ? k : 0][j] = grad[j];
      }
    }
    if (columns.has_edge()) {
      float x[1] = {to_acc(loaded.x.edge)}, grad[1] = {to_acc(loaded.grad_out.edge)};
      add(x, grad, edge_weight, edge_grad_weight, edge_grad_bias, loaded.mask.edge);
    }
    return {along[0] + along[1], sum[0] + sum[1]};
  }

  __device__ static float2 of_warp(float2 v) {
    if constexpr (TEAM >= 32) return warp_sum<CENTERED>(v);
    float both[2] = {v.x, v.y};
    group_sum(both, TEAM);
    return {both[0], both[1]};
  }

  // The team's sums for row i, from those of its warps. Clusters: what this lane adds to them.
  __device__ float2 total(int i, float2 mine) const {
    if constexpr (TEAM <= 32) {
      __syncwarp();
      return mine;
    } else {
      constexpr int WARPS = TEAM / 32;
      const float2 *parts = ring.exchange.collect(i);
      if constexpr (CLUSTER) {
        float2 v = {};
#pragma unroll
        for (int j = 0; j < MAX_CLUSTER * WARPS; j += 32) {
          const int part = j + threadIdx.x % 32;
          if (part < p.cluster * WARPS) {
            v.x += parts[part].x;
            v.y += parts[part].y;
          }
        }
        return v;
      } else {
        const int warp = threadIdx.x % LANES<TEAM>;
        const float2 part = warp < WARPS ? parts[warp] : float2{};
        float v[2] = {part.x, part.y};
        group_sum(v, LANES<TEAM>);
        return {v[0], v[1]};
      }
    }
  }

  // grad_x of row i.
  __device__ void finish(int i, const Loaded &loaded, const Statistics &s, float2 total) const {
    if (p.grad_x == nullptr) return;
    const int64_t first_element = row(i) * p.cols;
    auto mask = loaded.mask;
    if (!EARLY) make_mask(mask, i);
    const float along = -total.x * p.per_col, shift = -total.y * p.per_col;
    const auto write = [&](auto &grad_x, const auto &grad_sum, uint32_t kept, int c) {
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof grad_x / sizeof grad_x[0]); ++j) {
        if (FUSED == ADDED) grad_x[j] += grad_sum[j];
      }
      store(p.grad_x + first_element + c, grad_x);
      if (FUSED == ADDED && p.grad_dropped != nullptr) {
        drop(grad_x, p.dropout, kept);
        store(p.grad_dropped + first_element + c, grad_x);
      }
    };
    const float slope = along * s.rstd, lift = CENTERED ? fmaf(-s.mean, slope, shift) : 0;
    // x becomes grad_x.
    const auto prepare = [&](auto &x, auto &grad, const auto &w, uint32_t kept) {
      if (FUSED == DROPPED) drop(grad, p.dropout, kept);
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof x / sizeof x[0]); ++j) {
        x[j] = FROM_X ? fmaf(x[j], slope, fmaf(grad[j], w[j], lift)) * s.rstd
                      : combine<T, CENTERED>(normalize<T, CENTERED>(x[j], s),
                                             weighted<T>(grad[j], w[j], s), along, slope, shift, s);
      }
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N], grad[N], grad_sum[N] = {};
      if constexpr (KEEP) {
#pragma unroll
        for (int j = 0; j < N; ++j)
          x[j] = combine<T, CENTERED>(xhat[k][j], g[k][j], along, slope, shift, s);
      } else {
        unpack<T, N>(x, loaded.x.bits[k]);
        unpack<T, N>(grad, loaded.grad_out.bits[k]);
        float w[N];
        weight_of(w, k);
        prepare(x, grad, w, mask.of(k));
      }
      if constexpr (FUSED == ADDED) unpack<T, N>(grad_sum, loaded.grad_sum.bits[k]);
      write(x, grad_sum, mask.of(k), columns.column(k));
    }
    if (!columns.has_edge()) return;
    float x[1] = {to_acc(loaded.x.edge)}, grad[1] = {to_acc(loaded.grad_out.edge)},
          grad_sum[1] = {};
    prepare(x, grad, edge_weight, mask.edge);
    if (FUSED == ADDED) grad_sum[0] = to_acc(loaded.grad_sum.edge);
    write(x, grad_sum, mask.edge, columns.edge);
  }

  // The weights, and zeros for the sums of their gradients.
  __device__ void begin_sums() {
    if constexpr (PACKED) {
      load_packed<T>(weight, p.weight, columns);
      if (columns.has_edge()) p.weight.template load<T>(edge_weight, columns.edge);
    } else {
      load_weights<T>(weight, edge_weight, p.weight, columns);
    }
    memset(grad_weight, 0, sizeof grad_weight);
    memset(grad_bias, 0, sizeof grad_bias);
    edge_grad_weight[0] = edge_grad_bias[0] = 0;
  }

  // All rows, and this block's partial row of the weight gradients.
  __device__ void run(int64_t chunk, float *shared) {
    if (FULL > 0) __builtin_assume(columns.left > (FULL - 1) * TEAM * N);
    for (int i = 0; i < p.stages; ++i) fetch(i);
    Statistics now = statistics(0), next = statistics(1);
    begin_sums();
    Loaded loaded;
    if (CLUSTER && share.rows > 0) {
      if (EARLY) make_mask(loaded.mask, 0);
      ring.wait();
      load(loaded, 0, ring.now);
      ring.exchange.post(0, of_warp(sums(loaded, now)), rank, p.cluster);
      ring.now.advance(p.stages);
    }
    for (int i = 0; i < turns; ++i) {
      const Statistics after = statistics(i + 2);
      if constexpr (CLUSTER) {
        Loaded following;
        float2 ahead = {};  // this thread's, then its warp's sums of the next row
        const bool is_last = i + 1 >= share.rows;
        if (!is_last) {
          if (EARLY) make_mask(following.mask, i + 1);
          ring.wait();
          load(following, i + 1, ring.now);
          ring.now.advance(p.stages);
          ahead = sums(following, next);
        }
        if (!TOGETHER && !is_last) ring.exchange.post(i + 1, of_warp(ahead), rank, p.cluster);
        float2 sum = total(i, {});
        if (TOGETHER) {
          warp_sums<CENTERED>(sum, ahead);
          if (!is_last) ring.exchange.post(i + 1, ahead, rank, p.cluster);
        } else {
          sum = of_warp(sum);
        }
        if constexpr (REREAD) {
          if (i > 0) fetch(i - 1 + p.stages);
          load(loaded, i, ring.again);
          ring.leave();
        } else {
          fetch(i + p.stages);  // all warps have posted row i, so they have read it
        }
        finish(i, loaded, now, sum);
        if (!REREAD) loaded = following;
      } else {
        loaded = {};
        if (i < share.rows) {
          if (EARLY) make_mask(loaded.mask, i);
          ring.wait();
          load(loaded, i, ring.now);
        }
        const float2 mine = of_warp(sums(loaded, now));
        ring.exchange.post(i, mine, rank, p.cluster);
        const float2 sum = total(i, mine);
        if (KEEP) {
          fetch(i + p.stages);
        } else {
          if (i > 0) fetch(i - 1 + p.stages);  // of row i - 1 the team has made grad_x
          if (i < share.rows) load(loaded, i, ring.now);
        }
        if (i < share.rows) finish(i, loaded, now, sum);
        ring.now.advance(p.stages);
      }
      now = next;
      next = after;
    }
    write_partials(chunk, shared);
  }

  __device__ void write_partials(int64_t chunk, float *shared) const {
    float *partial = p.partial + chunk * p.cols;
    if (p.wants_weight) write_partial(grad_weight, edge_grad_weight[0], shared, partial);
    if constexpr (CENTERED) {
      if (p.wants_bias)
        write_partial(grad_bias, edge_grad_bias[0], shared,
                      partial + (p.wants_weight ? p.chunks * p.cols : 0));
    }
  }

  // One of the sums over the rows to its partial row. The teams' are added in shared memory, where the ring has no rows left; those
  // of odd rows go through it, too, for from the registers they would be N writes to the same 32 bytes, a column each.
  __device__ void write_partial(const float (&sums)[K][N], float edge, float *shared,
                                float *partial) const {
    constexpr bool THROUGH = TEAMS > 1 || ODD;
    const int begin = TEAMS > 1 || !ODD ? 0 : columns.begin;
    float *to = !THROUGH ? partial : shared + team() * p.cols - begin;
    if (THROUGH) __syncthreads();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float *const mine = to + columns.column(k);
      if constexpr (ODD && TEAMS > 1) {
#pragma unroll
        for (int j = 0; j < N; ++j) mine[j] = sums[k][j];
      } else {
#pragma unroll
        for (int j = 0; j < N; j += 4) {
          *reinterpret_cast<float4 *>(mine + j) = {sums[k][j], sums[k][j + 1], sums[k][j + 2],
                                                   sums[k][j + 3]};
        }
      }
    }
    if (columns.has_edge()) to[columns.edge] = edge;
    if (!THROUGH) return;
    __syncthreads();
    for (int c = max(begin, 0) + threadIdx.x; c < (TEAMS > 1 ? p.cols : columns.end);
         c += THREADS<TEAM>) {
      float sum = 0;
      for (int t = 0; t < TEAMS; ++t) sum += shared[t * p.cols + c - begin];
      partial[c] = sum;
    }
  }
};

}  // namespace norm_cuda

#endif
