// The two kernels of the scans on the GPU, for every op: steps that are neighbours in memory
// (rows), and lines that are (columns).
//
// A thread copies its vectors into shared memory, asynchronously, so that many bytes are in flight
// and few registers are taken. It makes the Part of its steps, the CTA joins the Parts to the state
// before each thread's steps, and the thread goes over its steps again and writes. So every element
// is read once and written once.
#ifndef EXTENSION_CPP_SCAN_KERNELS_CUH
#define EXTENSION_CPP_SCAN_KERNELS_CUH

#include "common/cuda_async.cuh"
#include "scan/scan_tile.cuh"

namespace scans {

template <typename T>
constexpr int WIDTH = 16 / sizeof(T);  // elements of a vector

struct Operand {
  scan_input at;
  bool is_vector;  // each vector of a tile is 16 aligned bytes
};

struct Result {
  scan_output at;
  bool is_vector;
};

template <typename Op>
struct Params {
  Op op;
  Operand in[Op::INPUTS];
  Result out[Op::OUTPUTS];
  scan_input start;  // the state before the first step (outer, inner); NULL: the algebra's
  scan_input after;  // what an input with shift 1 has after the last step (outer, inner); NULL: 0
  scan_input decay;  // of the step after the last, for grad_start
  scan_output grad_start;  // (outer, inner); NULL: none
  int64_t outer, length, inner;
  Plan plan;
  char *state;
  StateLayout layout;
};

template <typename T>
__device__ inline const T *element(const scan_input &in, int64_t outer, int64_t step, int64_t i) {
  return static_cast<const T *>(in.data) + outer * in.outer + step * in.step + i * in.inner;
}

template <typename T>
__device__ inline T *element(const scan_output &out, int64_t outer, int64_t step, int64_t i) {
  return static_cast<T *>(out.data) + outer * out.outer + step * out.step + i * out.inner;
}

// The vectors that a CTA has copied.
extern __shared__ uint4 held[];

// Copies 16 bytes, or zeros. The L2 reads the whole line of 128 bytes: without that hint scans of
// columns, which take 64 bytes of a line at a time, are 4 to 9 % slower.
__device__ inline void copy_vector(uint4 &to, const void *from, bool is_there) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(&to)),
               "l"(from), "r"(is_there ? 16 : 0)
               : "memory");
#else
  to = is_there ? *static_cast<const uint4 *>(from) : uint4{0, 0, 0, 0};
#endif
}

__device__ inline void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// `count` elements from p on, `stride` apart; the rest of the vector is 0.
template <typename T>
__device__ inline uint4 gather(const T *p, int64_t stride, int64_t count) {
  T v[WIDTH<T>];
#pragma unroll
  for (int j = 0; j < WIDTH<T>; ++j) v[j] = j < count ? p[j * stride] : T(0.0f);
  uint4 bits;
  memcpy(&bits, v, sizeof bits);
  return bits;
}

template <typename T>
__device__ inline void scatter(T *p, int64_t stride, int64_t count, const acc_t<T> (&v)[WIDTH<T>]) {
#pragma unroll
  for (int j = 0; j < WIDTH<T>; ++j) {
    if (j < count) p[j * stride] = from_acc<T>(v[j]);
  }
}

template <typename A, int N>
__device__ inline void reverse(A (&v)[N]) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const A other = v[j];
    v[j] = v[N - 1 - j];
    v[N - 1 - j] = other;
  }
}

template <typename Op>
__device__ inline typename Op::A start_state(const Params<Op> &p, int64_t outer, int64_t i) {
  if (p.start.data == nullptr || outer >= p.outer || i >= p.inner) return Op::Algebra::start();
  return to_acc(*element<typename Op::T>(p.start, outer, 0, i));
}

template <typename Op>
__device__ inline typename Op::T after_last(const Params<Op> &p, int64_t outer, int64_t i) {
  using T = typename Op::T;
  return p.after.data == nullptr ? T(0.0f) : *element<T>(p.after, outer, 0, i);
}

// Writes the gradient of the state before a line, which follows from the last step's.
template <typename Op>
__device__ inline void put_grad_start(const Params<Op> &p, int64_t outer, int64_t i,
                                      typename Op::A state) {
  using T = typename Op::T;
  const auto decay = to_acc(*element<T>(p.decay, outer, p.length - 1, i));
  *element<T>(p.grad_start, outer, 0, i) = from_acc<T>(decay * state);
}

// ---- rows ----

// A thread has a run of VECTORS neighbouring vectors. To copy them, the lanes of a warp take
// neighbouring vectors, and vector number w of the warp goes to place w + w / VECTORS, so that runs
// begin in different banks.
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

// Copies vector w of input i if it lies in 16 aligned bytes. Else gathers its elements, in the
// order of the steps, in the other call: kept apart, the code of the gathers is there once.
template <typename Op>
__device__ inline void copy_row_vector(const Params<Op> &p, int i, int w, const RowSteps &at,
                                       bool gathers) {
  using T = typename Op::T;
  constexpr int N = WIDTH<T>;
  const Operand &in = p.in[i];
  const T *const from = element<T>(in.at, at.row, at.step, 0);
  const bool is_whole = at.count >= N && in.is_vector;
  if (!gathers) {
    if (is_whole) copy_vector(row_vector<Op>(i, w), in.at.step > 0 ? from : from - (N - 1), true);
  } else if (!is_whole) {
    row_vector<Op>(i, w) = gather(from, in.at.step, at.count);
  }
}

