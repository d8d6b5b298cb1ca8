// reduce_sum on the GPU, in three kernels. Every thread loads 16-byte vectors, with four to eight
// in flight. The thread adds the elements of a batch of vectors (at most 64 terms) in float, or in
// double for float64. All further sums are in double.
//
//   sum_spans      inner = 1: a part of a warp, a warp or a CTA sums a contiguous span. The aligned
//                  interior is read in vectors, head and tail elements one by one.
//   sum_few_rows   inner > 1, for many columns or very few rows: a thread owns a vector of columns
//                  and loops over the rows.
//   sum_many_rows  inner > 1: a CTA owns up to 512 bytes of columns. Its threads are laid out as
//                  (row groups, vectors). With G row groups, each thread loops over every G-th row.
//                  The sums of the row groups are then added up in shared memory.
//
// sum_many_rows reads aligned vectors for any width of a row. The rows of a thread are G apart, and
// G is a multiple of a vector's elements, so all rows of a thread have the same misalignment. The
// thread's vectors begin that many elements earlier, at aligned addresses. A tile therefore reads
// one vector more than its columns fill, and the neighbouring tile reads this vector again.
#include "common/cuda/reduce.cuh"
#include "common/cuda/vector.cuh"
#include "reduce_sum/reduce_sum.h"

namespace reduce_sum_kernels {

// Threads per CTA. sum_few_rows and sum_many_rows have __launch_bounds__(THREADS, 3), which limits
// their registers so that three CTAs fit on an SM. Each thread of these CTAs has four vectors in
// flight, which makes 48 KiB.
constexpr int LOG_THREADS = 8;
constexpr int THREADS = 1 << LOG_THREADS;
constexpr int LOG_TILE_VECTORS = 5;  // log2 of the vectors in 512 bytes of a row

template <typename T>
constexpr int LANES = 16 / sizeof(T);  // elements in a vector

// Loads the vector at p if `valid`, and returns zeros otherwise. The load instruction has a
// predicate, because nvcc compiles an if to a branch, with one load in flight instead of many.
template <typename T, int N>
__device__ inline Vector<T, N> load_if(bool valid, const T *p) {
  Vector<T, N> v;
  if constexpr (sizeof v == 16) {
    uint4 raw;
    asm("{\n\t"
        ".reg .pred valid;\n\t"
        "setp.ne.s32 valid, %5, 0;\n\t"
        "mov.b32 %0, 0;\n\t"
        "mov.b32 %1, 0;\n\t"
        "mov.b32 %2, 0;\n\t"
        "mov.b32 %3, 0;\n\t"
        "@valid ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n\t"
        "}"
        : "=&r"(raw.x), "=&r"(raw.y), "=&r"(raw.z), "=&r"(raw.w)
        : "l"(p), "r"(static_cast<int>(valid)));
    memcpy(&v, &raw, sizeof v);
  } else {
    memset(&v, 0, sizeof v);
    if (valid) v = *reinterpret_cast<const Vector<T, N> *>(p);
  }
  return v;
}

// Loads the vectors at p + j * stride for j < count, in batches of U, and calls add(sum) with the
// sums of each batch. While one batch is added, the next is in flight. With one batch at a time
// nvcc would mix additions with loads and wait for the first load.
template <typename T, int N, int U, typename Add>
__device__ inline void walk(const T *p, int64_t count, int64_t stride, Add &&add) {
  Vector<T, N> x[U], next[U];
#pragma unroll
  for (int u = 0; u < U; ++u) x[u] = load_if<T, N>(u < count, p + u * stride);
#pragma unroll 1
  for (; count > 0; count -= U) {
    p += U * stride;
    if (count >= 2 * U) {
#pragma unroll
      for (int u = 0; u < U; ++u) next[u] = load_vector<T, N>(p + u * stride);
    } else if (count > U) {
#pragma unroll
      for (int u = 0; u < U; ++u) next[u] = load_if<T, N>(U + u < count, p + u * stride);
    }
    acc_t<T> sum[N] = {0};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      acc_t<T> v[N];
      unpack<T, N>(v, x[u]);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] += v[k];
    }
    add(sum);
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = next[u];
  }
}

