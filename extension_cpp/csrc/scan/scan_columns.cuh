// Scans over columns on the GPU (inner > 1): neighbouring lines are neighbours in memory.
#ifndef EXTENSION_CPP_SCAN_COLUMNS_CUH
#define EXTENSION_CPP_SCAN_COLUMNS_CUH

#include "scan/scan_memory.cuh"

namespace scans {

// The part of a tile that a thread scans, and the vectors that it copies. A thread scans a run of
// steps of LINES neighbouring lines, one word at each step. Up to 32 lanes of a segment copy
// vectors of what they scan: vector k is at step copy_step + k * STEPS of the run. The tile lies in
// shared memory as (inputs, steps, columns). A gap after each segment puts the words of two
// segments, which a warp reads at once, into different banks.
template <typename Op>
struct ColumnTile {
  using T = typename Op::T;
  using A = typename Op::A;
  static constexpr int N = WIDTH<T>, LINES = lines_of(N), STEPS = N / LINES;  // of a vector
  static constexpr int GAP = 64, GAPS = max_segments(N) * GAP;                // in bytes
  using Word = Vector<T, LINES>;
  const Params<Op> &p;
  const int segment, lane, width;  // width: bytes of a step
  const int copy_step, copy_column;
  const int64_t outer, first_step, first_line;  // of the run; of the CTA

  __device__ ColumnTile(const Params<Op> &p, int64_t outer, int64_t tile, int64_t strip)
      : p(p),
        segment(threadIdx.x / p.plan.lanes),
        lane(threadIdx.x % p.plan.lanes),
        width(p.plan.columns * static_cast<int>(sizeof(T))),
        copy_step(lane % 32 / side()),
        copy_column(lane / 32 * 32 * LINES + lane % 32 % side() * N),
        outer(outer),
        first_step(tile * p.plan.steps + segment * p.plan.run),
        first_line(strip * p.plan.columns * p.plan.repeats) {}

  __device__ int side() const { return min(p.plan.lanes, 32) / STEPS; }  // vectors side by side
  __device__ int64_t line(int repeat) const {
    return first_line + repeat * p.plan.columns + lane * LINES;
  }
  __device__ int64_t copy_line(int repeat) const {
    return first_line + repeat * p.plan.columns + copy_column;
  }
  __device__ int input_bytes() const {
    return p.plan.vectors * p.plan.repeats * THREADS * 16 + GAPS;
  }
  __device__ char *at(int i, int repeat, int step) const {
    return reinterpret_cast<char *>(held) + i * input_bytes() + segment * GAP +
           ((segment + repeat) * p.plan.run + step) * width;
  }
  __device__ uint4 &copied(int i, int repeat, int k) const {
    return *reinterpret_cast<uint4 *>(at(i, repeat, copy_step + k * STEPS) +
                                      copy_column * static_cast<int>(sizeof(T)));
  }

  __device__ void copy(int repeat) const {
    const int64_t step = first_step + copy_step, count = p.inner - copy_line(repeat);
    const T *from[Op::INPUTS];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      from[i] = element(p, p.in[i].at, outer, step + Op::shift(i), copy_line(repeat));
    }
#pragma unroll 4
    for (int k = 0; k < p.plan.vectors; ++k) {
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) {
        const int64_t at = step + k * STEPS + Op::shift(i);
        const bool is_there = (Op::shift(i) >= 0 || at >= 0) && at < p.length;
        copy_vector(copied(i, repeat, k), from[i], is_there && p.in[i].is_vector && count >= N);
        from[i] += STEPS * p.in[i].at.step;
      }
    }
  }

  // Gathers the vectors that copy() does not copy.
  __device__ void gather_rest(int repeat) const {
    const int64_t line = copy_line(repeat), count = p.inner - line;
    if (count <= 0) return;
#pragma unroll 1
    for (int k = 0; k < p.plan.vectors; ++k) {
      for (int i = 0; i < Op::INPUTS; ++i) {
        const Operand &in = p.in[i];
        const int64_t step = first_step + copy_step + k * STEPS, at = step + Op::shift(i);
        if (step >= p.length || at < 0) continue;
        if (at < p.length) {
          if (in.is_vector && count >= N) continue;
          copied(i, repeat, k) = gather(element(p, in.at, outer, at, line), in.at.inner, count);
        } else if (p.after.data != nullptr) {
          copied(i, repeat, k) = gather(element(p, p.after, outer, 0, line), p.after.inner, count);
        }
      }
    }
  }

  // Calls f(inputs, step, line) for STEPS steps of LINES lines, from step k * STEPS of the run on.
  template <typename F>
  __device__ void for_each_step(int repeat, int k, F &&f) const {
    A v[Op::INPUTS][N];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      const char *from = at(i, repeat, k * STEPS) + lane * static_cast<int>(sizeof(Word));
      Word words[STEPS];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) words[s] = *reinterpret_cast<const Word *>(from + s * width);
      uint4 bits;
      memcpy(&bits, words, sizeof bits);
      p.unpack(v[i], bits);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      A x[Op::INPUTS];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) x[i] = v[i][j];
      f(x, j / LINES, j % LINES);
    }
  }

  // Scans the run from `state` on and writes the results.
  __device__ void write(int repeat, typename Op::Algebra::State (&state)[LINES]) const {
    const int64_t line = this->line(repeat), count = p.inner - line, left = p.length - first_step;
    if (count <= 0) return;
    T *to[Op::OUTPUTS];
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o) to[o] = element(p, p.out[o].at, outer, first_step, line);
#pragma unroll 1
    for (int k = 0; k < p.plan.vectors && k * STEPS < left; ++k) {
      A results[Op::OUTPUTS][N];
      for_each_step(repeat, k, [&](const A(&x)[Op::INPUTS], int s, int j) {
        A out[Op::OUTPUTS];
        p.op.step(x, first_step + k * STEPS + s == 0, state[j], out);
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) results[o][s * LINES + j] = out[o];
        if (Op::OUTPUTS == 2 && p.grad_start.data != nullptr && k * STEPS + s == left - 1 &&
            j < count) {
          put_grad_start(p, outer, line + j, state[j]);
        }
      });
