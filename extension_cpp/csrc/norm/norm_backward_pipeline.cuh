// Backward of the norms for wide aligned rows, by persistent clusters. Bulk copies load rows ahead
// of their use into stages of shared memory. A row is not kept in registers, but read from its
// stage twice: for its sums and for grad_x. While a row's sums are sent between the CTAs of the
// cluster, the next row is summed.
#ifndef EXTENSION_CPP_NORM_BACKWARD_PIPELINE_CUH
#define EXTENSION_CPP_NORM_BACKWARD_PIPELINE_CUH

#include "norm/norm_backward.cuh"

namespace norms {

constexpr int PIPELINE_THREADS = 512;  // threads per CTA; an SM holds one CTA

// The location of a row in shared memory.
struct Place {
  uint32_t x, grad_out;  // addresses of the CTA's slice of the row
  int stage;
  uint32_t parity;  // the parity of the mbarrier's phase in which the stage is filled
};

template <typename T, typename Norm, Form FORM, int K>
struct PipelineRows : BackwardRows<T, Norm, FORM, K, true> {
  using Base = BackwardRows<T, Norm, FORM, K, true>;
  using Base::N, Base::P, Base::p, Base::slice, Base::window;
  using typename Base::Fragment, typename Base::Bits;
  using Sum = RowSum<float, 4>;
  struct Shared {
    typename Sum::Shared sums;
    uint64_t filled[MAX_STAGES];
  };

  const uint32_t memory;  // address of the first stage in shared memory
  Shared &shared;
  Sum row_sum;
  Place fetched{0, 0, -1, 0};  // the last row whose copies have been started

  __device__ PipelineRows(const BackwardParams<T> &p, const uint4 *memory, Shared &shared, int rank)
      : Base(p, 0, rank),
        memory(shared_address(memory)),
        shared(shared),
        row_sum(shared.sums, p.cluster, rank) {}

