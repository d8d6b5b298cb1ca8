// The parameters of the norms' GPU kernels, and the prologues and epilogues of the fused forms. A
// form is the operation that is fused with the norm:
//   Plain        nothing
//   Residual     prologue: sum = residual + dropout(x) replaces x
//                backward: grad_x += grad_sum, grad_dropped = dropout(grad_x)
//   DropoutOfY   epilogue: y = dropout(y); backward: grad_out = dropout(grad_out) first
#ifndef EXTENSION_CPP_NORM_FUSED_CUH
#define EXTENSION_CPP_NORM_FUSED_CUH

#include "common/cuda_dropout.cuh"
#include "common/cuda_row.cuh"
#include "norm/norm.h"

namespace norms {

// The parameters that all kernels with a plan share.
struct Geometry {
  int64_t rows;
  int cols;
  int slice;             // columns of a CTA
  int cluster;           // CTAs that share a row
  float per_col;         // 1 / cols
  uint64_t hint;         // of loads (cuda_cache.cuh)
  int64_t release_from;  // first row whose lines become evict_normal again; rows: none
};

template <typename T>
struct ForwardParams : Geometry {
  const T *x;
  int64_t x_stride;
  const void *parameters[2];  // weight, bias; NULL: ones, zeros
  bool are_float;             // the parameters are float32 while T is a half type
  T *y;
  float *mean;  // NULL: not wanted, or rms_norm
  float *rstd;  // NULL: not wanted
  float eps;
  const T *residual;
  int64_t residual_stride;
  T *sum;
  dropout_t dropout;
  int ahead;  // rows from a row to the one to prefetch into the L2; 0: none
};

template <typename T>
struct BackwardParams : Geometry {
  const T *x;
  int64_t x_stride;
  const T *grad_out;
  int64_t grad_out_stride;
  const float *mean;  // NULL: rms_norm
  const float *rstd;
  const void *weight;  // NULL: ones
  bool is_float;       // the weight is float32 while T is a half type
  T *grad_x;           // NULL: not wanted
  const T *grad_sum;   // NULL: none
  int64_t grad_sum_stride;
  T *grad_dropped;  // NULL: not wanted
  dropout_t dropout;
  bool wanted[2];  // grad_weight, grad_bias
  float *partial;  // (wanted, groups of rows, cols): the sums over the rows of each group
  int64_t groups;  // this and the next four: as in Plan (norm_plan.h)
  int period;
  bool has_prefetch;
  int stages, stage_vectors;
  void *grad_parameters[2];  // SPLIT: grad_weight, grad_bias
  int column_ctas;           // SPLIT
};

// The dropout mask of a thread's elements of a row: bit 1 keeps an element.
template <int K, int N>
struct RowMask {
  uint32_t bits[K], edge;

  template <typename Window>
  __device__ void make(const dropout_t &dropout, int64_t row_begin, const Window &window) {
    int64_t first[K];
#pragma unroll
    for (int k = 0; k < K; ++k) first[k] = row_begin + window.column(k);
    keep<N>(bits, dropout, *dropout.seed, first);
    if (window.has_edge()) edge = keep_one(dropout, *dropout.seed, row_begin + window.edge);
  }
};

// HAS_RESIDUAL: forward reads a residual, and backward reads grad_sum. DROPS_Y: forward applies
// dropout to y, and backward to grad_out. Forward<...> has a thread's prologue and epilogue. M is
// the number of elements of a vector, or 1 for an edge.
struct Plain {
  static constexpr bool HAS_RESIDUAL = false, DROPS_Y = false;

  template <typename T, int K, bool ALIGNED>
  struct Forward {
    RowMask<K, VECTOR<T>> mask;
    using Window = RowWindow<T, K, ALIGNED>;
    __device__ void load(const ForwardParams<T> &, int64_t, const Window &) {}
    __device__ void prologue(RowFragment<T, K, ALIGNED> &, const ForwardParams<T> &, int64_t,
                             const Window &) const {}
    template <int M>
    __device__ static void epilogue(float (&)[M], const ForwardParams<T> &, uint32_t) {}
  };
};

struct Residual {
  static constexpr bool HAS_RESIDUAL = true, DROPS_Y = false;

  template <typename T, int K, bool ALIGNED>
  struct Forward : Plain::Forward<T, K, ALIGNED> {
    static constexpr int N = VECTOR<T>;
    using Window = RowWindow<T, K, ALIGNED>;
    RowFragment<T, K, ALIGNED> residual;

    __device__ void load(const ForwardParams<T> &p, int64_t row, const Window &window) {
      residual.load(p.residual + row * p.residual_stride, window, p.hint);
      if (p.dropout.seed != nullptr) this->mask.make(p.dropout, row * p.cols, window);
    }

    // Replaces x by residual + dropout(x), rounded to T, and writes it to `sum`.
    __device__ void prologue(RowFragment<T, K, ALIGNED> &x, const ForwardParams<T> &p, int64_t row,
                             const Window &window) const {
      T *const sum = p.sum + row * p.cols;
#pragma unroll
      for (int k = 0; k < K; ++k) {
        if (!window.has(k)) continue;
        float values[N], added[N];
        unpack<T, N>(values, x.bits[k]);
        unpack<T, N>(added, residual.bits[k]);
        add(values, added, p, this->mask.bits[k]);
        store<T, N>(sum + window.column(k), values);
        x.bits[k] = pack<T, N>(values);
      }
      if (!window.has_edge()) return;
      float value[1] = {to_acc(x.edge)};
      const float added[1] = {to_acc(residual.edge)};
      add(value, added, p, this->mask.edge);
      sum[window.edge] = x.edge = from_acc<T>(value[0]);
    }

    template <int M>
    __device__ static void add(float (&x)[M], const float (&added)[M], const ForwardParams<T> &p,
                               uint32_t mask) {
      if (p.dropout.seed != nullptr) drop(x, p.dropout, mask);
#pragma unroll
      for (int j = 0; j < M; ++j) x[j] += added[j];
    }
  };
};

struct DropoutOfY {
  static constexpr bool HAS_RESIDUAL = false, DROPS_Y = true;

  template <typename T, int K, bool ALIGNED>
  struct Forward : Plain::Forward<T, K, ALIGNED> {
    __device__ void load(const ForwardParams<T> &p, int64_t row,
                         const RowWindow<T, K, ALIGNED> &window) {
      this->mask.make(p.dropout, row * p.cols, window);
    }
    template <int M>
    __device__ static void epilogue(float (&y)[M], const ForwardParams<T> &p, uint32_t mask) {
      drop(y, p.dropout, mask);
    }
  };
};

}  // namespace norms

#endif
