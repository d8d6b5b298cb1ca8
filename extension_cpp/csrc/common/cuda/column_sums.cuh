// Backward kernel of ops with a bias over the last dimension. One pass over x and grad_out, each of
// shape (rows, cols), writes grad_x and sums over the rows into grad_bias (cols).
//
// A thread owns the columns of one 16-byte vector, or a single column (width_of). It strides over
// the rows of its CTA, with LOADS rows in flight, and keeps the bias and the sums of its columns in
// registers. The CTA then adds the sums of its thread rows (threads with the same threadIdx.y) and
// writes one row of partial sums. A second kernel adds these partial rows in order. No atomics are
// used.
//
// Unaligned rows. With vectors of N elements, row r begins (phase + r * cols) % N elements after an
// aligned address. The rows of a thread are a multiple of N apart, so their offset is the same. A
// thread's columns are therefore fixed and its accesses are aligned, for any number of columns. A
// vector that straddles the end of a row is loaded whole and stored element by element.
#ifndef EXTENSION_CPP_CUDA_COLUMN_SUMS_CUH
#define EXTENSION_CPP_CUDA_COLUMN_SUMS_CUH

#include "common/column_sums.h"
#include "common/cuda/vector.cuh"

namespace column_sums {

template <typename T, typename F>
struct Problem {
  const T *x;
  const T *bias;
  const T *grad_out;
  T *grad_x;          // may be NULL
  acc_t<T> *partial;  // (row blocks, tiles, halo + columns of a tile); may be NULL
  F f;
  int64_t rows;
  int64_t cols;
  int64_t tiles;  // CTAs per row
  int64_t share;  // rows per CTA (one row block)
  int phase;      // elements from an aligned address to x[0]; the same for grad_out and grad_x
  // columns by which a row's vectors may begin before its tile: N - 1 if rows are unaligned, else 0
  int halo;
};

constexpr int THREADS = 256;
constexpr int LOADS = 2;
constexpr int BLOCKS_PER_SM = 4;
// The number of CTAs that run at once on the 132 SMs of an H100. WAVE is a constant, so that the
// sums do not depend on the GPU.
constexpr int WAVE = 132 * BLOCKS_PER_SM;

// Returns the number of row blocks, each of at least 64 rows, for at most eight waves of CTAs. The
// number is the smallest that leaves the fewest idle CTAs in the last wave; a difference of less
// than 2 % does not count.
inline int64_t row_blocks(int64_t rows, int64_t tiles) {
  const int64_t most = ceil_div(rows, 64);
  int64_t best = most < 1 ? most : 1;
  for (int64_t blocks = 1; blocks <= most && blocks * tiles <= 8 * WAVE; ++blocks) {
    const auto waste = [&](int64_t n) {
      return double(ceil_div(n * tiles, WAVE) * WAVE) / double(n * tiles);
    };
    if (waste(blocks) < 0.98 * waste(best)) best = blocks;
  }
  return best;
}

// The division of a matrix into tiles of threads_x vectors of n columns, and into blocks of rows.
struct Geometry {
  int threads_x;
  int threads_y;
  int halo;
  int64_t tiles;
  int64_t row_blocks;
};

constexpr int MAX_THREADS_X = 32;
constexpr int MAX_THREADS_Y = 64;
// threads_y is a multiple of this number, and therefore of every vector width n. All rows of a
// thread therefore have the same phase.
constexpr int MIN_THREADS_Y = 8;

inline Geometry geometry(int64_t rows, int64_t cols, int n, int phase) {
  Geometry g;
  g.halo = phase == 0 && cols % n == 0 ? 0 : n - 1;
  const int64_t vectors = ceil_div(cols + g.halo, n);
  g.threads_x = static_cast<int>(vectors < MAX_THREADS_X ? vectors : MAX_THREADS_X);
  g.tiles = ceil_div(vectors, g.threads_x);
  g.threads_y = MAX_THREADS_Y;
  while (g.threads_y > MIN_THREADS_Y && g.threads_y * g.threads_x > THREADS) g.threads_y /= 2;
  g.row_blocks = row_blocks(rows, g.tiles);
  return g;
}

// Processes one vector of a row. Its first element has column c and flat index i. If the vector
// straddles the end of the row, only elements in the row are written. (Sums for columns outside the
// row are never read.)
template <typename T, int N, typename F>
__device__ inline void one_vector(const Problem<T, F> &p, int64_t i, int64_t c,
                                  const Vector<T, N> &x_raw, const Vector<T, N> &g_raw,
                                  const acc_t<T> (&bias)[N], acc_t<T> (&sum)[N]) {
  acc_t<T> x[N], g[N];
  unpack<T, N>(x, x_raw);
  unpack<T, N>(g, g_raw);
#pragma unroll
  for (int k = 0; k < N; ++k) x[k] = p.f(x[k], g[k], bias[k], sum[k]);
  if (p.grad_x == nullptr) return;
  if (c >= 0 && c + N <= p.cols) {
    store<T, N>(p.grad_x + i, x);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (c + k >= 0 && c + k < p.cols) p.grad_x[i + k] = from_acc<T>(x[k]);
    }
  }
}