#pragma unroll
      for (int o = 0; o < Op::OUTPUTS; ++o) {
        const uint4 bits = p.pack(results[o]);
        Word words[STEPS];
        memcpy(words, &bits, sizeof bits);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          if (k * STEPS + s >= left) break;
          put_word<T, LINES>(p.out[o], to[o], count, words[s]);
          to[o] += p.out[o].at.step;
        }
      }
    }
  }
};

template <typename Op>
using ColumnTable = Table<typename Op::Algebra, typename Op::A,
                          THREADS * ColumnTile<Op>::LINES + max_segments(ColumnTile<Op>::N),
                          min_columns(ColumnTile<Op>::N)>;

// Three CTAs per SM, as far as shared memory allows.
template <typename Op>
__global__ void __launch_bounds__(THREADS, 3) scan_columns(const __grid_constant__ Params<Op> p) {
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Tile = ColumnTile<Op>;
  __shared__ ColumnTable<Op> table;
  const Plan &plan = p.plan;
  const int64_t strip = blockIdx.x % plan.strips, number = blockIdx.x / plan.strips;
  const int64_t tile = number % plan.tiles, outer = number / plan.tiles;
  const Tile t(p, outer, tile, strip);
#pragma unroll 1
  for (int r = 0; r < plan.repeats; ++r) t.copy(r);
  wait_for_copies();
  if (!has_whole_vectors(p, p.inner) || (p.after.data != nullptr && tile == plan.tiles - 1)) {
#pragma unroll 1
    for (int r = 0; r < plan.repeats; ++r) t.gather_rest(r);
  }
  __syncwarp();
  typename Algebra::State state[Tile::LINES];
  if (plan.segments > 1) {
    typename Algebra::Part sum[Tile::LINES];
#pragma unroll 2
    for (int k = 0; k < plan.vectors; ++k) {
      t.for_each_step(0, k, [&](const A(&x)[Op::INPUTS], int s, int j) {
        const auto part = p.op.part(x, t.first_step + k * Tile::STEPS + s == 0);
        sum[j] = k + s == 0 ? part : Algebra::join(sum[j], part);
      });
    }
    const int column = t.lane * Tile::LINES;
#pragma unroll
    for (int j = 0; j < Tile::LINES; ++j) {
      table.put(table.place(t.segment, plan.columns, column + j), sum[j]);
    }
    table.join_segments(plan);
    table.put_states(p.state, p.layout, plan, outer * plan.strips + strip, tile,
                     [&](int c) { return start_state(p, outer, t.first_line + c); });
#pragma unroll
    for (int j = 0; j < Tile::LINES; ++j)
      state[j] = table.state(t.segment, plan.columns, column + j);
  }
#pragma unroll 1
  for (int r = 0; r < plan.repeats; ++r) {
    if (plan.segments == 1) {
#pragma unroll
      for (int j = 0; j < Tile::LINES; ++j) state[j] = start_state(p, outer, t.line(r) + j);
    }
    t.write(r, state);
  }
}

}  // namespace scans

#endif
