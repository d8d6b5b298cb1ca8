// Backward of the norms on the GPU: code that the backward kernels share, and persistent_kernel.
// Besides grad_x, each CTA of persistent_kernel and each cluster of pipeline_kernel writes a
// partial row of the parameters' gradients. sum_partials_kernel (norm_generic.cuh) adds these rows
// in a fixed order. No kernel uses atomics, so every run gives the same bits.
#ifndef EXTENSION_CPP_NORM_BACKWARD_CUH
#define EXTENSION_CPP_NORM_BACKWARD_CUH

#include "norm/norm_launch.cuh"

namespace norms {

// Loads mean and rstd of a row. The loops over rows call this one or two rows before its use.
template <typename T>
__device__ inline float2 load_moments(const BackwardParams<T> &p, int64_t row) {
  const float mean = p.mean == nullptr ? 0 : static_cast<const float *>(p.mean)[row];
  return {mean, static_cast<const float *>(p.rstd)[row]};
}

// For half types xhat is computed by one fused operation, x * rstd + offset. The rounding of mean *
// rstd does not matter, because the mean of half-precision values is never so large, compared with
// their deviations, that this rounding would matter.
template <typename T>
__device__ inline Statistics<float> to_statistics(float2 moments) {
  if (sizeof(T) == 2) return {0, moments.y, -moments.x * moments.y};
  return {moments.x, moments.y, 0};
}

// The state that the loops over rows share: a thread's columns, their weights, and their sums.
template <typename T, typename Norm, Form FORM, int K, bool ALIGNED>
struct BackwardRows {
  static constexpr int N = VECTOR<T>, P = Norm::PARAMETERS;
  using Fragment = RowFragment<T, K, ALIGNED>;
  using Bits = RowBits<K, N>;

  const BackwardParams<T> &p;
  RowSlice<T, ALIGNED> slice;
  RowWindow<T, K, ALIGNED> window;
  RowValues<float, K, N> weights;
  RowValues<float[P], K, N> columns{};

  __device__ BackwardRows(const BackwardParams<T> &p, int64_t row, int rank)
      : p(p), slice(p.cols, row, p.slice, rank), window(slice) {}

  template <typename W>
  __device__ void load_weights_as() {
    ParameterVector<W, N, ALIGNED> vectors[K];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      vectors[k].load(static_cast<const W *>(p.weight), window.column(k), p.cols, window.has(k), 1);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) vectors[k].unpack(weights.v[k]);
    if (window.has_edge()) weights.edge[0] = load_parameter<W>(p.weight, window.edge, 1);
  }

  __device__ void load_weights() {
    if (sizeof(T) == 2 && p.weight_dtype == DTYPE_FLOAT32) {
      load_weights_as<float>();
    } else {
      load_weights_as<T>();
    }
  }

  // Returns the scale of dropout of y. It is a factor of rstd and of the sums of columns, so that
  // the elements of grad_out need no scaling.
  __device__ float scale() const {
    return FORM == Form::DROPOUT_OF_Y ? p.dropout_y.scale_float : 1;
  }

  // Replaces x by xhat, and grad by g = weighted(grad_out). If `sums` is given, the function also
  // adds the elements to the sums of the row (`sums`) and to the sums of their columns.
  template <int M>
  __device__ void normalize(Part<M> part, float (&x)[M], float (&grad)[M],
                            const Statistics<float> &statistics, float (*sums)[P] = nullptr) {
    const float factor = scale() * statistics.rstd;
#pragma unroll
    for (int j = 0; j < M; ++j) {
      x[j] = Norm::xhat(x[j], statistics);
      if (sums != nullptr) Norm::add(columns.at(part)[j], grad[j], x[j]);
      grad[j] = weighted(grad[j], factor, weights.at(part)[j]);
      if (sums != nullptr) Norm::add(*sums, grad[j], x[j]);
    }
  }

