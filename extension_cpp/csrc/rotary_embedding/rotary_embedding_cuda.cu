// rotary_embedding on the GPU. One launch processes q and k, whose heads form one list.
//
// A thread rotates two vectors of N elements with each other, at the same columns of one token, in
// up to HEADS heads. It loads cos and sin once for all heads, and all its vectors of x are in
// flight before it uses the first. Threads are numbered in q's memory order: first the vectors of a
// row, then `tile` tokens of a head, then the heads, then the tiles. If the heads of a token are
// neighbours in memory, a tile is one token. Elements that are not rotated are copied by further
// threads of the same rows, two vectors each.
#include "common/cuda/vector.cuh"
#include "common/range.h"
#include "rotary_embedding/rotary_embedding.h"

namespace rotary_embedding_kernels {

constexpr int THREADS = 128;
constexpr int HEADS = 4;
constexpr int TILE_THREADS = 64;  // minimum per tile and head, in neighbouring memory

struct Problem {
  rotary_embedding_args args;
  int64_t threads;
  uint32_t heads;     // number of heads of q and k together
  uint32_t groups;    // groups of heads; group g has heads g, g + groups, and so on
  uint32_t pairs;     // number of vector pairs in the rotated part of a row
  uint32_t places;    // number of threads per row: one per pair, and one per two vectors to copy
  uint32_t tile;      // number of tokens per tile
  uint32_t tiles;     // number of tiles per batch element
  uint32_t per_tile;  // number of threads per tile
};

// The work of a thread. The thread's second vector is `apart` elements after its first vector.
struct Work {
  int64_t batch, token, column, apart;
  uint32_t group;
  bool is_copy;
};

template <int N>
__device__ inline bool find_work(const Problem &p, Work &work) {
  const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (thread >= static_cast<uint64_t>(p.threads)) return false;
  uint64_t outer, batch;
  uint32_t inner, tile;
  // Divides in 32 bits if possible. A 64-bit division takes as long as the rest of a thread.
  if (p.threads <= UINT32_MAX) {
    outer = static_cast<uint32_t>(thread) / p.per_tile;
    inner = static_cast<uint32_t>(thread) % p.per_tile;
    batch = static_cast<uint32_t>(outer) / p.tiles;
    tile = static_cast<uint32_t>(outer) % p.tiles;
  } else {
    outer = thread / p.per_tile;
    inner = static_cast<uint32_t>(thread % p.per_tile);
    batch = outer / p.tiles;
    tile = static_cast<uint32_t>(outer % p.tiles);
  }
  const uint32_t row = inner / p.places, place = inner % p.places;
  work.batch = static_cast<int64_t>(batch);
  work.token = static_cast<int64_t>(tile) * p.tile + row % p.tile;
  work.group = row / p.tile;
  work.is_copy = place >= p.pairs;
  if (work.is_copy) {
    work.column = p.args.rotated + static_cast<int64_t>(place - p.pairs) * (2 * N);
    work.apart = work.column + N < p.args.cols ? N : 0;  // 0: the last vector is copied twice
  } else {
    const bool are_neighbours = N == 1 && p.args.interleaved;
    work.column = static_cast<int64_t>(place) * (are_neighbours ? 2 : N);
    work.apart = are_neighbours ? 1 : p.args.rotated / 2;
  }
  return work.token < p.args.tokens;
}

// The factors of a thread's two vectors. After sign_factors, element k of vector v becomes
// cos[v][k] times itself plus sin[v][k] times the other element of its pair. The elements of a pair
// are element k of both vectors, or two neighbours in one vector.
template <typename A, int N>
struct Factors {
  A cos[2][N], sin[2][N];
};

template <typename A, typename C, int N>
__device__ inline void load_factors(A (&x)[N], const C *p) {
  constexpr int PART = sizeof(C) * N > 16 ? 16 / sizeof(C) : N;
#pragma unroll
  for (int i = 0; i < N; i += PART) {
    acc_t<C> part[PART];
    load<C, PART>(part, p + i);
#pragma unroll
    for (int k = 0; k < PART; ++k) x[i + k] = part[k];
  }
}

template <typename C, typename A, int N>
__device__ inline void load_factors(Factors<A, N> &f, const rotary_embedding_args &args,
                                    const Work &work) {
  const C *const cos = static_cast<const C *>(args.cos) + work.batch * args.cos_batch_stride +
                       work.token * args.cos_token_stride + work.column;
  const C *const sin = static_cast<const C *>(args.sin) + work.batch * args.sin_batch_stride +
                       work.token * args.sin_token_stride + work.column;
  load_factors<A, C, N>(f.cos[0], cos);
  load_factors<A, C, N>(f.cos[1], cos + work.apart);
  load_factors<A, C, N>(f.sin[0], sin);
  load_factors<A, C, N>(f.sin[1], sin + work.apart);
}

// Replaces sin[v][k] by the signed factor of the other element of the pair.
template <typename A, int N>
__device__ inline void sign_factors(Factors<A, N> &f, bool are_neighbours, bool transposed) {
  const A sign = transposed ? A(-1) : A(1);
  if (N > 1 && are_neighbours) {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int k = 0; k + 1 < N; k += 2) {
        const A a = f.sin[v][k], b = f.sin[v][k + 1];
        f.sin[v][k] = -sign * (transposed ? b : a);
        f.sin[v][k + 1] = sign * (transposed ? a : b);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const A a = f.sin[0][k], b = f.sin[1][k];
      f.sin[0][k] = -sign * (transposed ? b : a);
      f.sin[1][k] = sign * (transposed ? a : b);
    }
  }
}

