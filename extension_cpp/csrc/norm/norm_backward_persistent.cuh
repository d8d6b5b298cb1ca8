// Backward of the norms by persistent CTAs, which loop over rows in registers. The loads of the
// next row are in flight while the threads exchange the sums of the current row.
#ifndef EXTENSION_CPP_NORM_BACKWARD_PERSISTENT_CUH
#define EXTENSION_CPP_NORM_BACKWARD_PERSISTENT_CUH

#include "norm/norm_backward.cuh"

namespace norms {

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
    if (Form::DROPS_Y || !LOOPS) make_mask<Form>(mask, p, first, window);
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
      make_mask<Form>(mask, p, Form::DROPS_Y ? row + p.groups : row, window);
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
