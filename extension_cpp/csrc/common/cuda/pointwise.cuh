// Element-wise kernels over dense memory: out[j][i] = f(in[0][i], in[1][i], ...)[j]. f may have one
// more operand, a row that is broadcast: row[i % cols]. Alternatively, the inputs are matrices with
// a stride between rows (launch_rows).
//
// A CTA covers THREADS * VECTORS vectors of N elements. A thread loads all its vectors before it
// computes, so that several 16-byte loads are in flight. The head elements before the first aligned
// address and the tail elements after the last whole vector are processed one by one. N is 1 for
// float64, and also if the pointers differ in their alignment.
#ifndef EXTENSION_CPP_CUDA_POINTWISE_CUH
#define EXTENSION_CPP_CUDA_POINTWISE_CUH

#include "common/cuda/vector.cuh"
#include "common/range.h"

namespace pointwise {

constexpr int THREADS = 128;
constexpr int VECTORS = 2;
// The number of elements in a 16-byte vector. It is 1 for float64.
template <typename T>
constexpr int WIDEST = sizeof(T) == 8 ? 1 : 16 / sizeof(T);

template <typename T, int IN, int OUT>
struct Tensors {
  const T *in[IN];
  T *out[OUT];
  int64_t numel;
  int head;  // number of elements before the first aligned one
};

// The policy class for kernels without a row operand. Output element i lies in row r = row_of(i),
// and is computed from in[j][i + gaps(r, j)].
struct NoRow {
  static constexpr int OPERANDS = 0;
  static __device__ uint32_t row_of(int64_t) { return 0; }
  static __device__ int64_t gaps(uint32_t, int) { return 0; }
  static uint64_t ends() { return 0; }
};

// The policy class for a row operand: the last operand of f is p[i % cols]. `whole` is true if
// every vector of elements needs one aligned vector of p, and `aligned` if p is aligned.
template <typename T>
struct Row {
  static constexpr int OPERANDS = 1;
  const T *p;
  int64_t cols;
  bool whole;
  bool aligned;
  static __device__ uint32_t row_of(int64_t) { return 0; }
  static __device__ int64_t gaps(uint32_t, int) { return 0; }
  static uint64_t ends() { return 0; }
};

// The policy class for inputs with rows of `cols` elements, perhaps with gaps, and no row operand.
// If there are gaps, a launch has fewer than 2^32 elements, and each vector is in one row.
template <int IN>
struct RowStrides {
  static constexpr int OPERANDS = 0;
  bool has_gaps;
  uint32_t cols;
  int64_t gap[IN];  // elements between the end of a row and the begin of the next, for each input
  __device__ uint32_t row_of(int64_t i) const {
    return has_gaps ? static_cast<uint32_t>(i) / cols : 0;
  }
  __device__ int64_t gaps(uint32_t r, int j) const { return static_cast<int64_t>(r) * gap[j]; }
  uint64_t ends() const {
    if (!has_gaps) return 0;
    uint64_t all = cols;
    for (int j = 0; j < IN; ++j) all |= static_cast<uint64_t>(gap[j]);
    return all;
  }
};

// Loads elements [c, c + N) of p from two aligned vectors. p is aligned to 16 bytes.
template <typename T, int N>
__device__ inline Vector<T, N> load_shifted(const T *p, int64_t c) {
  static_assert(sizeof(T) * N == 16 && sizeof(T) == 2);
  const uint4 low = load_vector<T, N>(p + c / N * N), high = load_vector<T, N>(p + c / N * N + N);
  const int words = c % N / 2, half = c % 2 * 16;
  // Whole words are skipped by selection, because indexing would move the registers to local
  // memory. A half word is then skipped by a funnel shift.
  const bool two = words & 2, one = words & 1;
  const unsigned a0 = two ? low.z : low.x, a1 = two ? low.w : low.y, a2 = two ? high.x : low.z,
                 a3 = two ? high.y : low.w;
  const unsigned a4 = two ? high.z : high.x, a5 = two ? high.w : high.y;
  const unsigned b0 = one ? a1 : a0, b1 = one ? a2 : a1, b2 = one ? a3 : a2, b3 = one ? a4 : a3,
                 b4 = one ? a5 : a4;
  return {__funnelshift_r(b0, b1, half), __funnelshift_r(b1, b2, half),
          __funnelshift_r(b2, b3, half), __funnelshift_r(b3, b4, half)};
}

// Loads the elements of the broadcast row that belong to elements [i, i + N). The index is
// converted to 32 bits, because a 64-bit division takes as long as the rest of a kernel.
template <typename T, int N>
__device__ inline void load_row(acc_t<T> (&x)[N], const Row<T> &row, int64_t i) {
  int64_t c = static_cast<uint32_t>(i) % static_cast<uint32_t>(row.cols);
  if (row.whole) return load<T, N>(x, row.p + c);
  if constexpr (sizeof(T) * N == 16 && sizeof(T) == 2) {
    if (row.aligned && c + 2 * N <= row.cols) return unpack<T, N>(x, load_shifted<T, N>(row.p, c));
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] = to_acc(row.p[c]);
    c = c + 1 == row.cols ? 0 : c + 1;
  }
}