template <typename T, int N>
__device__ inline void rotate(Vector<T, N> &first, Vector<T, N> &second,
                              const Factors<acc_t<T>, N> &f, bool are_neighbours) {
  acc_t<T> a[N], b[N], y[2][N];
  unpack<T, N>(a, first);
  unpack<T, N>(b, second);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    const int other = N > 1 ? k ^ 1 : k;
    y[0][k] = fma(f.cos[0][k], a[k], f.sin[0][k] * (N > 1 && are_neighbours ? a[other] : b[k]));
    y[1][k] = fma(f.cos[1][k], b[k], f.sin[1][k] * (N > 1 && are_neighbours ? b[other] : a[k]));
  }
  first = pack<T, N>(y[0]);
  second = pack<T, N>(y[1]);
}

// The rows of a thread's token, indexed by head. The heads of q come before those of k.
template <typename T>
struct Rows {
  T *q, *k;
  int64_t q_stride, k_stride;  // strides between heads
  uint32_t q_heads;

  __device__ T *operator[](uint32_t head) const {
    const bool is_q = head < q_heads;
    return (is_q ? q : k) + (is_q ? head : head - q_heads) * (is_q ? q_stride : k_stride);
  }
};

template <typename T>
__device__ inline T *row_of(T *p, const rotary_strides &strides, const Work &work) {
  return p + work.batch * strides.batch + work.token * strides.token + work.column;
}

template <typename T>
__device__ inline Rows<const T> x_rows(const rotary_tensor &q, const rotary_tensor &k,
                                       const Work &work) {
  return {row_of(static_cast<const T *>(q.x), q.x_strides, work),
          row_of(static_cast<const T *>(k.x), k.x_strides, work), q.x_strides.head,
          k.x_strides.head, static_cast<uint32_t>(q.heads)};
}

