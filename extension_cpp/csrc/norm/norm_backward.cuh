// What norm_backward_direct.cuh, norm_backward_few.cuh and norm_backward_rows.cuh share: the parameters, and the arithmetic of one element.
#ifndef EXTENSION_CPP_NORM_BACKWARD_CUH
#define EXTENSION_CPP_NORM_BACKWARD_CUH

#include "norm/norm_weights.cuh"

namespace norm_cuda {

template <typename T>
struct BackwardTensors : Geometry {
  const T *x;
  int64_t x_stride;
  const T *grad_out;
  int64_t grad_out_stride;
  const float *mean;  // NULL: rms_norm
  const float *rstd;
  Weights weight;
  T *grad_x;          // may be NULL
  const T *grad_sum;  // ADDED: may be NULL
  int64_t grad_sum_stride;
  T *grad_dropped;    // ADDED: may be NULL
  dropout_t dropout;  // ADDED: of grad_dropped; DROPPED: of grad_out
};

template <typename T>
struct Backward : BackwardTensors<T>, Sharing {
  bool wants_weight;
  bool wants_bias;
  float *partial;  // (wants_weight + wants_bias, chunks, cols)
};

struct Statistics {
  float mean;
  float rstd;
};

// Half types cannot hold a mean so large that the product's rounding would show; float can.
template <typename T, bool CENTERED>
__device__ inline float normalize(float x, const Statistics &s) {
  if (!CENTERED) return x * s.rstd;
  return sizeof(T) == 2 ? fmaf(x, s.rstd, -s.mean * s.rstd) : (x - s.mean) * s.rstd;
}

// g = grad_out * weight; for float also times rstd, before which the digits of the smallest numbers would be lost.
template <typename T>
__device__ inline float weighted(float grad, float weight, const Statistics &s) {
  return sizeof(T) == 2 ? grad * weight : grad * s.rstd * weight;
}

// grad_x = (g + shift + xhat * along) * rstd, for float with rstd in g already. slope is along * rstd, which the compiler would
// make anew for every vector.
template <typename T, bool CENTERED>
__device__ inline float combine(float xhat, float g, float along, float slope, float shift,
                                const Statistics &s) {
  if (sizeof(T) == 4) return fmaf(xhat, along, CENTERED ? g + shift : g);
  return fmaf(xhat, slope, CENTERED ? fmaf(g, s.rstd, shift * s.rstd) : g * s.rstd);
}

// This thread's part of a row of grad_x, and of grad_dropped if that is wanted, from its xhat and g = weighted() and the row's sums of
// g * xhat and of g.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int N, int COUNT>
__device__ inline void write_grad_x(const BackwardTensors<T> &p, int64_t row,
                                    const Columns<TEAM, K, N, false> &columns,
                                    const float (&xhat)[K][N], const float (&g)[K][N],
                                    const float (&sums)[COUNT], const Statistics &s,
                                    const Part<T, TEAM, K, N, false> &grad_sum,
                                    const Mask<TEAM, K, N, false> &mask, bool wants_dropped) {
  const float along = -sums[0] * p.per_col, shift = -sums[COUNT - 1] * p.per_col,
              slope = along * s.rstd;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float grad[N], more[N];
    if (FUSED == ADDED) unpack<T, N>(more, grad_sum.bits[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      grad[j] = combine<T, CENTERED>(xhat[k][j], g[k][j], along, slope, shift, s);
      if (FUSED == ADDED) grad[j] += more[j];
    }
    const int64_t first = row * p.cols + columns.column(k);
    store<T, N>(p.grad_x + first, grad);
    if (wants_dropped) {
      drop(grad, p.dropout, mask.of(k));
      store<T, N>(p.grad_dropped + first, grad);
    }
  }
}

// A row that all of the team have read.
template <Fused FUSED, typename T, int TEAM, int K, int N>
__device__ inline void let_row_go(const BackwardTensors<T> &p, int64_t row,
                                  const Columns<TEAM, K, N, false> &columns) {
  let_go(p.x + row * p.x_stride, columns);
  let_go(p.grad_out + row * p.grad_out_stride, columns);
  if (FUSED == ADDED && p.grad_sum != nullptr)
    let_go(p.grad_sum + row * p.grad_sum_stride, columns);
}

// Rows from p.let_go on, by all threads when they have read theirs.
template <Fused FUSED, typename T>
__device__ inline void let_rows_go(const BackwardTensors<T> &p) {
  let_go(p, p.x, p.x_stride);
  let_go(p, p.grad_out, p.grad_out_stride);
  if (FUSED == ADDED) let_go(p, p.grad_sum, p.grad_sum_stride);
}

}  // namespace norm_cuda

#endif