// Processes COUNT vectors of N elements. The first begins at element i, the next `step` later.
template <typename T, int N, int COUNT, int IN, int OUT, typename R, typename F>
__device__ inline void some_vectors(const Tensors<T, IN, OUT> &t, const R &row, const F &f,
                                    int64_t i, int step) {
  Vector<T, N> raw[COUNT][IN];
  uint32_t row_of[COUNT];
#pragma unroll
  for (int u = 0; u < COUNT; ++u) row_of[u] = row.row_of(i + u * step);
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
#pragma unroll
    for (int j = 0; j < IN; ++j) {
      raw[u][j] = load_vector<T, N>(t.in[j] + i + u * step + row.gaps(row_of[u], j));
    }
  }
#pragma unroll
  for (int u = 0; u < COUNT; ++u) {
    acc_t<T> x[IN + R::OPERANDS][N], y[OUT][N];
#pragma unroll
    for (int j = 0; j < IN; ++j) unpack<T, N>(x[j], raw[u][j]);
    if constexpr (R::OPERANDS == 1) load_row<T, N>(x[IN], row, i + u * step);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      acc_t<T> in[IN + R::OPERANDS], out[OUT];
#pragma unroll
      for (int j = 0; j < IN + R::OPERANDS; ++j) in[j] = x[j][k];
      f(in, out);
#pragma unroll
      for (int j = 0; j < OUT; ++j) y[j][k] = out[j];
    }
#pragma unroll
    for (int j = 0; j < OUT; ++j) store<T, N>(t.out[j] + i + u * step, y[j]);
  }
}

template <typename T, int N, int IN, int OUT, typename R, typename F>
__global__ void __launch_bounds__(THREADS) kernel(Tensors<T, IN, OUT> t, R row, F f) {
  const int64_t vectors = (t.numel - t.head) / N,
                block = static_cast<int64_t>(blockIdx.x) * (THREADS * VECTORS);
  const int64_t vector = block + threadIdx.x;
  if (vector < vectors) {
    // At the end of the tensor, a thread without a second vector processes its first vector twice.
    // A separate path for a single vector would inline f a second time.
    const int step = vector + (VECTORS - 1) * THREADS < vectors ? THREADS * N : 0;
    some_vectors<T, N, VECTORS>(t, row, f, t.head + vector * N, step);
  }
  if (N > 1 && blockIdx.x == 0) {
    // The first threads of the CTA process the head elements, and the next ones the tail elements.
    const int64_t i = threadIdx.x + (threadIdx.x < t.head ? 0 : vectors * N);
    if (i < t.numel) some_vectors<T, 1, 1>(t, row, f, i, 0);
  }
}

// ---- host code; functions that do not depend on types are compiled once, not once per kernel ----

// How elements are divided among CTAs: `head` single elements, then vectors of `width` elements.
struct Division {
  int width, head;
  unsigned ctas;
};

// Chooses the vector width, in elements of `size` bytes. The width is `widest` if all operands have
// the same offset from an aligned address, and 1 otherwise. `row_ends` is 0 without gaps. With gaps
// it is the bitwise or of the row's width and all gaps. Vectors are then allowed only if that
// offset is 0 and no vector straddles the end of a row.
inline Division divide(const void *const *operands, int count, int size, int widest, int64_t numel,
                       uint64_t row_ends) {
  Division d{widest, 0, 1};
  const auto phase = [&](const void *p) {
    return reinterpret_cast<uintptr_t>(p) & static_cast<unsigned>(size * d.width - 1);
  };
  const auto is_allowed = [&] {
    for (int j = 1; j < count; ++j) {
      if (phase(operands[j]) != phase(operands[0])) return false;
    }
    return row_ends == 0 || (phase(operands[0]) == 0 && row_ends % d.width == 0);
  };
  if (!is_allowed()) d.width = 1;
  const int64_t head = (d.width - static_cast<int64_t>(phase(operands[0])) / size) % d.width;
  d.head = static_cast<int>(head < numel ? head : numel);
  const int64_t ctas = ceil_div((numel - d.head) / d.width, THREADS * VECTORS);
  if (ctas > 1) d.ctas = static_cast<unsigned>(ctas);
  return d;
}

