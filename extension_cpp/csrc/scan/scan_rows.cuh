// Scans over rows on the GPU (inner = 1): neighbouring steps are neighbours in memory.
#ifndef EXTENSION_CPP_SCAN_ROWS_CUH
#define EXTENSION_CPP_SCAN_ROWS_CUH

#include <algorithm>

#include "scan/scan_memory.cuh"

namespace scans {

// A thread scans a run of ROW_VECTORS neighbouring vectors. The lanes of a warp copy neighbouring
// vectors, so that the loads are coalesced. Vector w of the warp lies at w + w / ROW_VECTORS, so
// that runs begin in different banks.
template <typename Op>
__device__ inline uint4 &row_vector(int i, int w) {
  constexpr int WARP = 32 * (Op::ROW_VECTORS + 1);
  return held[(i * WARPS + threadIdx.x / 32) * WARP + w + w / Op::ROW_VECTORS];
}

// The steps of vector number w of a warp.
struct RowSteps {
  int64_t row, step, count;  // count: steps from `step` on, 0 if there are none

  template <typename Op>
  __device__ RowSteps(const Params<Op> &p, int64_t first_row, int64_t first_step, int w) {
    const int vector = threadIdx.x / 32 * (32 * Op::ROW_VECTORS) + w;  // of the CTA
    row = first_row + (vector >> p.plan.row_shift);
    step = first_step + (vector & (p.plan.row_vectors - 1)) * WIDTH<typename Op::T>;
    count = row < p.outer && step < p.length ? p.length - step : 0;
  }
};

// Copies vector w of input i if it is 16 aligned bytes, else sets it to 0.
template <typename Op>
__device__ inline void copy_row_vector(const Params<Op> &p, int i, int w, const RowSteps &at) {
  using T = typename Op::T;
  constexpr int N = WIDTH<T>;
  const Operand &in = p.in[i];
  const T *const from = element(p, in.at, at.row, at.step, 0);
  copy_vector(row_vector<Op>(i, w), in.at.step > 0 ? from : from - (N - 1),
              at.count >= N && in.is_vector);
}

// Gathers the vectors that copy_row_vector() does not copy, in the order of the steps.
template <typename Op>
__device__ inline void gather_rest(const Params<Op> &p, int64_t first_row, int64_t first_step) {
  using T = typename Op::T;
#pragma unroll 1
  for (int k = 0; k < Op::ROW_VECTORS; ++k) {
    const int w = k * 32 + threadIdx.x % 32;
    const RowSteps at(p, first_row, first_step, w);
    for (int i = 0; i < Op::INPUTS; ++i) {
      const Operand &in = p.in[i];
      if (at.count == 0 || (at.count >= WIDTH<T> && in.is_vector)) continue;
      row_vector<Op>(i, w) = gather(element(p, in.at, at.row, at.step, 0), in.at.step, at.count);
    }
  }
}

// Writes vector w of output o, which is in shared memory in the order of the steps.
template <typename Op>
__device__ inline void put_row_vector(const Params<Op> &p, int o, int w, const RowSteps &at) {
  using T = typename Op::T;
  constexpr int N = WIDTH<T>;
  if (at.count == 0) return;
  const Result &out = p.out[o];
  T *const to = element(p, out.at, at.row, at.step, 0);
  uint4 bits = row_vector<Op>(o, w);
  if (out.is_vector && at.count >= N) {
    if (out.at.step < 0) {
      T v[N];
      memcpy(v, &bits, sizeof v);
      reverse(v);
      memcpy(&bits, v, sizeof v);
    }
    __stwb(reinterpret_cast<uint4 *>(out.at.step > 0 ? to : to - (N - 1)), bits);
  } else {
    scatter(to, out.at.step, at.count, bits);
  }
}

// Iterates over the steps of a thread's run, which may cover several short rows.
template <typename Op>
struct Run {
  using T = typename Op::T;
  using A = typename Op::A;
  static constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  const Params<Op> &p;
  const int64_t first_row, first_step;
  const int first, vectors;  // the run's first vector in the warp; its vectors per row
  RowSteps at;               // of the first vector in the row
  A edges[Op::INPUTS];       // inputs with a shift: the value before or after the run in its row

  __device__ Run(const Params<Op> &p, int64_t first_row, int64_t first_step)
      : p(p),
        first_row(first_row),
        first_step(first_step),
        first(threadIdx.x % 32 * K),
        vectors(min(K, p.plan.row_vectors)),
        at(p, first_row, first_step, first) {
    load_edges();
  }

  __device__ void load_edges() {
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      const int64_t step = at.step + (Op::shift(i) < 0 ? -1 : vectors * N);
      edges[i] = 0;
      if (Op::shift(i) == 0 || at.count == 0 || step < 0) continue;
      edges[i] = p.to_acc(step < p.length ? *element(p, p.in[i].at, at.row, step, 0)
                                          : after_last(p, at.row, 0));
    }
  }

  // Vector k of input i in the order of the steps. It is vector `in_row` of the run in its row.
  __device__ void get(A (&v)[N], int i, int k, int in_row) const {
    p.unpack(v, row_vector<Op>(i, first + k));
    if (p.in[i].is_vector && p.in[i].at.step < 0 && at.count >= (in_row + 1) * N) reverse(v);
  }

