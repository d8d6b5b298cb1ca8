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
#include "norm/norm_plan.h"

namespace norms {

// What a kernel with a plan gets besides its arguments.
struct Geometry : Plan {
  int64_t rows;
  int cols;
  float per_col;  // 1 / cols
  uint64_t hint;  // of loads (cuda_cache.cuh)
};

// The kernels' parameters: the arguments, and their rows. T is the type that args.dtype names.
template <typename T>
struct ForwardParams : Geometry, norm_forward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *residual_row(int64_t r) const {
    return static_cast<const T *>(residual) + r * residual_stride;
  }
  __device__ const void *parameter(int i) const { return i == 0 ? weight : bias; }
};

template <typename T>
struct BackwardParams : Geometry, norm_backward_args {
  using Geometry::cols, Geometry::rows;
  __device__ const T *x_row(int64_t r) const { return static_cast<const T *>(x) + r * x_stride; }
  __device__ const T *grad_out_row(int64_t r) const {
    return static_cast<const T *>(grad_out) + r * grad_out_stride;
  }
  __device__ const T *grad_sum_row(int64_t r) const {
    return static_cast<const T *>(grad_sum) + r * grad_sum_stride;
  }
  __device__ void *gradient(int i) const { return i == 0 ? grad_weight : grad_bias; }
};

// The dropout mask of a thread's elements of a row: bit 1 keeps an element.
template <int K, int N>
struct RowMask {
  uint32_t bits[K], edge;
  __device__ uint32_t at(int k) const { return k < K ? bits[k] : edge; }

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
    using Window = RowWindow<T, K, ALIGNED>;
    RowFragment<T, K, ALIGNED> residual;

    __device__ void load(const ForwardParams<T> &p, int64_t row, const Window &window) {
      residual.load(p.residual_row(row), window, p.hint);
      if (p.dropout_x.seed != nullptr) this->mask.make(p.dropout_x, row * p.cols, window);
    }

    // Replaces x by residual + dropout(x), rounded to T, and writes it to `sum`.
    __device__ void prologue(RowFragment<T, K, ALIGNED> &x, const ForwardParams<T> &p, int64_t row,
                             const Window &window) const {
      T *const sum = static_cast<T *>(p.sum) + row * p.cols;
      window.for_each([&](auto part) {
        if (!window.has(part.k)) return;
        constexpr int M = decltype(part)::SIZE;
        float values[M], added[M];
        x.unpack(values, part.k);
        residual.unpack(added, part.k);
        if (p.dropout_x.seed != nullptr) drop(values, p.dropout_x, this->mask.at(part.k));
#pragma unroll
        for (int j = 0; j < M; ++j) values[j] += added[j];
        store<T, M>(sum + window.column(part.k), values);
        x.pack(values, part.k);
      });
    }
  };
};

struct DropoutOfY {
  static constexpr bool HAS_RESIDUAL = false, DROPS_Y = true;

  template <typename T, int K, bool ALIGNED>
  struct Forward : Plain::Forward<T, K, ALIGNED> {
    __device__ void load(const ForwardParams<T> &p, int64_t row,
                         const RowWindow<T, K, ALIGNED> &window) {
      this->mask.make(p.dropout_y, row * p.cols, window);
    }
    template <int M>
    __device__ static void epilogue(float (&y)[M], const ForwardParams<T> &p, uint32_t mask) {
      drop(y, p.dropout_y, mask);
    }
  };
};

}  // namespace norms

#endif
