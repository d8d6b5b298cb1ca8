// Building blocks of kernels that process each row of a matrix with part of a warp, with a CTA or
// with a cluster of CTAs.
//
// blockDim.x threads of a CTA share a row. blockDim.x is a power of two up to 32, or a multiple of
// 32. A CTA processes blockDim.y rows. The CTAs of a cluster share one row, and each of them holds
// a range of its columns (a slice).
//
// A row is read and written in vectors of 16 bytes that are aligned in memory. Thread t owns the K
// vectors t, t + blockDim.x, and so on. ALIGNED means that every row begins at a multiple of 16
// bytes and consists of whole vectors. Otherwise, columns before the first and after the last whole
// vector are single elements (edges), and each of the first threads owns one of them. Row r has the
// same alignment in all tensors of a call, and in each tensor the same as row r +
// alignment_period() (rows/plan.h).
#ifndef EXTENSION_CPP_ROWS_FRAGMENT_CUH
#define EXTENSION_CPP_ROWS_FRAGMENT_CUH

#include "common/cuda/cache.cuh"
#include "common/cuda/vector.cuh"
#include "rows/row_sum.cuh"

namespace rows {

template <typename T>
constexpr int VECTOR = 16 / sizeof(T);  // elements in a vector

inline bool is_aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// The columns of a CTA's slice of a row.
template <typename T, bool ALIGNED>
struct RowSlice {
  static constexpr int N = VECTOR<T>;
  int begin, end;    // all columns; `begin` is aligned, and up to N - 1 before column 0
  int first, limit;  // the columns of whole vectors
  int heads, tails;  // number of edges before and after the whole vectors

  // Computes the slice of CTA `rank`: `slice` columns of whole vectors, and edges at the row's
  // ends.
  __device__ RowSlice(int cols, int64_t row, int slice, int rank) {
    const int skew = ALIGNED ? 0 : static_cast<int>(row * cols % N);
    const int head = skew > 0 ? min(N - skew, cols) : 0;
    const int tail = ALIGNED ? cols : head + (cols - head) / N * N;
    first = head + rank * slice;
    limit = min(first + slice, tail);
    const bool is_last = first + slice >= tail && (rank == 0 || first < tail);
    heads = ALIGNED || rank > 0 ? 0 : head;
    tails = ALIGNED || !is_last ? 0 : cols - tail;
    begin = rank == 0 ? -skew : min(first, tail);
    end = max(limit, begin) + tails;
  }
  __device__ int count() const { return max(limit - first, 0) + heads + tails; }
};

// Names some of the elements that a thread owns in a row: its vector k, or with SIZE = 1 and k = K
// its edge (a single element before or after the whole vectors).
template <int N>
struct Part {
  static constexpr int SIZE = N;
  int k;
};

// One value of type A for each element that a thread owns.
template <typename A, int K, int N>
struct RowValues {
  A v[K][N], edge[1];
  __device__ auto &at(Part<N> part) { return v[part.k]; }
  __device__ auto &at(Part<1>) { return edge; }
};

// The columns that one thread owns.
template <typename T, int K, bool ALIGNED>
struct RowWindow {
  static constexpr int N = VECTOR<T>;
  int first;  // column of the thread's first vector
  int step;   // distance between two vectors of the thread, in columns
  int left;   // number of columns from `first` to the end of the slice's vectors
  int edge;   // column of the thread's edge, or -1 if it has none

  __device__ explicit RowWindow(const RowSlice<T, ALIGNED> &slice) {
    const int thread = threadIdx.x, tail = thread - slice.heads;
    first = slice.first + thread * N;
    step = blockDim.x * N;
    left = slice.limit - first;
    edge = -1;
    if (ALIGNED || thread >= slice.heads + slice.tails) return;
    edge = tail < 0 ? thread : slice.end - slice.tails + tail;
  }
  __device__ int column(int k) const { return k < K ? first + k * step : edge; }
  __device__ bool has(int k) const { return k == K || k * step < left; }
  __device__ bool has_edge() const { return !ALIGNED && edge >= 0; }

