// Scans over columns on the GPU (inner > 1), where neighbouring lines (scan.h) are neighbours in
// memory.
#ifndef EXTENSION_CPP_SCAN_COLUMNS_CUH
#define EXTENSION_CPP_SCAN_COLUMNS_CUH

#include "scan/scan_memory.cuh"

namespace scans {

// The part of a tile that a thread scans, and the vectors that it copies. A segment is plan.lanes
// neighbouring threads, which scan the same range of steps (a run). A thread scans the run for
// LINES neighbouring lines, and reads one word at each step. Up to 32 neighbouring threads of a
// segment copy what they scan: vector k of a thread is at step copy_step + k * STEPS of the run. In
// shared memory the tile is (inputs, steps, columns). A gap after each segment puts the words of
// two segments, which a warp reads at once, into different banks.
template <typename Op>
struct ColumnTile {
  using T = typename Op::T;
  using A = typename Op::A;
  static constexpr int N = WIDTH<T>, LINES = lines_of(N), STEPS = N / LINES;  // of a vector
  static constexpr int GAP = 64, GAPS = max_segments(N) * GAP;                // in bytes
  using Word = Vector<T, LINES>;
  const Params<Op> &p;
  const int segment, lane, width;  // width is the number of bytes per step
  const int copy_step, copy_column;
  const Outer outer;
  const int64_t first_step, first_line;  // first step and first line of the CTA's tile
  const int run;                         // first step of the run, counted from first_step
  const int steps;  // number of steps up to the lines' end, at most p.plan.steps + 1

  __device__ ColumnTile(const Params<Op> &p, const Outer &outer, unsigned tile, unsigned strip)
      : p(p),
        segment(threadIdx.x / p.plan.lanes),
        lane(threadIdx.x % p.plan.lanes),
        width(p.plan.columns * static_cast<int>(sizeof(T))),
        copy_step(lane % 32 / side()),
        copy_column(lane / 32 * 32 * LINES + lane % 32 % side() * N),
        outer(outer),
        first_step(tile * p.plan.steps),
        first_line(int64_t{strip} * (p.plan.columns * p.plan.repeats)),
        run(segment * p.plan.run),
        steps(static_cast<int>(min(p.length - first_step, p.plan.steps + 1))) {}

  __device__ int side() const { return min(p.plan.lanes, 32) / STEPS; }  // vectors side by side
  __device__ int line(int repeat) const { return repeat * p.plan.columns + lane * LINES; }
  __device__ int copy_line(int repeat) const { return repeat * p.plan.columns + copy_column; }
  // Returns the number of lines from line `line` of the CTA to the last line of the tensor.
  __device__ int64_t lines(int line) const { return p.inner - first_line - line; }
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

  __device__ void copy() const {
    const int step = run + copy_step;
    const T *strip[Op::INPUTS];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) {
      const scan_input &in = p.in[i].at;
      strip[i] = element(p, in, outer, first_step + Op::shift(i), first_line) +
                 strides(step, in.step) + strides(copy_column, in.inner);
    }
#pragma unroll 1
    for (int repeat = 0; repeat < p.plan.repeats; ++repeat) {
      const bool is_whole = lines(copy_line(repeat)) >= N;
      const T *from[Op::INPUTS];
#pragma unroll
      for (int i = 0; i < Op::INPUTS; ++i) {
        from[i] = strip[i];
        strip[i] += strides(p.plan.columns, p.in[i].at.inner);
      }
#pragma unroll 4
      for (int k = 0; k < p.plan.vectors; ++k) {
#pragma unroll
        for (int i = 0; i < Op::INPUTS; ++i) {
          const int at = step + k * STEPS + Op::shift(i);
          const bool is_there = at < steps && (Op::shift(i) >= 0 || at >= 0 || first_step > 0);
          copy_vector(copied(i, repeat, k), from[i], is_there && p.in[i].is_vector && is_whole);
          from[i] += STEPS * p.in[i].at.step;
        }
      }
    }
  }