  // The same at step + Op::shift(i). `before` is the value before the vector, and is updated.
  __device__ void get_shifted(A (&v)[N], int i, int k, int in_row, A &before) const {
    get(v, i, k, in_row);
    if (Op::shift(i) < 0) {
      const A last = v[N - 1];
#pragma unroll
      for (int j = N - 1; j > 0; --j) v[j] = v[j - 1];
      v[0] = in_row == 0 ? edges[i] : before;
      before = last;
    } else if (Op::shift(i) > 0) {
      A next[N] = {edges[i]};
      if (in_row < vectors - 1) get(next, i, k + 1, in_row + 1);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[j] = at.count == in_row * N + j + 1 ? edges[i] : j < N - 1 ? v[j + 1] : next[0];
      }
    }
  }

  // Calls begin_row() before the first vector of each row, f(inputs, is_first, is_last, j) for step
  // j of a vector (is_first, is_last: in its row), and after_vector(k) after vector k.
  template <typename B, typename F, typename G>
  __device__ void for_each_step(B &&begin_row, F &&f, G &&after_vector) {
    A before[Op::INPUTS];
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int in_row = k & (vectors - 1);
      if (in_row == 0) {
        if (vectors < K) {
          at = RowSteps(p, first_row, first_step, first + k);
          load_edges();
        }
        begin_row();
      }
      A v[Op::INPUTS][N];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) get_shifted(v[i], i, k, in_row, before[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A x[Op::INPUTS];
#pragma unroll
        for (int i = 0; i < Op::INPUTS; ++i) x[i] = v[i][j];
        f(x, at.step == 0 && in_row + j == 0, at.count == in_row * N + j + 1, j);
      }
      after_vector(k);
    }
  }
};

// The threads of an SM; ptxas warns of CTAs that would have more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int SM_THREADS = 1024;
#else
constexpr int SM_THREADS = 1536;
#endif

template <typename Op>
using RowTable = Table<typename Op::Algebra, typename Op::A, 2 * WARPS, 1>;

template <typename Op>
__global__ void __launch_bounds__(THREADS, std::min(Op::ROW_CTAS, SM_THREADS / THREADS))
    scan_rows(const __grid_constant__ Params<Op> p) {
  using T = typename Op::T;
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Part = typename Algebra::Part;
  constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  __shared__ RowTable<Op> table;
  const Plan &plan = p.plan;
  // The first tile of all rows comes before the second one of any, so that a tile finds most of
  // what it waits for.
  const int64_t tile = blockIdx.x / plan.per_tile, first_step = tile * plan.steps;
  const int64_t first_row = blockIdx.x % plan.per_tile * plan.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
  for (int k = 0; k < K; ++k) {
    const RowSteps at(p, first_row, first_step, k * 32 + lane);
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) copy_row_vector(p, i, k * 32 + lane, at);
  }
  Run<Op> run(p, first_row, first_step);
  wait_for_copies();
  if (!has_whole_vectors(p, p.length)) gather_rest(p, first_row, first_step);
  __syncwarp();
  Part all = Algebra::identity(), before = all;  // of the run; of earlier lanes in the row
  if (plan.lanes > 1) {
    bool is_begun = false;
    run.for_each_step([] {},
                      [&](const A(&x)[Op::INPUTS], bool is_first, bool, int) {
                        const Part part = p.op.part(x, is_first);
                        all = is_begun ? Algebra::join(all, part) : part;
                        is_begun = true;
                      },
                      [](int) {});
    before = lanes_before<Algebra>(all, plan.lanes);
  }
  auto reached = Algebra::start();  // the state before the warp's steps
  if (plan.segments > 0) {
    const int segment = warp % plan.segments, column = warp / plan.segments;
    if (lane == 31) table.put(table.place(segment, plan.columns, column), all);
    table.join_segments(plan);
    table.put_states(p.state, p.layout, plan, first_row, tile,
                     [&](int c) { return start_state(p, first_row + c, 0); });
    reached = table.state(segment, plan.columns, column);
  }
  auto state = reached;
  A results[Op::OUTPUTS][N];
  run.for_each_step(
      [&] {
        state = plan.segments > 0 ? reached : start_state(p, run.at.row, 0);
        if (lane % plan.lanes > 0) state = Algebra::apply(before, state);
      },
      [&](const A(&x)[Op::INPUTS], bool is_first, bool is_last, int j) {
        A out[Op::OUTPUTS];
        p.op.step(x, is_first, state, out);
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) results[o][j] = out[o];
        if (Op::OUTPUTS == 2 && p.grad_start.data != nullptr && is_last) {
          put_grad_start(p, run.at.row, 0, state);
        }
      },
      [&](int k) {  // the results replace the inputs
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) {
          row_vector<Op>(o, run.first + k) = p.pack(results[o]);
        }
      });
  __syncwarp();
#pragma unroll 2
  for (int k = 0; k < K; ++k) {
    const RowSteps at(p, first_row, first_step, k * 32 + lane);
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o) put_row_vector(p, o, k * 32 + lane, at);
  }
}

}  // namespace scans

#endif