  // Calls f(part) for all K vectors, including those outside the slice, and for the edge.
  template <typename F>
  __device__ void for_each(F &&f) const {
#pragma unroll
    for (int k = 0; k < K; ++k) f(Part<N>{k});
    if constexpr (!ALIGNED) {
      if (has_edge()) f(Part<1>{K});
    }
  }
};

// The elements of a row that one thread owns, in registers. Vectors outside the slice are zeros.
template <typename T, int K, bool ALIGNED>
struct RowFragment {
  static constexpr int N = VECTOR<T>;
  Vector<T, N> bits[K];
  T edge;

  // Loads the elements. `row` points to the begin of the row.
  __device__ void load(const T *row, const RowWindow<T, K, ALIGNED> &window, uint64_t hint) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      bits[k] = load_hinted(row + window.column(k), window.has(k), hint);
    }
    if (!ALIGNED) edge = window.has_edge() ? row[window.edge] : from_acc<T>(0);
  }

  __device__ void unpack(float (&x)[N], int k) const { ::unpack<T, N>(x, bits[k]); }
  __device__ void unpack(float (&x)[1], int) const { x[0] = to_acc(edge); }
  __device__ void pack(const float (&x)[N], int k) { bits[k] = ::pack<T, N>(x); }
  __device__ void pack(const float (&x)[1], int) { edge = from_acc<T>(x[0]); }

  // Returns the first element that the thread owns, or 0 if it owns none.
  __device__ float first(const RowWindow<T, K, ALIGNED> &window) const {
    if (!ALIGNED && !window.has(0) && window.has_edge()) return to_acc(edge);
    float values[N];
    unpack(values, 0);
    return values[0];
  }

  // Calls f(values, column, k) for each vector k in the slice. If the thread has an edge, it also
  // calls f for the edge, with an array of one value.
  template <typename F>
  __device__ void for_each(const RowWindow<T, K, ALIGNED> &window, F &&f) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!window.has(k)) continue;
      float values[N];
      unpack(values, k);
      f(values, window.column(k), k);
    }
    if (window.has_edge()) {
      float value[1];
      unpack(value, K);
      f(value, window.edge, K);
    }
  }
};

// Stores `values` at `column`, both as RowFragment::for_each has passed them to its callback.
template <typename T, int M>
__device__ inline void store_at(T *row, int column, const float (&values)[M]) {
  if constexpr (M == 1) {
    row[column] = from_acc<T>(values[0]);
  } else {
    store<T, M>(row + column, values);
  }
}

// Marks the L2 lines of a CTA's slice of a row evict_normal. All threads that read the slice must
// call this function.
template <typename T, bool ALIGNED>
__device__ inline void release_row(const T *row, const RowSlice<T, ALIGNED> &slice) {
  release_lines(row + slice.begin, row + slice.end, threadIdx.x, blockDim.x);
}

// Prefetches a CTA's slice of a row into the L2. Only thread 0 issues the instruction.
template <typename T, bool ALIGNED>
__device__ inline void prefetch_slice(const T *row, const RowSlice<T, ALIGNED> &slice,
                                      uint64_t hint) {
  const int vectors = (slice.limit - slice.first) / VECTOR<T>;
  if (threadIdx.x > 0 || vectors <= 0) return;
  const auto from = reinterpret_cast<uintptr_t>(row + slice.first);
  prefetch_bulk(reinterpret_cast<const void *>(from / 16 * 16), 16 * vectors, hint);
}

// The parameters (weights or biases) of N columns, beginning with column c. `data` points to `cols`
// parameters and is aligned to 16 bytes. If `data` is NULL, every parameter is `missing`.
template <typename W, int N, bool ALIGNED>
struct ParameterVector {
  static constexpr int WORDS = N * sizeof(W) / 4, VECTORS = WORDS / 4;
  // If c is not aligned, parameters are loaded in words of 4 bytes. Parameters that fill two
  // vectors (float32 parameters of a half type) are instead loaded as the three aligned vectors
  // around them, because three loads are faster than eight.
  static constexpr bool HAS_THREE = !ALIGNED && VECTORS == 2;
  // The parameters as loaded. The first word (with HAS_THREE, the first vector of four words)
  // contains column c.
  uint32_t words[WORDS + (HAS_THREE ? 4 : 1)];
  int shift;  // position of column c in `words`, in bits (with HAS_THREE in words)