  // Fills in the vectors that copy() has left at 0, one element at a time.
  __device__ void gather_rest() const {
#pragma unroll 1
    for (int repeat = 0; repeat < p.plan.repeats; ++repeat) gather_strip(repeat);
  }
  __device__ void gather_strip(int repeat) const {
    const int64_t line = first_line + copy_line(repeat), count = p.inner - line;
    if (count <= 0) return;
#pragma unroll 1
    for (int k = 0; k < p.plan.vectors; ++k) {
      for (int i = 0; i < Op::INPUTS; ++i) {
        const Operand &in = p.in[i];
        const int64_t step = first_step + run + copy_step + k * STEPS, at = step + Op::shift(i);
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

  // Returns whether `step` of the run is the first step of the lines.
  __device__ bool is_first(int step) const { return first_step == 0 && run + step == 0; }

  // Returns the state before the first step of line `line` of the CTA.
  __device__ typename Op::Algebra::State start(int line) const {
    return start_state(p, lines(line) > 0, outer, first_line + line);
  }

  // Calls f(inputs, step, line) for LINES lines and STEPS steps, the first at k * STEPS in the run.
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

  // Scans the run, beginning with `state`, and writes the results. If lines are short, the tile has
  // several strips of lines, and each of them is scanned from its first step.
  __device__ void write(typename Op::Algebra::State (&state)[LINES]) const {
    T *to[Op::OUTPUTS];
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o) {
      const scan_output &out = p.out[o].at;
      to[o] = element(p, out, outer, first_step, first_line) + strides(run, out.step) +
              strides(lane * LINES, out.inner);
    }
#pragma unroll 1
    for (int repeat = 0; repeat < p.plan.repeats; ++repeat) {
      if (p.plan.segments == 1) {
#pragma unroll
        for (int j = 0; j < LINES; ++j) state[j] = start(line(repeat) + j);
      }
      write_strip(repeat, to, state);
#pragma unroll
      for (int o = 0; o < Op::OUTPUTS; ++o) to[o] += strides(p.plan.columns, p.out[o].at.inner);
    }
  }
  __device__ void write_strip(int repeat, T *const (&strip)[Op::OUTPUTS],
                              typename Op::Algebra::State (&state)[LINES]) const {
    const int line = this->line(repeat), left = steps - run;
    const int count = static_cast<int>(min(lines(line), int64_t{LINES}));
    if (count <= 0) return;
    T *to[Op::OUTPUTS];
#pragma unroll
    for (int o = 0; o < Op::OUTPUTS; ++o) to[o] = strip[o];
#pragma unroll 1
    for (int k = 0; k < p.plan.vectors && k * STEPS < left; ++k) {
      A results[Op::OUTPUTS][N];
      for_each_step(repeat, k, [&](const A(&x)[Op::INPUTS], int s, int j) {
        A out[Op::OUTPUTS];
        p.op.step(x, is_first(k * STEPS + s), state[j], out);
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) results[o][s * LINES + j] = out[o];
        if (Op::OUTPUTS == 2 && p.grad_start.data != nullptr && k * STEPS + s == left - 1 &&
            j < count) {
          put_grad_start(p, outer, first_line + line + j, state[j]);
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

template <typename Op>
__global__ void __launch_bounds__(THREADS, std::min(Op::COLUMN_CTAS, MAX_CTAS))
    scan_columns(const __grid_constant__ Params<Op> p) {
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Tile = ColumnTile<Op>;
  __shared__ ColumnTable<Op> table;
  const Plan &plan = p.plan;
  // There are at most 2^31 - 1 CTAs, so that these divisions need only 32 bits.
  const auto strips = static_cast<unsigned>(plan.strips), tiles = static_cast<unsigned>(plan.tiles);
  const unsigned strip = blockIdx.x % strips, number = blockIdx.x / strips;
  const unsigned tile = number % tiles, outer = number / tiles;
  const Tile t(p, {outer, outer / static_cast<unsigned>(plan.span)}, tile, strip);
  t.copy();
  wait_for_copies();
  if (!has_whole_vectors(p, p.inner) || (p.after.data != nullptr && tile == plan.tiles - 1)) {
    t.gather_rest();
  }
  __syncwarp();
  typename Algebra::State state[Tile::LINES];
  if (plan.segments > 1) {
    typename Algebra::Part sum[Tile::LINES];
#pragma unroll 2
    for (int k = 0; k < plan.vectors; ++k) {
      t.for_each_step(0, k, [&](const A(&x)[Op::INPUTS], int s, int j) {
        const auto part = p.op.part(x, t.is_first(k * Tile::STEPS + s));
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
                     [&](int c) { return t.start(c); });
#pragma unroll
    for (int j = 0; j < Tile::LINES; ++j)
      state[j] = table.state(t.segment, plan.columns, column + j);
  }
  t.write(state);
}

}  // namespace scans

#endif
