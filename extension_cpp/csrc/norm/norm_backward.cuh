// Shared by the backward kernels of the norms on the GPU (norm_plan.h picks one of them):
//
// persistent_kernel (norm_backward_persistent.cuh): CTAs loop over rows in registers.
// pipeline_kernel (norm_backward_pipeline.cuh): clusters loop over wide rows in shared memory.
//   Both write grad_x. Each CTA or cluster also writes a partial row of the parameters' gradients.
//   sum_partials_kernel (norm_generic.cuh) adds these rows in a fixed order.
// split_kernel (norm_backward_split.cuh): all gradients of few rows, or grad_x alone.
// No kernel uses atomics, so every run gives the same bits.
#ifndef EXTENSION_CPP_NORM_BACKWARD_CUH
#define EXTENSION_CPP_NORM_BACKWARD_CUH

#include "norm/norm_launch.cuh"

namespace norms {

// mean and rstd of a row. The loops over rows load them one or two rows ahead.
template <typename T>
__device__ inline float2 load_moments(const BackwardParams<T> &p, int64_t row) {
  const float mean = p.mean == nullptr ? 0 : static_cast<const float *>(p.mean)[row];
  return {mean, static_cast<const float *>(p.rstd)[row]};
}

// For half types xhat is one fused operation, x * rstd + offset. The rounding of mean * rstd is too
// small to matter: values of a half type cannot have a mean so much larger than their deviations.
template <typename T>
__device__ inline Statistics<float> to_statistics(float2 moments) {
  if (sizeof(T) == 2) return {0, moments.y, -moments.x * moments.y};
  return {moments.x, moments.y, 0};
}

// The weights of a thread's columns.
template <typename T, int K, bool ALIGNED>
struct RowWeights : RowValues<float, K, VECTOR<T>> {
  static constexpr int N = VECTOR<T>;

  template <typename W>
  __device__ void load_as(const BackwardParams<T> &p, const RowWindow<T, K, ALIGNED> &window) {
    ParameterVector<W, N, ALIGNED> vectors[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      vectors[k].load(static_cast<const W *>(p.weight), window.column(k), p.cols, window.has(k), 1);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k].unpack(this->v[k]);
    if (window.has_edge()) this->edge[0] = load_parameter<W>(p.weight, window.edge, 1);
  }

  __device__ void load(const BackwardParams<T> &p, const RowWindow<T, K, ALIGNED> &window) {
    if (sizeof(T) == 2 && p.weight_dtype == DTYPE_FLOAT32) {
      load_as<float>(p, window);
    } else {
      load_as<T>(p, window);
    }
  }
};

// The sums of a thread's columns over the rows, P per column.
template <int K, int N, int P>
struct ColumnSums : RowValues<float[P], K, N> {
  // Writes sum i of each column to out[column].
  template <bool ALIGNED, typename Window>
  __device__ void write(float *out, const Window &window, int i) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!window.has(k)) continue;
      float *const mine = out + window.column(k);
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const auto &v = this->v[k];
        const float four[4] = {v[j][i], v[j + 1][i], v[j + 2][i], v[j + 3][i]};
        if (ALIGNED) {
          *reinterpret_cast<float4 *>(mine + j) = {four[0], four[1], four[2], four[3]};
        } else {
#pragma unroll
          for (int n = 0; n < 4; ++n) mine[j + n] = four[n];
        }
      }
    }
    if (window.has_edge()) out[window.edge] = this->edge[0][i];
  }
};

// Replaces x by xhat, and grad by g = weighted(grad_out), in M elements: a vector or an edge.
template <typename Norm, int M>
__device__ inline void normalize_elements(float (&x)[M], float (&grad)[M], const float (&weight)[M],
                                          const Statistics<float> &statistics) {
#pragma unroll
  for (int j = 0; j < M; ++j) {
    x[j] = Norm::xhat(x[j], statistics);
    grad[j] = weighted(grad[j], weight[j], statistics);
  }
}

// The same, and adds the elements to the sums of their columns and of their row.
template <typename Norm, int M, int P>
__device__ inline void sum_elements(float (&x)[M], float (&grad)[M], const float (&weight)[M],
                                    const Statistics<float> &statistics, float (&columns)[M][P],
                                    float (&row)[P]) {
#pragma unroll
  for (int j = 0; j < M; ++j) {
    x[j] = Norm::xhat(x[j], statistics);
    Norm::add_to_column(columns[j], grad[j], x[j]);
    grad[j] = weighted(grad[j], weight[j], statistics);
    Norm::add_to_row(row, grad[j], x[j]);
  }
}

// Writes grad_x and grad_dropped of a vector or an edge. `x` holds xhat, `grad` holds g; means = the
// row's sums / cols.
template <typename Norm, typename Form, typename Part, typename T, int K, bool ALIGNED, int M,
          int P>
__device__ inline void write_elements(const BackwardParams<T> &p, int64_t row,
                                      const RowWindow<T, K, ALIGNED> &window, Part part,
                                      const float (&x)[M], const float (&grad)[M],
                                      const float (&means)[P],
                                      const RowFragment<T, K, ALIGNED> &grad_sum, uint32_t mask) {
  if (!window.has(part.k)) return;
  const int64_t at = row * p.cols + window.column(part.k);
  float grad_x[M], more[M];
  if (Form::HAS_RESIDUAL) grad_sum.unpack(more, part.k);
#pragma unroll
  for (int j = 0; j < M; ++j) {
    grad_x[j] = Norm::grad_x(grad[j], x[j], means);
    if (Form::HAS_RESIDUAL) grad_x[j] += more[j];
  }
  store<T, M>(static_cast<T *>(p.grad_x) + at, grad_x);
  if (!Form::HAS_RESIDUAL || p.grad_dropped == nullptr) return;
  drop(grad_x, p.dropout_x, mask);
  store<T, M>(static_cast<T *>(p.grad_dropped) + at, grad_x);
}

// Computes the dropout mask of a row if the form needs one.
template <typename Form, typename T, int K, bool ALIGNED>
__device__ inline void make_mask(RowMask<K, VECTOR<T>> &mask, const BackwardParams<T> &p,
                                 int64_t row, const RowWindow<T, K, ALIGNED> &window) {
  if (Form::DROPS_Y || (Form::HAS_RESIDUAL && p.grad_dropped != nullptr)) {
    mask.make(Form::DROPS_Y ? p.dropout_y : p.dropout_x, row * p.cols, window);
  }
}

// Partial row `unit` (of `units`) of the gradient of parameter i.
template <typename T>
__device__ inline float *partial_row(const BackwardParams<T> &p, int i, int64_t unit,
                                     int64_t units) {
  const int64_t number = (i == 1 && p.grad_weight != nullptr ? units : 0) + unit;
  return static_cast<float *>(p.partial) + number * p.cols;
}

// Marks the lines of one of the last rows evict_normal again (Plan::release_from).
template <typename Form, typename T, bool ALIGNED>
__device__ inline void release(const BackwardParams<T> &p, int64_t row,
                               const RowSlice<T, ALIGNED> &slice) {
  if (row < p.release_from || row >= p.rows) return;
  release_row(p.x_row(row), slice);
  release_row(p.grad_out_row(row), slice);
  if (Form::HAS_RESIDUAL && p.grad_sum != nullptr) release_row(p.grad_sum_row(row), slice);
}

}  // namespace norms

#endif