  // Writes grad_x and grad_dropped. x[] and grad[] hold xhat and g, as normalize() leaves them, and
  // means[] holds the row's sums divided by cols.
  template <int M>
  __device__ void write_part(Part<M> part, int64_t row, const float (&x)[M], const float (&grad)[M],
                             const float (&means)[P], const Fragment &grad_sum) const {
    if (!window.has(part.k)) return;
    const int64_t at = row * p.cols + window.column(part.k);
    float grad_x[M], more[M];
    if (FORM == Form::RESIDUAL) grad_sum.unpack(more, part.k);
#pragma unroll
    for (int j = 0; j < M; ++j) {
      grad_x[j] = Norm::grad_x(grad[j], x[j], means);
      if (FORM == Form::RESIDUAL) grad_x[j] += more[j];
    }
    store<T, M>(static_cast<T *>(p.grad_x) + at, grad_x);
    if (FORM != Form::RESIDUAL || p.grad_dropped == nullptr) return;
    drop(grad_x, p.dropout_x, at);
    store<T, M>(static_cast<T *>(p.grad_dropped) + at, grad_x);
  }

  // Writes the i-th sum of each column to out[column].
  __device__ void write_columns(float *out, int i) const {
    const float scale = this->scale();
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!window.has(k)) continue;
      float *const mine = out + window.column(k);
      const auto &sums = columns.v[k];
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const float four[4] = {scale * sums[j][i], scale * sums[j + 1][i], scale * sums[j + 2][i],
                               scale * sums[j + 3][i]};
        if (ALIGNED) {
          *reinterpret_cast<float4 *>(mine + j) = {four[0], four[1], four[2], four[3]};
        } else {
#pragma unroll
          for (int n = 0; n < 4; ++n) mine[j + n] = four[n];
        }
      }
    }
    if (window.has_edge()) out[window.edge] = scale * columns.edge[0][i];
  }

  // Returns partial row `unit` of the gradient of parameter i, which has `units` partial rows.
  __device__ float *partial_row(int i, int64_t unit, int64_t units) const {
    const int64_t number = (i == 1 && p.grad_weight != nullptr ? units : 0) + unit;
    return static_cast<float *>(p.partial) + number * p.cols;
  }

  // Marks the L2 lines of the row evict_normal again, if the row is one of the last rows, from
  // Plan::release_from on.
  __device__ void release(int64_t row) const {
    if (row < p.release_from || row >= p.rows) return;
    release_row(p.x_row(row), slice);
    release_row(p.grad_out_row(row), slice);
    if (FORM == Form::RESIDUAL && p.grad_sum != nullptr) release_row(p.grad_sum_row(row), slice);
  }
};

constexpr int PERSISTENT_ELEMENTS = 16;  // elements per thread and row
// The largest number of threads in a CTA. An SM holds one CTA.
template <typename T, Form FORM, bool ALIGNED>
constexpr int PERSISTENT_THREADS = most_persistent_threads(sizeof(T) == 4, FORM, ALIGNED);

// Processes the rows of a persistent CTA one after the other. While the threads exchange the sums
// of the current row, the loads of the next row are in flight. LOOPS is false in the split kernel,
// where a group of threads has only one row.
template <typename T, typename Norm, Form FORM, int K, bool ALIGNED, bool LOOPS = true>
struct PersistentRows : BackwardRows<T, Norm, FORM, K, ALIGNED> {
  using Base = BackwardRows<T, Norm, FORM, K, ALIGNED>;
  using Base::N, Base::P, Base::p, Base::slice, Base::window;
  using typename Base::Fragment, typename Base::Bits;
  // float32 with two sums per column leaves no registers for the weights. The weights are then
  // loaded from the cache for every row.
  static constexpr bool HOLDS_WEIGHTS = sizeof(T) == 2 || P == 1;
  using Sum = RowSum<float, 2, true>;

  Sum row_sum;
  const int64_t first;       // first row of this group of threads; the next one is first + p.groups
  Fragment x{}, grad_out{};  // elements of the next row
  float2 moments{};          // mean and rstd of the next row
  // The random bits of the next row, with dropout of y. They are drawn while loads are in flight.
  Bits bits;
  int turn = 0;

  __device__ PersistentRows(const BackwardParams<T> &p, typename Sum::Shared &shared, int64_t cta)
      : Base(p, cta * blockDim.y + threadIdx.y, 0),
        row_sum(shared, 1, 0),
        first(cta * blockDim.y + threadIdx.y) {}

