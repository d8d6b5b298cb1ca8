// Scans over columns on the GPU (inner > 1): neighbouring lines are neighbours in memory.
#ifndef EXTENSION_CPP_SCAN_COLUMNS_CUH
#define EXTENSION_CPP_SCAN_COLUMNS_CUH

#include "scan/scan_memory.cuh"

namespace scans {

// Vector k of input i of this thread. Only this thread reads it, so no barrier is needed.
template <typename Op>
__device__ inline uint4 &column_vector(const Params<Op> &p, int i, int k) {
  return held[(i * p.plan.vectors + k) * THREADS + threadIdx.x];
}

// One vector of input i: WIDTH neighbouring lines from `line` on, at step + Op::shift(i).
template <typename Op>
struct ColumnVector {
  using T = typename Op::T;
  const Params<Op> &p;
  const Operand &in;
  int64_t outer, at, line, count;
  bool is_whole;

  __device__ ColumnVector(const Params<Op> &p, int i, int64_t outer, int64_t step, int64_t line)
      : p(p),
        in(p.in[i]),
        outer(outer),
        at(step + Op::shift(i)),
        line(line),
        count(step < p.length && at >= 0 ? p.inner - line : 0),
        is_whole(in.is_vector && at < p.length && count >= WIDTH<T>) {}

  __device__ void copy(uint4 &to) const {
    copy_vector(to, element<T>(in.at, outer, at, line), is_whole);
  }
  __device__ void gather_rest(uint4 &to) const {
    if (is_whole || count <= 0) return;
    if (at < p.length) {
      to = gather(element<T>(in.at, outer, at, line), in.at.inner, count);
    } else if (p.after.data != nullptr) {
      to = gather(element<T>(p.after, outer, 0, line), p.after.inner, count);
    }
  }
};

template <typename Op>
using ColumnTable = Table<typename Op::Algebra, typename Op::A,
                          THREADS * WIDTH<typename Op::T> + THREADS / MIN_LANES>;

template <typename Op>
__global__ void __launch_bounds__(THREADS, 3) scan_columns(const __grid_constant__ Params<Op> p) {
  using T = typename Op::T;
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Part = typename Algebra::Part;
  constexpr int N = WIDTH<T>;
  __shared__ ColumnTable<Op> table;
  const Plan &plan = p.plan;
  const int64_t strip = blockIdx.x % plan.strips, number = blockIdx.x / plan.strips;
  const int64_t tile = number % plan.tiles, outer = number / plan.tiles;
  const int segment = threadIdx.x / plan.lanes, column = threadIdx.x % plan.lanes * N;
  const int64_t first_line = strip * plan.columns;
  const int64_t line = first_line + column, first_step = tile * plan.steps + segment * plan.vectors;
  const auto vector = [&](int i, int k) {
    return ColumnVector<Op>(p, i, outer, first_step + k, line);
  };
#pragma unroll 4
  for (int k = 0; k < plan.vectors; ++k) {
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) vector(i, k).copy(column_vector(p, i, k));
  }
  wait_for_copies();
  if (!has_whole_vectors(p, p.inner) || (p.after.data != nullptr && tile == plan.tiles - 1)) {
#pragma unroll 1
    for (int k = 0; k < plan.vectors; ++k) {
      for (int i = 0; i < Op::INPUTS; ++i) vector(i, k).gather_rest(column_vector(p, i, k));
    }
  }
  // Calls f(inputs, j) for the N lines of step k.
  const auto for_each_line = [&](int k, auto &&f) {
    A v[Op::INPUTS][N];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) p.unpack(v[i], column_vector(p, i, k));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A x[Op::INPUTS];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) x[i] = v[i][j];
      f(x, j);
    }
  };
  Part sum[N];
#pragma unroll 2
  for (int k = 0; k < plan.vectors; ++k) {
    for_each_line(k, [&](const A(&x)[Op::INPUTS], int j) {
      const Part part = p.op.part(x, first_step + k == 0);
      sum[j] = k == 0 ? part : Algebra::join(sum[j], part);
    });
  }
  typename Algebra::State state[N];
  if (plan.segments > 1) {
#pragma unroll
    for (int j = 0; j < N; ++j) table.put(table.place(segment, plan.columns, column + j), sum[j]);
    table.join_segments(plan);
    constexpr int COLUMNS = MIN_LANES * N / WARPS;
    const int64_t number_of_strip = outer * plan.strips + strip;
    table.template put_states<COLUMNS>(p.state, p.layout, plan, number_of_strip, tile, [&](int c) {
      return start_state(p, outer, first_line + c);
    });
#pragma unroll
    for (int j = 0; j < N; ++j) state[j] = table.state(segment, plan.columns, column + j);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) state[j] = start_state(p, outer, line + j);
  }
  const int64_t count = p.inner - line;
  if (count <= 0) return;
#pragma unroll 1
  for (int k = 0; k < plan.vectors; ++k) {
    const int64_t step = first_step + k;
    if (step >= p.length) return;
    A results[Op::OUTPUTS][N];
    for_each_line(k, [&](const A(&x)[Op::INPUTS], int j) {
      A out[Op::OUTPUTS];
      p.op.step(x, step == 0, state[j], out);
#pragma unroll
      for (int o = 0; o < Op::OUTPUTS; ++o) results[o][j] = out[o];
      if (Op::OUTPUTS == 2 && p.grad_start.data != nullptr && step == p.length - 1 && j < count) {
        put_grad_start(p, outer, line + j, state[j]);
      }
    });
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o) {
      const Result &out = p.out[o];
      T *const to = element<T>(out.at, outer, step, line);
      const uint4 bits = p.pack(results[o]);
      if (out.is_vector && count >= N) {
        __stwb(reinterpret_cast<uint4 *>(to), bits);
      } else {
        scatter(to, out.at.inner, count, bits);
      }
    }
  }
}

}  // namespace scans

#endif