  // Returns the location of a row in shared memory, given that of the row before it.
  __device__ Place next_place(const Place &before, int64_t row) const {
    const auto offset = [&](const T *data) {
      return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data + slice.begin) / 16 % 8 * 16);
    };
    Place next = before;
    if (++next.stage == p.stages) next.stage = 0, next.parity ^= 1;
    const uint32_t stage = memory + 16 * next.stage * 2 * p.stage_vectors;
    next.x = stage + offset(p.x_row(row));
    next.grad_out = stage + 16 * p.stage_vectors + offset(p.grad_out_row(row));
    return next;
  }

  // Starts the copies of a row. Only one thread of the CTA issues them.
  __device__ void fetch(int64_t row, const Place &place) const {
    if (threadIdx.x != blockDim.x - 1) return;
    const uint32_t bytes = slice.count() * sizeof(T);
    uint64_t *const filled = &shared.filled[place.stage];
    expect_bytes(filled, 2 * bytes);
    if (bytes == 0) return;
    const T *const x = p.x_row(row) + slice.begin;
    const T *const grad_out = p.grad_out_row(row) + slice.begin;
    copy_bulk(place.x, x, bytes, filled, p.hint);
    copy_bulk(place.grad_out, grad_out, bytes, filled, p.hint);
  }

  // Loads a vector of a row from shared memory.
  __device__ void load(float (&x)[N], uint32_t place, int k) const {
    const uint32_t address = place + (window.column(k) - slice.begin) * sizeof(T);
    unpack<T, N>(x, load_shared(address, window.has(k)));
  }

  // Calls f(part, x, grad_out) for the vectors of a row.
  template <typename F>
  __device__ void for_each(const Place &place, const Bits &bits, const F &f) {
    window.for_each([&](Part<N> part) {
      float x[N], grad[N];
      load(x, place.x, part.k);
      load(grad, place.grad_out, part.k);
      if (FORM == Form::DROPOUT_OF_Y) select(grad, p.dropout_y, bits.at(part));
      f(part, x, grad);
    });
  }

  // Adds a row to the column sums, and starts the exchange of the row's own sums. `turn` counts
  // rows.
  __device__ void sum(int turn, const Place &place, const Bits &bits,
                      const Statistics<float> &statistics) {
    float sums[P] = {};
    wait_phase(&shared.filled[place.stage], place.parity);
    for_each(place, bits, [&](auto part, auto &x, auto &grad) {
      this->normalize(part, x, grad, statistics, &sums);
    });
    // Without grad_x no CTA waits for sums, so none are sent: the receiver could already have
    // exited.
    if (p.grad_x != nullptr) {
      row_sum.post(sums, turn);
    } else {
      __syncthreads();
    }
  }

  // Finishes the exchange of the row's sums, and writes grad_x.
  __device__ void finish(int64_t row, int turn, const Place &place, const Bits &bits,
                         const Statistics<float> &statistics, const Fragment &grad_sum) {
    float sums[P];
    row_sum.collect(sums, turn);
#pragma unroll
    for (int n = 0; n < P; ++n) sums[n] *= p.per_col;
    for_each(place, bits, [&](auto part, auto &x, auto &grad) {
      this->normalize(part, x, grad, statistics);
      this->write_part(part, row, x, grad, sums, grad_sum);
    });
  }

  // Processes the rows of this cluster. The clusters take rows round-robin.
  __device__ void run() {
    const int64_t first = blockIdx.x / p.cluster, step = p.groups;
    const int64_t count = (p.rows - first + step - 1) / step;
    row_sum.wait_for_others();
    this->load_weights();
    const auto start_copies = [&](int64_t i) {
      fetched = next_place(fetched, first + i * step);
      fetch(first + i * step, fetched);
    };
    Place now = next_place(fetched, first), next;
    for (int i = 0; i < p.stages && i < count; ++i) start_copies(i);
    float2 moments = load_moments(p, first), next_moments{}, later_moments{};
    if (count > 1) next_moments = load_moments(p, first + step);
    Bits bits, next_bits;
    bits.template draw<FORM>(p, first, window);
    int turn = 0;  // number of rows that are finished
    sum(turn, now, bits, to_statistics<T>(moments));
    for (int64_t row = first; row < p.rows; row += step, ++turn) {
      const int64_t next_row = row + step;
      if (next_row + step < p.rows) later_moments = load_moments(p, next_row + step);
      Fragment grad_sum{};
      if (FORM == Form::RESIDUAL && p.grad_sum != nullptr) {  // grad_sum has no stage
        grad_sum.load(p.grad_sum_row(row), window, p.hint);
        if (next_row < p.rows) prefetch_slice(p.grad_sum_row(next_row), slice, p.hint);
      }
      if (next_row < p.rows) {
        next_bits.template draw<FORM>(p, next_row, window);
        next = next_place(now, next_row);
        sum(turn + 1, next, next_bits, to_statistics<T>(next_moments));
        // All warps have passed the barrier in sum(), so the previous row is finished and its stage
        // is free.
        if (turn > 0 && turn - 1 + p.stages < count) start_copies(turn - 1 + p.stages);
      }
      if (p.grad_x != nullptr) {
        finish(row, turn, now, bits, to_statistics<T>(moments), grad_sum);
      }
      this->release(row);
      now = next;
      bits = next_bits;
      moments = next_moments;
      next_moments = later_moments;
    }
    for (int n = 0; n < P; ++n) {
      if (p.gradient(n) != nullptr) this->write_columns(this->partial_row(n, first, p.groups), n);
    }
  }
};

template <typename T, typename Norm, Form FORM, int K>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    pipeline_kernel(const __grid_constant__ BackwardParams<T> p) {
#if HAS_CLUSTERS
  using Rows = PipelineRows<T, Norm, FORM, K>;
  extern __shared__ __align__(128) uint4 memory[];
  __shared__ typename Rows::Shared shared;
  if (threadIdx.x == 0) {
    for (uint64_t &barrier : shared.filled) init_mbarrier(&barrier, 1);
    fence_mbarrier_init();
  }
  __syncthreads();
  Rows rows(p, memory, shared, cluster_rank());
  rows.run();
#endif
}

}  // namespace norms

#endif