__device__ inline void store_sum(const reduce_sum_args &args, int64_t i, double sum) {
  switch (args.out_dtype) {
    case DTYPE_FLOAT64: static_cast<double *>(args.out)[i] = sum; break;
    case DTYPE_FLOAT32: static_cast<float *>(args.out)[i] = static_cast<float>(sum); break;
    case DTYPE_BFLOAT16:
      static_cast<__nv_bfloat16 *>(args.out)[i] = __float2bfloat16_rn(static_cast<float>(sum));
      break;
    case DTYPE_FLOAT16:
      static_cast<__half *>(args.out)[i] = __float2half_rn(static_cast<float>(sum));
      break;
  }
}

__host__ __device__ inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns a / b, in 32 bits if possible: a 64-bit division would double the time of a thread of
// sum_few_rows.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  if ((static_cast<uint64_t>(a | b) >> 32) == 0)
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

// The rows [begin, end) of chunk number oc = o * chunks + c, and `base`, the offset in x of the
// first row with outer index o.
struct Rows {
  int64_t begin, end, base;
};

__device__ inline Rows rows_of(const reduce_sum_args &args, int64_t oc) {
  int64_t o = oc, c = 0;
  if (args.chunks > 1) {
    o = quotient(oc, args.chunks);
    c = oc - o * args.chunks;
  }
  const int64_t begin = c * args.chunk;
  return {begin, smaller(begin + args.chunk, args.reduce), o * args.reduce * args.inner};
}

// ---- inner = 1 ----

// Returns this lane's partial sum of p[0 .. n). 2^log_width lanes read side by side.
template <typename T, int U>
__device__ inline double sum_span(const T *p, int64_t n, int lane, int log_width) {
  constexpr int N = LANES<T>;
  const int width = 1 << log_width;
  const int64_t head = smaller((16 - reinterpret_cast<uintptr_t>(p) % 16) % 16 / sizeof(T), n);
  const int64_t vectors = (n - head) / N, tail = head + vectors * N;
  // At each end of the span, at most N - 1 elements are outside of the aligned vectors, and there
  // are at least N lanes. They are loaded here and added last, so that nothing waits for them.
  const acc_t<T> first = lane < head ? to_acc(p[lane]) : acc_t<T>(0);
  const acc_t<T> last = tail + lane < n ? to_acc(p[tail + lane]) : acc_t<T>(0);
  double total = 0;
  const int64_t count = (vectors - lane + width - 1) >> log_width;
  walk<T, N, U>(p + head + lane * N, count, width * N, [&](acc_t<T>(&sum)[N]) {
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
    }
    total += sum[0];
  });
  return total + first + last;
}

// Each group of 2^log_width lanes sums one contiguous span. If WHOLE_BLOCK is set, the CTA is a
// single group.
template <typename T, int U, bool WHOLE_BLOCK>
__global__ void __launch_bounds__(THREADS) sum_spans(reduce_sum_args args, int log_width) {
  const int64_t spans = args.outer * args.chunks;
  const int groups = THREADS >> log_width, group = threadIdx.x >> log_width,
            lane = threadIdx.x & ((1 << log_width) - 1);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < spans;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t span = first + group;
    double sum[1] = {0};
    if (span < spans) {
      const Rows rows = rows_of(args, span);
      sum[0] = sum_span<T, U>(static_cast<const T *>(args.x) + rows.base + rows.begin,
                              rows.end - rows.begin, lane, log_width);
    }
    if constexpr (WHOLE_BLOCK)
      block_sum<THREADS>(sum);
    else
      group_sum(sum, 1 << log_width);
    if (lane == 0 && span < spans) store_sum(args, span, sum[0]);
  }
}

// ---- inner > 1: a thread sums N columns over a chunk's rows; N elements are aligned in every row
// ----

