// weight and bias, as the norms' kernels read them: a thread's columns of them, which in rows of odd width begin anywhere.
#ifndef EXTENSION_CPP_NORM_WEIGHTS_CUH
#define EXTENSION_CPP_NORM_WEIGHTS_CUH

#include "norm/norm_rows.cuh"

namespace norm_cuda {

struct Weights {
  const void *data;  // NULL: `missing` everywhere
  float missing;
  bool is_float;

  // Whether they are there, and of x's own type.
  __host__ __device__ bool is_own() const { return data != nullptr && !is_float; }

  // N of them from column c on; ALIGNED: vectors begin at multiples of 16 bytes.
  template <typename T, int N, bool ALIGNED = true>
  __device__ void load(float (&w)[N], int c) const {
    if (data == nullptr) {
#pragma unroll
      for (int j = 0; j < N; ++j) w[j] = missing;
    } else if (is_float) {
      load_as<float, N, ALIGNED>(w, c);
    } else {
      load_as<T, N, ALIGNED>(w, c);
    }
  }

  template <typename W, int N, bool ALIGNED>
  __device__ void load_as(float (&w)[N], int c) const {
    constexpr int VECTOR_OF_W = 16 / sizeof(W), M = !ALIGNED          ? 1
                                                    : N < VECTOR_OF_W ? N
                                                                      : VECTOR_OF_W;
#pragma unroll
    for (int j = 0; j < N; j += M) {
      ::load<W, M>(reinterpret_cast<float(&)[M]>(w[j]), static_cast<const W *>(data) + c + j);
    }
  }
};

// The same vector, unknown to the compiler each time: what a loop over rows unpacks from it is then not unpacked once before the loop, to
// be kept in twice as many registers.
__device__ inline uint4 anew(uint4 v) {
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
  return v;
}

// This thread's part of weight or bias, which is there and of type W, as it lies in memory; zeros where it has no columns.
template <typename W, int TEAM, int K, int N>
struct Held {
  static constexpr int VECTORS = N * sizeof(W) / 16, M = N / VECTORS;
  uint4 bits[K][VECTORS];

  // NOW: at once, for other loads nvcc may put off until the weights are needed.
  template <bool NOW>
  __device__ void load(const Weights &weights, const Columns<TEAM, K, N, false> &columns) {
    const W *const data = static_cast<const W *>(weights.data);
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if constexpr (NOW) {
          bits[k][i] = load_cached(data + columns.column(k) + i * M, columns.has(k), USUAL);
        } else {
          bits[k][i] =
              columns.has(k) ? load_vector<W, M>(data + columns.column(k) + i * M) : uint4{};
        }
      }
    }
  }
  // Of vector k. ANEW: in a loop over rows.
  template <bool ANEW = false>
  __device__ void get(float (&w)[N], int k) const {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      unpack<W, M>(reinterpret_cast<float(&)[M]>(w[i * M]), ANEW ? anew(bits[k][i]) : bits[k][i]);
    }
  }
};

// Columns c to c + N - 1 of an aligned row, which begin anywhere.
template <typename T, int N>
__device__ inline Vector<T, N> load_shifted(const T *row, int c) {
  if constexpr (N == 8) {
    // The words that hold them, and where these begin half a word early, the last half word.
    const int odd = c % 2;
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(row + c - odd);
    const uint32_t w0 = words[0], w1 = words[1], w2 = words[2], w3 = words[3];
    const uint32_t last = reinterpret_cast<const uint16_t *>(row)[c + 7];
    return {__funnelshift_r(w0, w1, 16 * odd), __funnelshift_r(w1, w2, 16 * odd),
            __funnelshift_r(w2, w3, 16 * odd), __funnelshift_r(w3, last, 16 * odd)};
  } else {
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(row + c);
    return {words[0], words[1], words[2], words[3]};
  }
}

// The same of a row of float: the pairs that hold them, and where these begin one column early, the last column.
template <int N>
__device__ inline void load_pairs(float (&w)[N], const float *row, int c) {
  const int odd = c % 2;
  const float2 *const pairs = reinterpret_cast<const float2 *>(row + c - odd);
  float all[N + 1];
#pragma unroll
  for (int j = 0; j < N; j += 2) {
    const float2 pair = pairs[j / 2];
    all[j] = pair.x, all[j + 1] = pair.y;
  }
  all[N] = row[c + N - 1];
#pragma unroll
  for (int j = 0; j < N; ++j) w[j] = odd ? all[j + 1] : all[j];
}

// This thread's part of a row of weights, 0 where it has no columns.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void load_weights(float (&w)[K][N], float (&edge)[1], const Weights &weights,
                                    const Columns<TEAM, K, N, ODD> &columns) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    memset(w[k], 0, sizeof w[k]);
    if (columns.has(k)) weights.load<T, N, !ODD>(w[k], columns.column(k));
  }
  edge[0] = 0;
  if (columns.has_edge()) weights.load<T, 1>(edge, columns.edge);
}

// This thread's part of weight or bias, both there and of x's type, which its vectors stay in. ODD: any numbers where it has no columns,
// for with a branch around each vector, all of its words would come one by one.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void load_packed(Vector<T, N> (&w)[K], const Weights &weights,
                                   const Columns<TEAM, K, N, ODD> &columns) {
  const T *const data = static_cast<const T *>(weights.data);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if constexpr (ODD) {
      w[k] = load_shifted<T, N>(data, columns.clamped(k));
    } else {
      w[k] = {};
      if (columns.has(k)) w[k] = load_vector<T, N>(data + columns.column(k));
    }
  }
}

// Elements SHIFT to SHIFT + N - 1 of two neighbouring vectors.
template <typename T, int SHIFT>
__device__ inline uint4 elements_from(const uint4 &a, const uint4 &b) {
  constexpr int first = SHIFT * sizeof(T) / 4, bits = SHIFT * sizeof(T) % 4 * 8;
  const uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  return {__funnelshift_r(words[first], words[first + 1], bits),
          __funnelshift_r(words[first + 1], words[first + 2], bits),
          __funnelshift_r(words[first + 2], words[first + 3], bits),
          __funnelshift_r(words[first + 3], words[first + 4], bits)};
}

// The same as load_packed of ODD rows by whole vectors: a block's all begin alike, SHIFT or more elements behind a
// multiple of N. Faster where that is much of the work.
template <typename T, int SHIFT, int TEAM, int K, int N>
__device__ inline void load_moved(Vector<T, N> (&w)[K], const T *data,
                                  const Columns<TEAM, K, N, true> &columns, int cols) {
  if constexpr (SHIFT + 1 < N) {
    if (columns.first % N != SHIFT) return load_moved<T, SHIFT + 1>(w, data, columns, cols);
  }
  // Behind the weights nothing is read.
  const auto has_next = [&](int k) {
    return SHIFT > 0 && columns.clamped(k) - SHIFT + 2 * N <= cols;
  };
  Vector<T, N> next[K]{};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const T *const vector = data + columns.clamped(k) - SHIFT;
    w[k] = load_vector<T, N>(vector);
    if (has_next(k)) next[k] = load_vector<T, N>(vector + N);
  }
  if constexpr (SHIFT > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      w[k] = has_next(k) ? elements_from<T, SHIFT>(w[k], next[k])
                         : load_shifted<T, N>(data, columns.clamped(k));
    }
  }
}

}  // namespace norm_cuda

#endif