// Writes what `results` holds of vector w, in the order of the steps.
template <typename Op>
__device__ inline void put_row_vector(const Params<Op> &p, int o, int w, const RowSteps &at) {
  using T = typename Op::T;
  using A = typename Op::A;
  constexpr int N = WIDTH<T>;
  if (at.count == 0) return;
  const Result &out = p.out[o];
  T *const to = element<T>(out.at, at.row, at.step, 0);
  A v[N];
  unpack<T, N>(v, row_vector<Op>(o, w));
  if (out.is_vector && at.count >= N) {
    if (out.at.step < 0) reverse(v);
    store<T, N>(out.at.step > 0 ? to : to - (N - 1), v);
  } else {
    scatter(to, out.at.step, at.count, v);
  }
}

// Goes over the steps of a thread's run, which may have several short rows.
template <typename Op>
struct Run {
  using T = typename Op::T;
  using A = typename Op::A;
  static constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  const Params<Op> &p;
  const int64_t first_row, first_step;
  const int first, vectors;  // the first vector of the warp; vectors of the run in a row
  RowSteps at;               // of the first vector in the row
  A edges[Op::INPUTS];  // of an input with a shift, the step before or after the run in the row

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
      edges[i] = to_acc(step < p.length ? *element<T>(p.in[i].at, at.row, step, 0)
                                        : after_last(p, at.row, 0));
    }
  }

  // Vector k of input i in the order of the steps; it is number `in_row` of the run in its row.
  __device__ void get(A (&v)[N], int i, int k, int in_row) const {
    unpack<T, N>(v, row_vector<Op>(i, first + k));
    if (p.in[i].is_vector && p.in[i].at.step < 0 && at.count >= (in_row + 1) * N) reverse(v);
  }

  // The same with the shift of the input; `before` is its value before the vector.
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

  // begin_row() is called before the first vector in each row; step(inputs, is_first, is_last, j)
  // for step j of a vector, with whether it is the first or the last of the row; and
  // after_vector(k).
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

template <typename Op>
__global__ void __launch_bounds__(THREADS, 4) scan_rows(const __grid_constant__ Params<Op> p) {
  using T = typename Op::T;
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Part = typename Algebra::Part;
  constexpr int N = WIDTH<T>, K = Op::ROW_VECTORS;
  __shared__ Table<Algebra, A, 2 * WARPS> table;
  const Plan &plan = p.plan;
  const int64_t tile = blockIdx.x % plan.tiles, first_step = tile * plan.steps;
  const int64_t first_row = blockIdx.x / plan.tiles * plan.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 4
  for (int k = 0; k < K; ++k) {
    const RowSteps at(p, first_row, first_step, k * 32 + lane);
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) copy_row_vector(p, i, k * 32 + lane, at, false);
  }
#pragma unroll 1
  for (int k = 0; k < K; ++k) {
    const RowSteps at(p, first_row, first_step, k * 32 + lane);
    for (int i = 0; i < Op::INPUTS; ++i) copy_row_vector(p, i, k * 32 + lane, at, true);
  }
  Run<Op> run(p, first_row, first_step);
  wait_for_copies();
  __syncwarp();
  Part all = Algebra::identity(), before = all;  // of the run; of the lanes before it in the row
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
  A reached = Algebra::start();  // before the warp
  if (plan.segments > 0) {
    const int segment = warp % plan.segments, column = warp / plan.segments;
    if (lane == 31) table.put(table.place(segment, plan.columns, column), all);
    table.join_segments(plan);
    table.template put_states<1>(p.state, p.layout, plan, first_row, tile,
                                 [&](int c) { return start_state(p, first_row + c, 0); });
    reached = table.state(segment, plan.columns, column);
  }
  A state, results[Op::OUTPUTS][N];
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
      [&](int k) {  // in place of the inputs
#pragma unroll
        for (int o = 0; o < Op::OUTPUTS; ++o) {
          row_vector<Op>(o, run.first + k) = pack<T, N>(results[o]);
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

// ---- columns ----

// A thread reads only what it has copied itself.
template <typename Op>
__device__ inline uint4 &column_vector(const Params<Op> &p, int i, int k) {
  return held[(i * p.plan.vectors + k) * THREADS + threadIdx.x];
}

// Of input i: WIDTH neighbouring lines from `line` on, at `step` + the input's shift.
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
__global__ void __launch_bounds__(THREADS, 3) scan_columns(const __grid_constant__ Params<Op> p) {
  using T = typename Op::T;
  using A = typename Op::A;
  using Algebra = typename Op::Algebra;
  using Part = typename Algebra::Part;
  constexpr int N = WIDTH<T>;
  __shared__ Table<Algebra, A, THREADS * N + THREADS / MIN_LANES> table;
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
#pragma unroll 1
  for (int k = 0; k < plan.vectors; ++k) {
    for (int i = 0; i < Op::INPUTS; ++i) vector(i, k).gather_rest(column_vector(p, i, k));
  }
  // Calls f(inputs, j) for the N lines of step k.
  const auto for_each_line = [&](int k, auto &&f) {
    A v[Op::INPUTS][N];
#pragma unroll
    for (int i = 0; i < Op::INPUTS; ++i) unpack<T, N>(v[i], column_vector(p, i, k));
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
  A state[N];
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
      if (out.is_vector && count >= N) {
        store<T, N>(to, results[o]);
      } else {
        scatter(to, out.at.inner, count, results[o]);
      }
    }
  }
}

}  // namespace scans

#endif