template <typename T, int N>
__device__ inline void store_sums(const reduce_sum_args &args, dtype_t dtype, int64_t i,
                                  const double (&total)[N]) {
  if (args.out_dtype != dtype) {
    for (int k = 0; k < N; ++k) store_sum(args, i + k, total[k]);
    return;
  }
  acc_t<T> sum[N];
#pragma unroll
  for (int k = 0; k < N; ++k) sum[k] = static_cast<acc_t<T>>(total[k]);
  store<T, N>(static_cast<T *>(args.out) + i, sum);
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 3) sum_few_rows(reduce_sum_args args) {
  const int64_t vectors = args.inner / N, items = args.outer * args.chunks * vectors;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; item < items;
       item += threads) {
    const int64_t oc = quotient(item, vectors), column = (item - oc * vectors) * N;
    const Rows rows = rows_of(args, oc);
    const T *p = static_cast<const T *>(args.x) + rows.base + rows.begin * args.inner + column;
    double total[N] = {0};
    walk<T, N, 4>(p, rows.end - rows.begin, args.inner, [&](acc_t<T>(&sum)[N]) {
#pragma unroll
      for (int k = 0; k < N; ++k) total[k] += sum[k];
    });
    store_sums<T, N>(args, args.dtype, oc * args.inner + column, total);
  }
}

// ---- inner > 1: a CTA sums a tile of columns ----

// Adds the sum of x[offset + j * stride + k] over j < count to total[k], for the indices inside x.
template <typename T>
__device__ inline void sum_column_vector(const reduce_sum_args &args, int64_t offset, int64_t count,
                                         int64_t stride, double (&total)[LANES<T>]) {
  constexpr int N = LANES<T>;
  const T *x = static_cast<const T *>(args.x);
  const int64_t numel = args.outer * args.reduce * args.inner;
  // The vectors of the first and last rows may begin before x or end after it. The elements of such
  // vectors are read one by one.
  const auto one_by_one = [&](int64_t begin) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (begin + k >= 0 && begin + k < numel) total[k] += to_acc(x[begin + k]);
    }
  };
  for (; count > 0 && offset < 0; --count, offset += stride) one_by_one(offset);
  for (; count > 0 && offset + (count - 1) * stride + N > numel; --count)
    one_by_one(offset + (count - 1) * stride);
  walk<T, N, 4>(x + offset, count, stride, [&](acc_t<T>(&sum)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) total[k] += sum[k];
  });
}

template <typename T>
__global__ void __launch_bounds__(THREADS, 3)
    sum_many_rows(reduce_sum_args args, int log_vectors, int64_t tile_columns) {
  constexpr int N = LANES<T>;
  __shared__ double fold[THREADS * N];  // (row groups, pitch)
  const int tile_vectors = 1 << log_vectors, pitch = tile_vectors * N,
            row_groups = THREADS >> log_vectors;
  const int vector = threadIdx.x & (tile_vectors - 1), row_group = threadIdx.x >> log_vectors;
  const int64_t tiles = quotient(args.inner + tile_columns - 1, tile_columns),
                items = args.outer * args.chunks * tiles;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t oc = quotient(item, tiles), tile_begin = (item - oc * tiles) * tile_columns;
    const int width = static_cast<int>(smaller(tile_columns, args.inner - tile_begin));
    const Rows rows = rows_of(args, oc);
    const int64_t row = rows.begin + row_group,
                  row_begin = rows.base + row * args.inner + tile_begin;
    const int shift = static_cast<int>(
        reinterpret_cast<uintptr_t>(static_cast<const T *>(args.x) + row_begin) % 16 / sizeof(T));
    const int column = vector * N - shift;  // column of the thread's first element in the tile
    const int64_t count = (rows.end - row + row_groups - 1) >> (LOG_THREADS - log_vectors);
    double total[N] = {0};
    if (column < width)
      sum_column_vector<T>(args, row_begin + column, count, row_groups * args.inner, total);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (column + k >= 0 && column + k < width) fold[row_group * pitch + column + k] = total[k];
    }
    for (int half = row_groups / 2; half > 0; half /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < half * pitch; i += THREADS) {
        if ((i & (pitch - 1)) < width) fold[i] += fold[i + half * pitch];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += THREADS)
      store_sum(args, oc * args.inner + tile_begin + i, fold[i]);
    __syncthreads();  // waits for all reads before the next item writes to `fold`
  }
}