template <typename T>
__device__ inline Rows<T> y_rows(const rotary_tensor &q, const rotary_tensor &k, const Work &work) {
  return {row_of(static_cast<T *>(q.y), q.y_strides, work),
          row_of(static_cast<T *>(k.y), k.y_strides, work), q.y_strides.head, k.y_strides.head,
          static_cast<uint32_t>(q.heads)};
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS) kernel(const __grid_constant__ Problem p) {
  const rotary_embedding_args &args = p.args;
  Work work;
  if (!find_work<N>(p, work)) return;
  const Rows<const T> x = x_rows<T>(args.tensors[0], args.tensors[1], work);
  Vector<T, N> first[HEADS], second[HEADS];
  // A thread may have fewer than HEADS heads. It then loads the last head again, because with a
  // branch around each load, nvcc would not issue the loads back to back.
#pragma unroll
  for (int u = 0; u < HEADS; ++u) {
    const T *const row = x[min(work.group + u * p.groups, p.heads - 1)];
    first[u] = load_vector<T, N>(row);
    second[u] = load_vector<T, N>(row + work.apart);
  }
  Factors<acc_t<T>, N> f;
  if (!work.is_copy) {
    if (sizeof(T) == 2 && args.wide_factors)
      load_factors<float>(f, args, work);
    else
      load_factors<T>(f, args, work);
    sign_factors(f, args.interleaved, args.transposed);
  }
  const Rows<T> y = y_rows<T>(args.tensors[0], args.tensors[1], work);
#pragma unroll
  for (int u = 0; u < HEADS; ++u) {
    const uint32_t head = work.group + u * p.groups;
    if (head >= p.heads) return;
    if (!work.is_copy) rotate<T, N>(first[u], second[u], f, args.interleaved);
    T *const row = y[head];
    __stwb(reinterpret_cast<Vector<T, N> *>(row), first[u]);
    __stwb(reinterpret_cast<Vector<T, N> *>(row + work.apart), second[u]);
  }
}

// ---- host ----

// Returns whether all vectors of N elements begin at multiples of their size.
template <typename T, int N>
bool fits(const rotary_embedding_args &args) {
  const auto is_aligned = [](const void *p, size_t size) {
    return reinterpret_cast<uintptr_t>(p) % (size * N < 16 ? size * N : 16) == 0;
  };
  const auto are_multiples = [](const rotary_strides &s) {
    return s.batch % N == 0 && s.head % N == 0 && s.token % N == 0;
  };
  const size_t factor_size = args.wide_factors ? sizeof(float) : sizeof(T);
  bool fit = args.rotated / 2 % N == 0 && args.cols % N == 0;
  fit = fit && is_aligned(args.cos, factor_size) && is_aligned(args.sin, factor_size);
  for (const int64_t stride : {args.cos_batch_stride, args.cos_token_stride, args.sin_batch_stride,
                               args.sin_token_stride}) {
    fit = fit && stride % N == 0;
  }
  for (const rotary_tensor &tensor : args.tensors) {
    fit = fit && is_aligned(tensor.x, sizeof(T)) && is_aligned(tensor.y, sizeof(T));
    fit = fit && are_multiples(tensor.x_strides) && are_multiples(tensor.y_strides);
  }
  return fit;
}

template <int N>
Problem problem_of(const rotary_embedding_args &args) {
  const rotary_tensor &q = args.tensors[args.tensors[0].heads > 0 ? 0 : 1];
  const int64_t heads = args.tensors[0].heads + args.tensors[1].heads,
                groups = ceil_div(heads, HEADS), pairs = args.rotated / 2 / N,
                places = pairs + ceil_div(args.cols - args.rotated, 2 * N);
  const bool heads_inside = q.heads > 1 && q.y_strides.head < q.y_strides.token;
  const int64_t least = ceil_div(TILE_THREADS, places), tile = heads_inside          ? 1
                                                               : least < args.tokens ? least
                                                                                     : args.tokens;
  const int64_t tiles = ceil_div(args.tokens, tile);
  Problem p{};
  p.args = args;
  p.threads = args.batch * tiles * groups * tile * places;
  p.heads = static_cast<uint32_t>(heads);
  p.groups = static_cast<uint32_t>(groups);
  p.pairs = static_cast<uint32_t>(pairs);
  p.places = static_cast<uint32_t>(places);
  p.tile = static_cast<uint32_t>(tile);
  p.tiles = static_cast<uint32_t>(tiles);
  p.per_tile = static_cast<uint32_t>(groups * tile * places);
  return p;
}

template <typename T, int N>
cudaError_t launch(const rotary_embedding_args &args, cudaStream_t stream) {
  if constexpr (N > 1) {
    if (!fits<T, N>(args)) return launch<T, N / 2>(args, stream);
  }
  const Problem p = problem_of<N>(args);
  kernel<T, N><<<static_cast<unsigned>(ceil_div(p.threads, THREADS)), THREADS, 0, stream>>>(p);
  return cudaGetLastError();
}

extern "C" int rotary_embedding_cuda(const rotary_embedding_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return launch<T, 16 / sizeof(T)>(*args, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace rotary_embedding_kernels