// Does the same as one_vector element by element. Vectors that extend past the tensor, before its
// first row or after its last, need it, because they must not be loaded whole.
template <typename T, int N, typename F>
__device__ inline void one_edge(const Problem<T, F> &p, int64_t i, int64_t c,
                                const acc_t<T> (&bias)[N], acc_t<T> (&sum)[N]) {
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (c + k < 0 || c + k >= p.cols) continue;
    const acc_t<T> value = p.f(to_acc(p.x[i + k]), to_acc(p.grad_out[i + k]), bias[k], sum[k]);
    if (p.grad_x != nullptr) p.grad_x[i + k] = from_acc<T>(value);
  }
}

// Processes LOADS rows of this thread, starting at row r and `step` rows apart. All rows are loaded
// before the first is used. The loads have no conditions, because nvcc would compile them to
// branches and keep one load in flight instead of LOADS.
template <typename T, int N, int LOADS, typename F>
__device__ inline void some_rows(const Problem<T, F> &p, int64_t r, int step, int64_t c,
                                 const acc_t<T> (&bias)[N], acc_t<T> (&sum)[N]) {
  Vector<T, N> x[LOADS], g[LOADS];
#pragma unroll
  for (int u = 0; u < LOADS; ++u) {
    const int64_t i = (r + u * step) * p.cols + c;
    x[u] = load_vector<T, N>(p.x + i);
    g[u] = load_vector<T, N>(p.grad_out + i);
  }
#pragma unroll
  for (int u = 0; u < LOADS; ++u) {
    one_vector<T, N>(p, (r + u * step) * p.cols + c, c, x[u], g[u], bias, sum);
  }
}

// Adds the sums of the CTA's thread rows in order, and writes them to `partial` (row blocks, tiles,
// halo + width). The first sum of a tile belongs to column tile * width - halo. The columns of
// thread row y begin shifts[y] columns before tile * width.
template <typename T, int N, typename F>
__device__ inline void write_partial(const Problem<T, F> &p, int shift, const acc_t<T> (&sum)[N]) {
  __shared__ acc_t<T> fold[THREADS * N];
  __shared__ int shifts[MAX_THREADS_Y];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, width = blockDim.x * N;
#pragma unroll
  for (int k = 0; k < N; ++k) fold[k * THREADS + thread] = sum[k];
  if (threadIdx.x == 0) shifts[threadIdx.y] = shift;
  __syncthreads();
  for (int j = thread; j < p.halo + width; j += blockDim.x * blockDim.y) {
    acc_t<T> total = 0;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) {
      const int offset = j - p.halo + shifts[y];
      if (offset >= 0 && offset < width)
        total += fold[offset % N * THREADS + y * blockDim.x + offset / N];
    }
    p.partial[static_cast<int64_t>(blockIdx.x) * (p.halo + width) + j] = total;
  }
}

template <typename T, int N, typename F>
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) backward_kernel(Problem<T, F> p) {
  const int step = blockDim.y;
  const int64_t tile = blockIdx.x % p.tiles, first = blockIdx.x / p.tiles * p.share;
  const int64_t last = first + p.share < p.rows ? first + p.share : p.rows;
  int64_t r = first + threadIdx.y;
  const int shift = static_cast<int>((p.phase + r * p.cols) % N);
  const int64_t c = (tile * blockDim.x + threadIdx.x) * N - shift;
  acc_t<T> sum[N] = {};
  if (c + N > 0 && c < p.cols) {
    acc_t<T> bias[N];
#pragma unroll
    for (int k = 0; k < N; ++k)
      bias[k] = c + k >= 0 && c + k < p.cols ? to_acc(p.bias[c + k]) : acc_t<T>(0);
    // If this thread's vector in row 0 begins before the tensor, it is processed element by
    // element. The last row is treated in the same way below if its vector ends after the tensor.
    if (c < 0 && r == 0) {
      one_edge<T, N>(p, c, c, bias, sum);
      r += step;
    }
    const int64_t end = c + N > p.cols && last == p.rows ? last - 1 : last;
    for (; r + (LOADS - 1) * step < end; r += LOADS * step)
      some_rows<T, N, LOADS>(p, r, step, c, bias, sum);
    for (; r < end; r += step) some_rows<T, N, 1>(p, r, step, c, bias, sum);
    if (r == end && end < last) one_edge<T, N>(p, r * p.cols + c, c, bias, sum);
  }
  if (p.partial != nullptr) write_partial<T, N>(p, shift, sum);
}