  // Loads a row into registers. If there is no such row, the registers are set to 0, because the
  // threads still take part in the sums of their warp.
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

  // Prefetches a row of x and grad_out into the L2. For grad_sum it prefetches the group's
  // preceding row, because grad_sum is loaded into registers only when it is used.
  __device__ void prefetch(int64_t row) const {
    if (FORM == Form::RESIDUAL && p.grad_sum != nullptr && row - p.groups < p.rows) {
      prefetch_slice(p.grad_sum_row(row - p.groups), slice, p.hint);
    }
    if (!p.has_prefetch || row >= p.rows) return;
    prefetch_slice(p.x_row(row), slice, p.hint);
    prefetch_slice(p.grad_out_row(row), slice, p.hint);
  }

  // Loads everything that process(first) reads.
  __device__ void start() {
    load(first);
    if (LOOPS) prefetch(first + p.groups);
    bits.template draw<FORM>(p, first, window);
    if (HOLDS_WEIGHTS) this->load_weights();
  }

  __device__ void process(int64_t row) {
    Fragment grad_sum{};
    const bool is_row = row < p.rows;
    if (FORM == Form::RESIDUAL && p.grad_sum != nullptr && is_row) {
      grad_sum.load(p.grad_sum_row(row), window, p.hint);
    }
    if (!HOLDS_WEIGHTS) this->load_weights();
    const auto statistics = to_statistics<T>(moments);
    RowValues<float, K, N> xhat, g;
    float sums[P] = {};
    window.for_each([&](auto part) {
      x.unpack(xhat.at(part), part.k);
      grad_out.unpack(g.at(part), part.k);
      if (FORM == Form::DROPOUT_OF_Y) select(g.at(part), p.dropout_y, bits.at(part));
      this->normalize(part, xhat.at(part), g.at(part), statistics, &sums);
    });
    if (LOOPS) {
      load(row + p.groups);
      prefetch(row + 2 * p.groups);
      bits.template draw<FORM>(p, row + p.groups, window);
    }
    if (p.grad_x == nullptr) return;
    row_sum.sum_cta(sums, turn++);
    if (!is_row) return;
#pragma unroll
    for (int i = 0; i < P; ++i) sums[i] *= p.per_col;
    window.for_each(
        [&](auto part) { this->write_part(part, row, xhat.at(part), g.at(part), sums, grad_sum); });
  }

  // Adds the groups' column sums, and writes the CTA's partial row. `shared` has a row per group.
  __device__ void write_partial(float *shared) const {
    const int threads = blockDim.x * blockDim.y;
    for (int i = 0; i < P; ++i) {
      if (p.gradient(i) == nullptr) continue;
      __syncthreads();
      this->write_columns(shared + threadIdx.y * p.cols, i);
      __syncthreads();
      float *const out = this->partial_row(i, blockIdx.x, gridDim.x);
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

template <typename T, typename Norm, Form FORM, int K, bool ALIGNED>
__global__ void __launch_bounds__((PERSISTENT_THREADS<T, FORM, ALIGNED>), 1)
    persistent_kernel(const __grid_constant__ BackwardParams<T> p) {
  using Rows = PersistentRows<T, Norm, FORM, K, ALIGNED>;
  __shared__ typename Rows::Sum::Shared shared;
  // Room for a column sum of each element that the CTA's threads own in a row. In unaligned rows, a
  // thread may own a single element (edge) besides those in its vectors.
  __shared__ __align__(
      16) float partial[PERSISTENT_THREADS<T, FORM, ALIGNED> * (PERSISTENT_ELEMENTS + !ALIGNED)];
  Rows rows(p, shared, blockIdx.x);
  rows.start();
  // All groups of the CTA make the same number of iterations, because groups may share a warp.
  for (int64_t row = rows.first; row - threadIdx.y < p.rows; row += p.groups) {
    rows.process(row);
    rows.release(row);
  }
  rows.write_partial(partial);
}

}  // namespace norms

#endif