  __device__ void load(const W *data, int c, int cols, bool is_there, float missing) {
    uint32_t fill = 0;
    if (missing != 0) {
      W pair[4 / sizeof(W)];
#pragma unroll
      for (W &one : pair) one = from_acc<W>(missing);
      memcpy(&fill, pair, sizeof fill);
    }
    is_there = is_there && data != nullptr;
    if constexpr (ALIGNED) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        const uint4 four = load_hinted(data + c + i * VECTOR<W>, is_there, NO_HINT, fill);
        memcpy(words + 4 * i, &four, sizeof four);
      }
    } else if constexpr (HAS_THREE) {
      shift = c % 4;
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        const int at = c - shift + 4 * i;
        const bool is_whole = i < 2 || at + 4 <= cols;
        const uint4 four = load_hinted(data + at, is_there && is_whole, NO_HINT, fill);
        memcpy(words + 4 * i, &four, sizeof four);
        if (!is_there || is_whole) continue;
#pragma unroll
        for (int j = 0; j < 3; ++j) words[4 * i + j] = __float_as_uint(data[min(at + j, cols - 1)]);
      }
    } else {
      // With 16-bit parameters the last one is loaded alone, because a word may exceed the array.
      const int odd = sizeof(W) == 2 ? c & 1 : 0;
      shift = odd * 16;
      const uint32_t *const from = reinterpret_cast<const uint32_t *>(data + (c - odd));
#pragma unroll
      for (int i = 0; i < WORDS; ++i) words[i] = is_there ? from[i] : fill;
      words[WORDS] = fill;
      if (sizeof(W) == 2 && is_there) {
        words[WORDS] = reinterpret_cast<const uint16_t *>(data)[c + N - 1];
      }
    }
  }

  __device__ void unpack(float (&w)[N]) const {
    uint32_t shifted[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const bool is_shifted = !ALIGNED && sizeof(W) == 2;
      shifted[i] = is_shifted ? __funnelshift_r(words[i], words[i + 1], shift) : words[i];
    }
    if constexpr (HAS_THREE) {  // shifts by two words, then by one
      uint32_t by_two[WORDS + 1];
#pragma unroll
      for (int i = 0; i <= WORDS; ++i) by_two[i] = shift & 2 ? words[i + 2] : words[i];
#pragma unroll
      for (int i = 0; i < WORDS; ++i) shifted[i] = shift & 1 ? by_two[i + 1] : by_two[i];
    }
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      Vector<W, VECTOR<W>> vector;
      memcpy(&vector, shifted + 4 * i, sizeof vector);
      ::unpack<W, VECTOR<W>>(reinterpret_cast<float(&)[VECTOR<W>]>(w[i * VECTOR<W>]), vector);
    }
  }
};

// Returns the weight or bias of column c, or `missing` if there is none.
template <typename W>
__device__ inline float load_parameter(const void *data, int64_t c, float missing) {
  return data == nullptr ? missing : to_acc(static_cast<const W *>(data)[c]);
}

// The common start of kernels that hold rows in registers: the row of this thread, the elements
// that it owns, and the sums over the row. Threads without a row still take part in the sums.
template <typename T, int K, bool ALIGNED>
struct RowOpening {
  using Sum = RowSum<float, 4>;
  using Shared = typename Sum::Shared;
  const int rank;  // number of this CTA in the cluster of its row
  const int64_t row;
  const bool is_row;
  const Sum sum;
  const RowSlice<T, ALIGNED> slice;
  const RowWindow<T, K, ALIGNED> window;

  template <typename Params>
  __device__ RowOpening(const Params &p, Shared &shared)
      : rank(p.cluster > 1 ? cluster_rank() : 0),
        row(static_cast<int64_t>(blockIdx.x / p.cluster) * blockDim.y + threadIdx.y),
        is_row(row < p.rows),
        sum(shared, p.cluster, rank),
        slice(p.cols, row, p.slice, rank),
        window(slice) {}
};

}  // namespace rows

#endif
