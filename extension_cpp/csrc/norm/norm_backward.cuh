// Backward of the norms on the GPU. norm_plan.h picks one of three kernels:
//
// persistent_kernel (this file): CTAs loop over rows in registers.
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

// ---- persistent CTAs: the loads of the next row are in flight while the threads exchange the sums
// of the current row ----

constexpr int PERSISTENT_ELEMENTS = 16;  // per thread and row
// The most threads of a CTA; an SM has one CTA.
template <typename T, typename Form, bool ALIGNED>
constexpr int PERSISTENT_THREADS = most_persistent_threads(sizeof(T) == 4, Form::HAS_RESIDUAL,
                                                           Form::DROPS_Y, ALIGNED);

// LOOPS: false in the split kernel, which processes one row per group.
template <typename T, typename Norm, typename Form, int K, bool ALIGNED, bool LOOPS = true>
struct PersistentRows {
  static constexpr int N = VECTOR<T>, P = Norm::PARAMETERS;
  // float32 with two sums per column leaves no registers for the weights: they are loaded from the
  // cache for every row.
  static constexpr bool HOLDS_WEIGHTS = sizeof(T) == 2 || P == 1;
  using Window = RowWindow<T, K, ALIGNED>;
  using Sum = RowSum<float, 2, true>;
  using Fragment = RowFragment<T, K, ALIGNED>;

  const BackwardParams<T> &p;
  Sum row_sum;
  const int64_t first;  // row of this group of threads; the next is first + p.groups
  const RowSlice<T, ALIGNED> slice;
  const Window window;
  Fragment x{}, grad_out{};  // of the next row
  float2 moments{};          // of the next row
  // The mask of the next row's grad_out or of the current row's grad_dropped. It is computed while
  // loads are in flight.
  RowMask<K, N> mask;
  RowWeights<T, K, ALIGNED> weights;
  ColumnSums<K, N, P> columns{};
  int turn = 0;

  __device__ PersistentRows(const BackwardParams<T> &p, typename Sum::Shared &shared, int64_t cta)
      : p(p),
        row_sum(shared, 1, 0),
        first(cta * blockDim.y + threadIdx.y),
        slice(p.cols, first, p.slice, 0),
        window(slice) {}

  // A group without a row has zeros, because its threads still take part in the warp's sums.
  __device__ void load(int64_t row) {
    if (row < p.rows) {
      x.load(p.x_row(row), window, p.hint);
      grad_out.load(p.grad_out_row(row), window, p.hint);
      moments = load_moments(p, row);
    } else {
      x = grad_out = {};
      moments = {};
    }
  }

  // Prefetches a row of x and grad_out into the L2, and the row before it of grad_sum, which is not
  // loaded into registers ahead of its use.
  __device__ void prefetch(int64_t row) const {
    if (Form::HAS_RESIDUAL && p.grad_sum != nullptr && row - p.groups < p.rows) {
      prefetch_slice(p.grad_sum_row(row - p.groups), slice, p.hint);
    }
    if (!p.has_prefetch || row >= p.rows) return;
    prefetch_slice(p.x_row(row), slice, p.hint);
    prefetch_slice(p.grad_out_row(row), slice, p.hint);
  }

  // Loads what process(first) reads.
  __device__ void start() {
    load(first);
    if (LOOPS) prefetch(first + p.groups);
    if (Form::DROPS_Y || !LOOPS) mask.template make<Form>(p, first, window);
    if (HOLDS_WEIGHTS) weights.load(p, window);
  }

  __device__ void process(int64_t row) {
    Fragment grad_sum{};
    const bool is_row = row < p.rows;
    if (Form::HAS_RESIDUAL && p.grad_sum != nullptr && is_row) {
      grad_sum.load(p.grad_sum_row(row), window, p.hint);
    }
    if (!HOLDS_WEIGHTS) weights.load(p, window);
    const auto statistics = to_statistics<T>(moments);
    RowValues<float, K, N> xhat, g;
    float sums[P] = {};
    window.for_each([&](auto part) {
      x.unpack(xhat.at(part), part.k);
      grad_out.unpack(g.at(part), part.k);
      if (Form::DROPS_Y) drop(g.at(part), p.dropout_y, mask.at(part.k));
      sum_elements<Norm>(xhat.at(part), g.at(part), weights.at(part), statistics, columns.at(part),
                         sums);
    });
    if (LOOPS) {
      load(row + p.groups);
      prefetch(row + 2 * p.groups);
      mask.template make<Form>(p, Form::DROPS_Y ? row + p.groups : row, window);
    }
    if (p.grad_x == nullptr) return;
    row_sum.sum_cta(sums, turn++);
    if (!is_row) return;
#pragma unroll
    for (int i = 0; i < P; ++i) sums[i] *= p.per_col;
    window.for_each([&](auto part) {
      write_elements<Norm, Form>(p, row, window, part, xhat.at(part), g.at(part), sums, grad_sum,
                                 mask.at(part.k));
    });
  }

  // Adds the groups' column sums and writes the CTA's partial row. `shared` holds a row per group.
  __device__ void write_partial(float *shared) const {
    const int threads = blockDim.x * blockDim.y;
    for (int i = 0; i < P; ++i) {
      if (p.gradient(i) == nullptr) continue;
      __syncthreads();
      columns.template write<ALIGNED>(shared + threadIdx.y * p.cols, window, i);
      __syncthreads();
      float *const out = partial_row(p, i, blockIdx.x, gridDim.x);
      for (int c = threadIdx.y * blockDim.x + threadIdx.x; c < p.cols; c += threads) {
        float sum = 0;
        for (int group = 0; group < static_cast<int>(blockDim.y); ++group) {
          sum += shared[group * p.cols + c];
        }
        out[c] = sum;
      }
    }
  }
};

template <typename T, typename Norm, typename Form, int K, bool ALIGNED>
__global__ void __launch_bounds__((PERSISTENT_THREADS<T, Form, ALIGNED>), 1)
    persistent_kernel(const __grid_constant__ BackwardParams<T> p) {
  using Rows = PersistentRows<T, Norm, Form, K, ALIGNED>;
  __shared__ typename Rows::Sum::Shared shared;
  // A thread of an unaligned row may have an edge besides its vectors.
  __shared__ __align__(
      16) float partial[PERSISTENT_THREADS<T, Form, ALIGNED> * (PERSISTENT_ELEMENTS + !ALIGNED)];
  Rows rows(p, shared, blockIdx.x);
  rows.start();
  // All groups of the CTA make the same number of iterations, because groups may share a warp.
  for (int64_t row = rows.first; row - threadIdx.y < p.rows; row += p.groups) {
    rows.process(row);
    release<Form>(p, row, rows.slice);
  }
  rows.write_partial(partial);
}

}  // namespace norms

#endif