// Computes grad_bias[c], the sum of column c's partial sums. There is one partial sum per row
// block, or two if the halo of the next tile also contains the column. Eight threads each sum every
// eighth row block, and their sums are added in order.
template <typename T>
__global__ void __launch_bounds__(THREADS)
    grad_bias_kernel(const acc_t<T> *partial, T *grad_bias, int64_t row_blocks, int64_t cols,
                     int64_t tiles, int width, int halo) {
  __shared__ double fold[8][32];
  const int64_t c = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
  const int64_t tile = c / width, pitch = width + halo, block_pitch = tiles * pitch;
  const int64_t place = tile * pitch + halo + c % width;
  const bool twice = c % width >= width - halo && tile + 1 < tiles;
  double sum = 0;
  if (c < cols) {
#pragma unroll 4
    for (int64_t row = threadIdx.y; row < row_blocks; row += 8)
      sum += partial[row * block_pitch + place];
    for (int64_t row = threadIdx.y; twice && row < row_blocks; row += 8)
      sum += partial[row * block_pitch + place + halo];
  }
  fold[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && c < cols) {
    for (int y = 1; y < 8; ++y) sum += fold[y][threadIdx.x];
    grad_bias[c] = from_acc<T>(static_cast<acc_t<T>>(sum));
  }
}

// Returns the offset of p from an aligned vector of `width` elements, in elements of `size` bytes.
inline int phase_of(const void *p, int size, int width) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) / size % width);
}

// Returns the number of elements in a vector. The number is `widest` if a row has at least so many
// elements and all tensors have the same phase, and 1 otherwise.
inline int width_of(const void *x, const void *grad_out, const void *grad_x, int size, int widest,
                    int64_t cols) {
  const auto has_phase_of_x = [&](const void *p) {
    return p == nullptr || phase_of(p, size, widest) == phase_of(x, size, widest);
  };
  return has_phase_of_x(grad_out) && has_phase_of_x(grad_x) && cols >= widest ? widest : 1;
}

template <typename T, typename F>
cudaError_t backward(Problem<T, F> p, T *grad_bias, cudaStream_t stream) {
  // float64 has only a kernel for single elements.
  constexpr int WIDEST = sizeof(T) == 8 ? 1 : 16 / sizeof(T);
  const int width = width_of(p.x, p.grad_out, p.grad_x, sizeof(T), WIDEST, p.cols);
  p.phase = phase_of(p.x, sizeof(T), width);
  const Geometry g = geometry(p.rows, p.cols, width, p.phase);
  p.tiles = g.tiles;
  p.halo = g.halo;
  if (g.row_blocks > 0) {
    p.share = ceil_div(p.rows, g.row_blocks);
    const auto ctas = static_cast<unsigned>(g.tiles * g.row_blocks);
    const auto kernel = width == 1 ? backward_kernel<T, 1, F> : backward_kernel<T, WIDEST, F>;
    kernel<<<ctas, dim3(g.threads_x, g.threads_y), 0, stream>>>(p);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  if (grad_bias == nullptr) return cudaSuccess;
  const unsigned blocks = static_cast<unsigned>(ceil_div(p.cols, 32));
  grad_bias_kernel<T><<<blocks, dim3(32, 8), 0, stream>>>(
      p.partial, grad_bias, g.row_blocks, p.cols, g.tiles, g.threads_x * width, g.halo);
  return cudaGetLastError();
}

// Launches the kernels. f(x, grad_out, bias, sum) adds its term to the sum of the column and
// returns the element of grad_x. grad_x may be NULL. grad_bias may be NULL together with partial,
// which has room for column_sums_partial_cuda() doubles.
template <typename T, typename F>
cudaError_t launch(const void *x, const void *bias, const void *grad_out, void *grad_x,
                   void *grad_bias, double *partial, F f, int64_t rows, int64_t cols,
                   void *stream) {
  Problem<T, F> p{};
  p.x = static_cast<const T *>(x);
  p.bias = static_cast<const T *>(bias);
  p.grad_out = static_cast<const T *>(grad_out);
  p.grad_x = static_cast<T *>(grad_x);
  p.partial = reinterpret_cast<acc_t<T> *>(partial);
  p.f = f;
  p.rows = rows;
  p.cols = cols;
  return backward(p, static_cast<T *>(grad_bias), static_cast<cudaStream_t>(stream));
}

}  // namespace column_sums

#endif