// ---- launchers ----

// Returns the number of CTAs, at most 2^30. If more are needed, the kernels' loops do their work.
unsigned grid(int64_t blocks) { return static_cast<unsigned>(smaller(blocks, 1 << 30)); }

// Returns log2 of the smallest power of two that is at least n, but no more than `limit`.
int log_at_least(int64_t n, int limit) {
  int log = 0;
  while ((1 << log) < n && log < limit) ++log;
  return log;
}

template <typename T>
void launch_spans(const reduce_sum_args &args, cudaStream_t stream) {
  const int64_t spans = args.outer * args.chunks,
                vectors = ceil_div(smaller(args.chunk, args.reduce), LANES<T>);
  if (vectors > 2048 || (vectors > 128 && spans < 1024)) {
    sum_spans<T, 4, true><<<grid(spans), THREADS, 0, stream>>>(args, LOG_THREADS);
    return;
  }
  // Each lane of a group reads about sixteen vectors, because a span needs about two hundred
  // instructions besides its loads. A group has at least as many lanes as a vector has elements, as
  // sum_span() requires.
  const int log_lanes = log_at_least(LANES<T>, 5),
            log_wanted = log_at_least(ceil_div(vectors, 16), 5);
  const int log_width = log_wanted > log_lanes ? log_wanted : log_lanes;
  const unsigned blocks = grid(ceil_div(spans, THREADS >> log_width));
  if (vectors >> log_width > 2)
    sum_spans<T, 4, false><<<blocks, THREADS, 0, stream>>>(args, log_width);
  else
    sum_spans<T, 2, false><<<blocks, THREADS, 0, stream>>>(args, log_width);
}

template <typename T>
void launch_columns(const reduce_sum_args &args, cudaStream_t stream) {
  constexpr int N = LANES<T>;
  const int64_t spans = args.outer * args.chunks, rows = smaller(args.chunk, args.reduce),
                row_bytes = args.inner * sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && row_bytes % 16 == 0;
  const bool small_tiles = rows * smaller(row_bytes, 512) < 16 << 10;
  if (aligned && (small_tiles || spans * row_bytes >= 1 << 19)) {
    sum_few_rows<T, N>
        <<<grid(ceil_div(spans * args.inner / N, THREADS)), THREADS, 0, stream>>>(args);
    return;
  }
  if (small_tiles) {
    sum_few_rows<T, 1><<<grid(ceil_div(spans * args.inner, THREADS)), THREADS, 0, stream>>>(args);
    return;
  }
  const int shared = aligned ? 0 : 1;  // vectors that a tile shares with its neighbour
  const auto columns = [&](int log_vectors) {
    return static_cast<int64_t>((1 << log_vectors) - shared) * N;
  };
  int log_vectors = log_at_least(ceil_div(args.inner, N) + shared, LOG_TILE_VECTORS);
  // Fewer than 128 CTAs cannot use all the memory bandwidth, so tiles are made narrower. 64 bytes
  // of a row suffice for full speed.
  while (log_vectors > 2 && spans * ceil_div(args.inner, columns(log_vectors)) < 128) --log_vectors;
  const int64_t blocks = spans * ceil_div(args.inner, columns(log_vectors));
  sum_many_rows<T><<<grid(blocks), THREADS, 0, stream>>>(args, log_vectors, columns(log_vectors));
}

extern "C" int reduce_sum_cuda(const reduce_sum_args *args, void *stream) {
  return with_dtype(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args->inner == 1)
      launch_spans<T>(*args, static_cast<cudaStream_t>(stream));
    else
      launch_columns<T>(*args, static_cast<cudaStream_t>(stream));
    return cudaGetLastError();
  });
}

}  // namespace reduce_sum_kernels
