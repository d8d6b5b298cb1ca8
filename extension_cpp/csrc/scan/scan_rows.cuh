// Scans over rows on the GPU (inner = 1), where neighbouring steps are neighbours in memory.
#ifndef EXTENSION_CPP_SCAN_ROWS_CUH
#define EXTENSION_CPP_SCAN_ROWS_CUH

#include "scan/scan_memory.cuh"

namespace scans {

// Returns vector w of the warp for input i, in shared memory. A thread scans a run of ROW_VECTORS
// neighbouring vectors. The lanes of a warp copy neighbouring vectors, so that the loads are
// coalesced. Vector w is at index w + w / ROW_VECTORS, so that runs begin in different banks.
template <typename Op>
__device__ inline uint4 &row_vector(int i, int w) {
  constexpr int WARP = 32 * (Op::ROW_VECTORS + 1);
  return held[(i * WARPS + threadIdx.x / 32) * WARP + w + w / Op::ROW_VECTORS];
}

// The part of the tensor that one CTA scans: some rows, and one tile of steps of each row.
template <typename Op>
struct RowTile {
  using T = typename Op::T;
  static constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  const Params<Op> &p;
  Outer first_row;
  int64_t number, first_step;  // index of the tile in its rows, and its first step
  int rows;
  int steps;  // number of steps up to the rows' end, at most p.plan.steps + 1

  // CTAs are numbered so that the first tiles of all rows come before the second tiles. When a tile
  // begins, most tiles that it waits for are then already done. There are at most 2^31 - 1 CTAs, so
  // 32-bit divisions suffice.
  __device__ explicit RowTile(const Params<Op> &p) : p(p) {
    const auto per_group = static_cast<unsigned>(p.plan.per_group);
    const unsigned group = blockIdx.x / per_group, in_group = blockIdx.x % per_group;
    const auto groups = static_cast<unsigned>(p.plan.groups);
    const int64_t in_span = int64_t{in_group} * p.plan.rows;
    first_row.group = group % groups;
    first_row.index = first_row.group * p.plan.span + in_span;
    number = group / groups;
    first_step = number * p.plan.steps;
    rows = static_cast<int>(min(p.plan.span - in_span, int64_t{p.plan.rows}));
    steps = static_cast<int>(min(p.length - first_step, p.plan.steps + 1));
  }

  // A position in the tile: row number `row` of the CTA, and step `step` of the tile.
  struct Place {
    int row, step, count;  // count is the number of steps of the row from `step` on, or 0
  };
  // Returns the position in the tile of vector w of the warp.
  __device__ Place place(int w) const {
    const int vector = threadIdx.x / 32 * (32 * K) + w;  // index in the CTA
    const int row = vector >> p.plan.row_shift, step = (vector & (p.plan.row_vectors - 1)) * N;
    return {row, step, row < rows ? max(steps - step, 0) : 0};
  }

  __device__ Outer row(int number) const { return {first_row.index + number, first_row.group}; }

  // Returns the offset in an operand of a position in the tile, relative to the CTA's first step.
  template <typename At>
  static __device__ int64_t offset(const At &at, const Place &place) {
    return strides(place.row, at.outer) + strides(place.step, at.step);
  }

  // Copies the vectors that are 16 aligned bytes, and sets the others to 0.
  __device__ void copy() const {
    const T *from[Op::INPUTS];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      const scan_input &in = p.in[i].at;
      from[i] = element(p, in, first_row, first_step, 0) - (in.step > 0 ? 0 : N - 1);
    }
#pragma unroll 4
    for (int k = 0; k < K; ++k) {
      const int w = k * 32 + threadIdx.x % 32;
      const Place at = place(w);
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) {
        const Operand &in = p.in[i];
        copy_vector(row_vector<Op>(i, w), from[i] + offset(in.at, at),
                    at.count >= N && in.is_vector);
      }
    }
  }

  // Fills in the vectors that copy() has left at 0, one element at a time, in the order of the
  // steps.
  __device__ void gather_rest() const {
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int w = k * 32 + threadIdx.x % 32;
      const Place at = place(w);
      for (int i = 0; i < Op::INPUTS; ++i) {
        const Operand &in = p.in[i];
        if (at.count == 0 || (at.count >= N && in.is_vector)) continue;
        const T *const from = element(p, in.at, row(at.row), first_step + at.step, 0);
        row_vector<Op>(i, w) = gather(from, in.at.step, at.count);
      }
    }
  }

  // Writes the results, which are in shared memory in the order of the steps.
  __device__ void put() const {
    T *base[Op::OUTPUTS];
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o)
      base[o] = element(p, p.out[o].at, first_row, first_step, 0);
