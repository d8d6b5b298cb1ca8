// layer_norm and rms_norm of rows that begin between two multiples of 16 bytes (ODD, norm_rows.cuh).
//
// The vectors of x are those of memory, so the weights that belong to them begin anywhere: they are moved into place. That is done for
// several rows at a time, which begin alike: as many as was fastest in registers that suffice.
#ifndef EXTENSION_CPP_NORM_FORWARD_ODD_CUH
#define EXTENSION_CPP_NORM_FORWARD_ODD_CUH

#include "norm/norm_forward.cuh"

namespace norm_cuda {

// Rows of a team with K vectors a thread, as measured. W: float if that is the type of weights beside half types, else Any.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, typename W>
constexpr int odd_rows() {
  if (sizeof(T) == 4 || FUSED != ALONE) return CENTERED ? 2 : 1;
  if (K <= 2) return !CENTERED ? 2 : K == 2 ? 3 : 4;
  return (CENTERED ? 2 : 1) * (std::is_same_v<W, float> && TEAM <= 128 ? 2 : 1);
}

// Threads that a multiprocessor holds: fewer where float weights have more rows than others.
template <typename T, bool CENTERED, Fused FUSED, int ROWS, int K>
constexpr int ODD_RESIDENT = (FUSED == ADDED && sizeof(T) == 4) ||
                                     (K > 2 && ROWS > (CENTERED ? 2 : 1))
                                 ? 512
                             : FUSED == ADDED || CENTERED ? 768
                                                          : 1024;

// Whether what is read may outlast what is written. Half types without a residual are slower by what that takes.
template <typename T, Fused FUSED>
constexpr bool HAS_POLICY = sizeof(T) == 4 || FUSED == ADDED;

// A team's rows.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, typename W, int ROWS>
struct OddRows {
  static constexpr int N = VECTOR<T>;
  using Mine = Part<T, TEAM, K, N, true>;

  const Forward<T> &p;
  const int64_t first;  // row; the others are N apart
  const Columns<TEAM, K, N, true> columns;
  Mine parts[ROWS]{};
  Mask<TEAM, K, N, true> masks[ROWS]{};
  float mean[ROWS], rstd[ROWS];

  __device__ OddRows(const Forward<T> &p, int64_t team)
      : p(p), first(team / N * (N * ROWS) + team % N), columns(p, first, threadIdx.x % TEAM, 0) {}

  __device__ int64_t row(int i) const { return first + i * N; }
  __device__ bool is_row(int i) const {
    return row(i) < p.rows;
  }  // all lanes of a warp go on: they sum together

  // x, and what is added to it.
  __device__ void load() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!is_row(i)) continue;
      const T *const x = p.x + row(i) * p.x_stride;
      if constexpr (HAS_POLICY<T, FUSED>) {
        parts[i].load(x, columns, p.policy);
      } else {
        parts[i].load(x, columns);
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (FUSED == ALONE || !is_row(i)) continue;
      Mine residual;
      if (FUSED == ADDED) residual.load(p.residual + row(i) * p.residual_stride, columns, p.policy);
      if (p.dropout.seed != nullptr)
        masks[i].make(p.dropout, *p.dropout.seed, row(i) * p.cols, columns);
      if constexpr (FUSED == ADDED) add_residual(parts[i], residual, p, row(i), masks[i], columns);
    }
  }

  __device__ void make_statistics() {
    constexpr bool FILLS = sizeof(T) == 2 && FUSED != ADDED;
    Moments moments[ROWS];
    const float count = columns.count_of(threadIdx.x % TEAM / 32);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      moments[i] = moments_of<T, CENTERED, FILLS>(parts[i], columns, count);
    join_team<CENTERED, TEAM>(moments, p.per_col);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      mean[i] = moments[i].mean;
      rstd[i] = rstd_of(moments[i], p.per_col, p.eps);
      if (threadIdx.x % TEAM > 0 || !is_row(i)) continue;
      write_statistics<CENTERED>(p, row(i), mean[i], rstd[i]);
    }
  }

  // y of columns c and on of row i, from its x.
  template <int M>
  __device__ void write(float (&x)[M], int i, const float (&w)[M], const float (&b)[M],
                        uint32_t kept, int c) const {
    normalize<CENTERED>(x, mean[i], rstd[i], w, b);
    if (FUSED == DROPPED) drop(x, p.dropout, kept);
    store(p.y + row(i) * p.cols + c, x);
  }

  // y of the vectors; load(w, weights, c) gives N weights from column c on.
  template <typename L>
  __device__ void write_vectors(const L &load) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float w[N], b[N];
      load(w, p.weight, columns.column(k));
      if (CENTERED) load(b, p.bias, columns.column(k));
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        if (!is_row(i)) continue;
        float x[N];
        unpack<T, N>(x, parts[i].bits[k]);
        write(x, i, w, b, masks[i].of(k), columns.column(k));
      }
    }
  }

  // Each type of weights apart: with the branches of the others in its way the compiler loads them one by one.
  __device__ void write_vectors() const {
    if constexpr (std::is_same_v<W, float>) {
      write_vectors([](float(&w)[N], const Weights &weights, int c) {
        load_pairs(w, static_cast<const float *>(weights.data), c);
      });
    } else if (p.weight.is_own() && (!CENTERED || p.bias.is_own())) {
      write_vectors([](float(&w)[N], const Weights &weights, int c) {
        unpack<T, N>(w, load_shifted<T, N>(static_cast<const T *>(weights.data), c));
      });
    } else {
      write_vectors([](float(&w)[N], const Weights &weights, int c) {
        weights.template load<T, N, false>(w, c);
      });
    }
  }

  __device__ void let_rows_go() const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!HAS_POLICY<T, FUSED> || row(i) < p.let_go || !is_row(i)) continue;
      let_go(p.x + row(i) * p.x_stride, columns);
      if (FUSED == ADDED) let_go(p.residual + row(i) * p.residual_stride, columns);
    }
  }

  __device__ void write_edges() const {
    if (!columns.has_edge()) return;
    float w[1], b[1];
    p.weight.template load<T>(w, columns.edge);
    if (CENTERED) p.bias.template load<T>(b, columns.edge);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (!is_row(i)) continue;
      float x[1] = {to_acc(parts[i].edge)};
      write(x, i, w, b, masks[i].edge, columns.edge);
    }
  }
};

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, typename W, int ROWS>
__global__ void __launch_bounds__(THREADS<TEAM>,
                                  ODD_RESIDENT<T, CENTERED, FUSED, ROWS, K> / THREADS<TEAM>)
    odd_forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int TEAMS = THREADS<TEAM> / TEAM;
  OddRows<T, CENTERED, FUSED, TEAM, K, W, ROWS> rows(
      p, static_cast<int64_t>(blockIdx.x) * TEAMS + threadIdx.x / TEAM);
  rows.load();
  rows.make_statistics();
  rows.write_vectors();
  rows.let_rows_go();
  rows.write_edges();
}

}  // namespace norm_cuda

#endif