template <typename T, int IN, int OUT, typename F, typename R>
cudaError_t launch_once(const void *const (&in)[IN], void *const (&out)[OUT], int64_t numel, F f,
                        void *stream, R row) {
  Tensors<T, IN, OUT> t;
  const void *operands[IN + OUT];
  for (int j = 0; j < OUT; ++j) operands[j] = t.out[j] = static_cast<T *>(out[j]);
  for (int j = 0; j < IN; ++j) operands[OUT + j] = t.in[j] = static_cast<const T *>(in[j]);
  const Division d = divide(operands, IN + OUT, sizeof(T), WIDEST<T>, numel, row.ends());
  t.numel = numel;
  t.head = d.head;
  if constexpr (R::OPERANDS == 1) {
    row.aligned = reinterpret_cast<uintptr_t>(row.p) % (sizeof(T) * d.width) == 0;
    row.whole = row.aligned && row.cols % d.width == 0 && d.head == 0;
  }
  const auto kernel_of =
      d.width == 1 ? kernel<T, 1, IN, OUT, R, F> : kernel<T, WIDEST<T>, IN, OUT, R, F>;
  kernel_of<<<d.ctas, THREADS, 0, static_cast<cudaStream_t>(stream)>>>(t, row, f);
  return cudaGetLastError();
}

// Computes out = f(in): launch<T, IN, OUT>({inputs}, {outputs}, numel, f, stream). A row operand
// Row<T>{pointer, cols} may follow as the last argument. The elements are then divided among kernel
// launches of fewer than 2^32 elements. Each launch covers whole rows, or a part of one row.
template <typename T, int IN, int OUT, typename F, typename R = NoRow>
cudaError_t launch(const void *const (&in)[IN], void *const (&out)[OUT], int64_t numel, F f,
                   void *stream, R row = {}) {
  if constexpr (R::OPERANDS == 0) {
    return launch_once<T, IN, OUT>(in, out, numel, f, stream, row);
  } else {
    const T *p = row.p;
    const int64_t cols = row.cols, fit = UINT32_MAX / cols, most = fit > 0 ? fit * cols : 1 << 30;
    for (int64_t first = 0, some; first < numel; first += some) {
      const int64_t column = first % cols, left = fit > 0 ? numel - first : cols - column;
      some = left < most ? left : most;
      if (fit == 0) row.p = p + column, row.cols = some;
      const void *some_in[IN];
      void *some_out[OUT];
      for (int j = 0; j < IN; ++j) some_in[j] = static_cast<const T *>(in[j]) + first;
      for (int j = 0; j < OUT; ++j) some_out[j] = static_cast<T *>(out[j]) + first;
      const cudaError_t error = launch_once<T, IN, OUT>(some_in, some_out, some, f, stream, row);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  }
}

// Does the same as launch() for inputs with gaps between their rows. Row r of input j begins at
// in[j] + r * strides[j]. The outputs have no gaps. If an input has gaps, the rows are divided
// among kernel launches of fewer than 2^32 elements, because row_of() uses a 32-bit index.
template <typename T, int IN, int OUT, typename F>
cudaError_t launch_rows(const void *const (&in)[IN], const int64_t (&strides)[IN],
                        void *const (&out)[OUT], int64_t rows, int64_t cols, F f, void *stream) {
  RowStrides<IN> row{false, static_cast<uint32_t>(cols), {}};
  for (int j = 0; j < IN; ++j) {
    row.gap[j] = strides[j] - cols;
    row.has_gaps = row.has_gaps || row.gap[j] != 0;
  }
  const int64_t fit = row.has_gaps ? UINT32_MAX / cols : rows, most = fit > 0 ? fit : 1;
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t some = rows - first < most ? rows - first : most;
    row.has_gaps = row.has_gaps && some > 1;
    const void *some_in[IN];
    void *some_out[OUT];
    for (int j = 0; j < IN; ++j) some_in[j] = static_cast<const T *>(in[j]) + first * strides[j];
    for (int j = 0; j < OUT; ++j) some_out[j] = static_cast<T *>(out[j]) + first * cols;
    const cudaError_t error =
        launch_once<T, IN, OUT>(some_in, some_out, some * cols, f, stream, row);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace pointwise

#endif