#pragma unroll 2
    for (int k = 0; k < K; ++k) {
      const int w = k * 32 + threadIdx.x % 32;
      const Place at = place(w);
#pragma unroll
      for (int o = 0; o < Op::OUTPUTS; ++o) {
        if (at.count > 0)
          put_vector(p.out[o], base[o] + offset(p.out[o].at, at), at.count, row_vector<Op>(o, w));
      }
    }
  }
  static __device__ void put_vector(const Result &out, T *to, int count, uint4 bits) {
    if (out.is_vector && count >= N) {
      if (out.at.step < 0) {
        T v[N];
        memcpy(v, &bits, sizeof v);
        reverse(v);
        memcpy(&bits, v, sizeof v);
      }
      __stwb(reinterpret_cast<uint4 *>(out.at.step > 0 ? to : to - (N - 1)), bits);
    } else {
      scatter(to, out.at.step, count, bits);
    }
  }
};

// Iterates over the steps of a thread's run, which may cover several short rows.
template <typename Op>
struct Run {
  using T = typename Op::T;
  using A = typename Op::A;
  static constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  const Params<Op> &p;
  const RowTile<Op> &tile;
  const int first, vectors;        // the run's first vector in the warp; the run's vectors per row
  typename RowTile<Op>::Place at;  // position of the run's first vector in the row
  A edges[Op::INPUTS];  // for inputs with a shift: the value before or after the run in its row

  __device__ explicit Run(const RowTile<Op> &tile)
      : p(tile.p),
        tile(tile),
        first(threadIdx.x % 32 * K),
        vectors(min(K, p.plan.row_vectors)),
        at(tile.place(first)) {
    load_edges();
  }

  __device__ void load_edges() {
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      edges[i] = 0;
      if (Op::shift(i) == 0 || at.count == 0) continue;
      const int64_t step = tile.first_step + at.step + (Op::shift(i) < 0 ? -1 : vectors * N);
      if (step < 0) continue;
      const Outer row = tile.row(at.row);
      edges[i] =
          p.to_acc(step < p.length ? *element(p, p.in[i].at, row, step, 0) : after_last(p, row, 0));
    }
  }

  // Loads vector k of the run for input i, in the order of the steps. Among the vectors of the run
  // that belong to the same row, vector k is number `in_row`.
  __device__ void get(A (&v)[N], int i, int k, int in_row) const {
    p.unpack(v, row_vector<Op>(i, first + k));
    if (p.in[i].is_vector && p.in[i].at.step < 0 && at.count >= (in_row + 1) * N) reverse(v);
  }

  // Does the same as get() at step + Op::shift(i). `before`, the value before the vector, is
  // updated.
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
  // j of a vector, and after_vector(k) after vector k. is_first and is_last refer to the row.
  template <typename B, typename F, typename G>
  __device__ void for_each_step(B &&begin_row, F &&f, G &&after_vector) {
    A before[Op::INPUTS];
#pragma unroll 1
    for (int k = 0; k < K; ++k) {
      const int in_row = k & (vectors - 1);
      if (in_row == 0) {
        if (vectors < K) {
          at = tile.place(first + k);
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
        const bool is_first = tile.first_step == 0 && at.step == 0 && in_row + j == 0;
        f(x, is_first, at.count == in_row * N + j + 1, j);
      }
      after_vector(k);
    }
  }
};

template <typename Op>
using RowTable = Table<typename Op::Algebra, typename Op::A, 2 * WARPS, 1>;

template <typename Op>
__global__ void __launch_bounds__(THREADS, std::min(Op::ROW_CTAS, MAX_CTAS))
    scan_rows(const __grid_constant__ Params<Op> p) {
  using T = typename Op::T;
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Part = typename Algebra::Part;
  constexpr int N = WIDTH<T>;
  __shared__ RowTable<Op> table;
  const Plan &plan = p.plan;
  const RowTile<Op> tile(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Returns the state before the first step of row `row` of the CTA.
  const auto start = [&](int row) { return start_state(p, row < tile.rows, tile.row(row), 0); };
  tile.copy();
  Run<Op> run(tile);
  wait_for_copies();
  if (!has_whole_vectors(p, p.length)) tile.gather_rest();
  __syncwarp();
  Part all = Algebra::identity(),
       before = all;  // the total of the run, and the total of earlier lanes in the row
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
    table.put_states(p.state, p.layout, plan, tile.first_row.index, tile.number, start);
    reached = table.state(segment, plan.columns, column);
  }
  auto state = reached;
  A results[Op::OUTPUTS][N];
  run.for_each_step(
      [&] {
        state = plan.segments > 0 ? reached : start(run.at.row);
        if (lane % plan.lanes > 0) state = Algebra::apply(before, state);
      },
      [&](const A(&x)[Op::INPUTS], bool is_first, bool is_last, int j) {
        A out[Op::OUTPUTS];
        p.op.step(x, is_first, state, out);
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) results[o][j] = out[o];
        if (Op::OUTPUTS == 2 && p.grad_start.data != nullptr && is_last) {
          put_grad_start(p, tile.row(run.at.row), 0, state);
        }
      },
      [&](int k) {  // the results replace the inputs in shared memory
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) {
          row_vector<Op>(o, run.first + k) = p.pack(results[o]);
        }
      });
  __syncwarp();
  tile.put();
}

}  // namespace scans

#endif
