// The gradients of layer_norm and rms_norm for few rows, in one kernel of two kinds of blocks, of which neither waits for the other.
//
// Row blocks: a team a row, in registers, straight from memory. They write grad_x (and grad_dropped).
// Column blocks: X vectors of columns over all rows. They read x and grad_out a second time, which the cache serves, take xhat
// from the saved mean and rstd, and write grad_weight and grad_bias. A block has X threads for a row and BLOCK / X rows at a
// time, of which each thread asks for U before it adds the first. The threads' sums are added within the warps and then, in
// shared memory, over them, in an order that the shape alone fixes. Column blocks come first, for they take longest.
//
// What that saves is the second kernel that adds up the sums of many rows. Row blocks alone serve any number of rows whose grad_x is
// all that is wanted.
#ifndef EXTENSION_CPP_NORM_BACKWARD_FEW_CUH
#define EXTENSION_CPP_NORM_BACKWARD_FEW_CUH

#include "norm/norm_backward.cuh"
#include "norm/norm_launch.cuh"

namespace norm_cuda {

// Threads a block; in row blocks, threads a row and elements a thread; in column blocks, vectors, and rows a thread asks for at
// once; and the threads of a multiprocessor, which limit the registers: with too few of them for U rows the compiler asks for one
// after another.
template <int BLOCK_, int TEAM_, int ELEMENTS_, int X_, int U_, int RESIDENT_ = 1024>
struct FewShape {
  static constexpr int BLOCK = BLOCK_, TEAM = TEAM_, ELEMENTS = ELEMENTS_, X = X_, U = U_,
                       RESIDENT = RESIDENT_;
  static constexpr int WIDEST = TEAM * ELEMENTS, TEAMS = BLOCK / TEAM, Y = BLOCK / X;
  static_assert(BLOCK % TEAM == 0 && TEAM >= 32 && 32 % X == 0);
};

template <typename T>
struct FewBackward : BackwardTensors<T> {
  void *grad_weight;  // of float if weight.is_float, else of x's type; NULL: not wanted
  void *grad_bias;    // likewise
  int column_blocks;
};

// grad_x of the rows of block number `block` of the row blocks.
template <typename T, bool CENTERED, Fused FUSED, typename S>
__device__ inline void few_rows(const FewBackward<T> &p, int64_t block) {
  constexpr int N = VECTOR<T>, TEAM = S::TEAM, K = S::ELEMENTS / N, COUNT = CENTERED ? 2 : 1;
  __shared__ float shared[S::BLOCK / 32][COUNT];
  const int64_t row = block * S::TEAMS + threadIdx.x / TEAM;
  const bool is_row = row < p.rows;  // all lanes of a warp go on: they sum together
  const bool wants_dropped = FUSED == ADDED && p.grad_dropped != nullptr;
  const Columns<TEAM, K, N, false> columns(p, row, threadIdx.x % TEAM, 0);
  Part<T, TEAM, K, N, false> x{}, grad_out{}, packed{}, grad_sum{};
  Mask<TEAM, K, N, false> mask{};
  Statistics s{};
  const int64_t seed = FUSED == DROPPED || wants_dropped ? seed_of(p.dropout) : 0;
  // The usual weights apart, for with the branches of the others in its way the compiler loads them one by one.
  const bool is_own = p.weight.is_own();
  if (is_row) {
    s = {CENTERED ? p.mean[row] : 0, p.rstd[row]};
    x.load(p.x + row * p.x_stride, columns, p.policy);
    grad_out.load(p.grad_out + row * p.grad_out_stride, columns, p.policy);
    if (is_own) packed.load(static_cast<const T *>(p.weight.data), columns);
    if (FUSED == ADDED && p.grad_sum != nullptr)
      grad_sum.load(p.grad_sum + row * p.grad_sum_stride, columns, p.policy);
    if (FUSED == DROPPED || wants_dropped) mask.make(p.dropout, seed, row * p.cols, columns);
  }
  float xhat[K][N], g[K][N], w[K][N], none[1], v[COUNT] = {};
  if (!is_own) load_weights<T>(w, none, p.weight, columns);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    unpack<T, N>(xhat[k], x.bits[k]);
    unpack<T, N>(g[k], grad_out.bits[k]);
    if (is_own) unpack<T, N>(w[k], packed.bits[k]);
    if (FUSED == DROPPED) drop(g[k], p.dropout, mask.of(k));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[k][j] = normalize<T, CENTERED>(xhat[k][j], s);
      g[k][j] = weighted<T>(g[k][j], w[k][j], s);
      v[0] = fmaf(g[k][j], xhat[k][j], v[0]);
      if (CENTERED) v[COUNT - 1] += g[k][j];
    }
  }
  team_sum<TEAM>(v, shared);
  if (!is_row) return;
  write_grad_x<T, CENTERED, FUSED>(p, row, columns, xhat, g, v, s, grad_sum, mask, wants_dropped);
  if (row >= p.let_go) let_row_go<FUSED>(p, row, columns);
}

// Adds grad_out * xhat of the rows row, row + step, ... to sums[0] to sums[N - 1], and grad_out to those behind them.
template <typename T, bool CENTERED, Fused FUSED, int N, int U, int M>
__device__ inline void add_rows(float (&sums)[M], const FewBackward<T> &p, int row, int step,
                                int c) {
  const int rows = static_cast<int>(p.rows);
  const int64_t seed = FUSED == DROPPED ? seed_of(p.dropout) : 0;
  const T *at_x = p.x + row * p.x_stride + c, *at_grad = p.grad_out + row * p.grad_out_stride + c;
  for (; row < rows; row += U * step) {
    Vector<T, N> x[U], grad_out[U];
    Statistics s[U];
    uint32_t masks[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int r = row + u * step;
      const bool is_row = r < rows;  // what is missing adds zeros
      x[u] = is_row ? load_vector<T, N>(at_x) : Vector<T, N>{};
      grad_out[u] = is_row ? load_vector<T, N>(at_grad) : Vector<T, N>{};
      s[u].mean = CENTERED && is_row ? p.mean[r] : 0;
      s[u].rstd = is_row ? p.rstd[r] : 0;
      at_x += step * p.x_stride;
      at_grad += step * p.grad_out_stride;
    }
    if constexpr (FUSED == DROPPED) {
      int64_t first[U];
#pragma unroll
      for (int u = 0; u < U; ++u) first[u] = (row + static_cast<int64_t>(u) * step) * p.cols + c;
      keep<N>(masks, p.dropout, seed, first);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float xhat[N], grad[N];
      unpack<T, N>(xhat, x[u]);
      unpack<T, N>(grad, grad_out[u]);
      if (FUSED == DROPPED) drop(grad, p.dropout, masks[u]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[j] = fmaf(grad[j], normalize<T, CENTERED>(xhat[j], s[u]), sums[j]);
        if (CENTERED) sums[M - N + j] += grad[j];
      }
    }
  }
}

// Adds M numbers, a power of two, over the lanes of a warp that are X, 2 X, ... apart. Each lane is left with some of the sums,
// in v[0], v[1], ...; `count` is how many, and the number of the first is returned.
template <int X, int M>
__device__ inline int fold_lanes(float (&v)[M], int &count) {
  int first = 0, left = M;
#pragma unroll
  for (int offset = 16; offset >= X; offset /= 2) {
    const bool upper = threadIdx.x & offset, halves = left > 1;
    if (halves) left /= 2;
    if (halves && upper) first += left;
#pragma unroll
    for (int j = 0; j < (M > 1 ? M / 2 : 1); ++j) {
      if (j >= left) continue;
      // A lane keeps one half of the numbers, and gives the other away for its own.
      const float mine = halves && upper ? v[(j + left) % M] : v[j],
                  other = !halves || upper ? v[j] : v[(j + left) % M];
      v[j] = mine + __shfl_xor_sync(0xffffffffu, other, offset);
    }
  }
  count = left;
  return first;
}

// The weight gradients of tile number `tile`.
template <typename T, bool CENTERED, Fused FUSED, typename S>
__device__ inline void few_columns(const FewBackward<T> &p, int tile) {
  constexpr int N = VECTOR<T>, X = S::X, M = CENTERED ? 2 * N : N, WIDTH = X * N, SUMS = X * M,
                WARPS = S::BLOCK / 32;
  __shared__ float fold[WARPS][SUMS];
  const int x = threadIdx.x % X, c = (tile * X + x) * N;
  float sums[M] = {};
  if (c < p.cols) add_rows<T, CENTERED, FUSED, N, S::U>(sums, p, threadIdx.x / X, S::Y, c);
  int count;
  const int first = fold_lanes<X>(sums, count);
#pragma unroll
  for (int j = 0; j < M; ++j) {
    // All columns' grad_weight, then their grad_bias.
    const int sum = first + j;
    if (j < count) fold[threadIdx.x / 32][sum / N * WIDTH + x * N + sum % N] = sums[j];
  }
  __syncthreads();
#pragma unroll
  for (int sum = threadIdx.x; sum < SUMS; sum += S::BLOCK) {
    float halves[2] = {};  // shorter chains
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) halves[warp % 2] += fold[warp][sum];
    const int column = tile * WIDTH + sum % WIDTH;
    void *const out = sum < WIDTH ? p.grad_weight : p.grad_bias;
    if (column >= p.cols || out == nullptr) continue;
    if (p.weight.is_float) {
      static_cast<float *>(out)[column] = halves[0] + halves[1];
    } else {
      static_cast<T *>(out)[column] = from_acc<T>(halves[0] + halves[1]);
    }
  }
}

template <typename T, bool CENTERED, Fused FUSED, typename S>
__global__ void __launch_bounds__(S::BLOCK, S::RESIDENT / S::BLOCK)
    few_backward_kernel(const __grid_constant__ FewBackward<T> p) {
  const int block = static_cast<int>(blockIdx.x);
  if (block < p.column_blocks) {
    few_columns<T, CENTERED, FUSED, S>(p, block);
  } else {
    few_rows<T, CENTERED, FUSED, S>(p, block - p.column_blocks);
  }
}

template <typename T, bool CENTERED, Fused FUSED, typename S>
cudaError_t launch_few(FewBackward<T> &p, cudaStream_t stream) {
  const bool wants_columns = p.grad_weight != nullptr || p.grad_bias != nullptr;
  p.column_blocks = wants_columns ? static_cast<int>(ceil_div(p.cols, S::X * VECTOR<T>)) : 0;
  const int64_t blocks = p.column_blocks + (p.grad_x != nullptr ? ceil_div(p.rows, S::TEAMS) : 0);
  if (blocks == 0) return cudaSuccess;
  few_backward_kernel<T, CENTERED, FUSED, S>
      <<<static_cast<unsigned>(blocks), S::BLOCK, 0, stream>>>(p);
  return cudaGetLastError();
}

// Whether these rows are few: where one kernel is faster than two, as measured. Wider rows than 32 KB do not fit into the registers of
// few_backward's shapes; behind so many bytes the second read misses the cache.
template <typename T>
bool are_few(int64_t rows, int64_t cols, bool is_added) {
  const int64_t row = cols * static_cast<int64_t>(sizeof(T));
  const bool is_half = sizeof(T) == 2;
  const int64_t mib = row <= 8 << 10               ? (is_half ? 12 : 8)
                      : is_added                   ? 4
                      : is_half || row <= 12 << 10 ? 8
                                                   : 6;
  return row % 16 == 0 && row <= 32 << 10 && rows <= 1792 && rows * row <= mib << 20;
}

template <typename T, bool CENTERED, Fused FUSED>
cudaError_t few_backward(FewBackward<T> p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>, E = 2 * N, X = 16 / N, R = FUSED == ALONE ? 1024 : 512;
  // Up to as many rows as an H100 has multiprocessors: smaller blocks, which spread over the chip; wide ones in wide tiles, for
  // else most threads of a column block would have no row.
  using Tens = Shapes<FewShape<128, 32, E, 4, 2, R>, FewShape<128, 64, E, 4, 2, R>,
                      FewShape<128, 128, E, 4, 2, R>, FewShape<256, 256, E, 4, 2, R>,
                      FewShape<512, 512, E, 32, 1, R>, FewShape<512, 512, 2 * E, 32, 1, 512>>;
  using Hundreds = Shapes<FewShape<256, 32, E, X, 2, R>, FewShape<256, 64, E, X, 2, R>,
                          FewShape<256, 128, E, X, 2, R>, FewShape<256, 256, E, 4, 2, R>,
                          FewShape<512, 512, E, 4, 2, R>, FewShape<512, 512, 2 * E, 8, 2, 512>>;
  const auto launch = [&](auto shape) {
    return launch_few<T, CENTERED, FUSED, decltype(shape)>(p, stream);
  };
  const int cols = static_cast<int>(p.cols);
  return p.rows <= 132 ? with_shape<N>(cols, Tens{}, launch)
                       : with_shape<N>(cols, Hundreds{}, launch);
}

// grad_x alone, of any number of rows: blocks that come and go are faster than blocks that stay. NOT_TAKEN where a large tensor would leave
// too much of a multiprocessor idle, and of rows for which there is no shape.
template <typename T, bool CENTERED, Fused FUSED>
cudaError_t rows_backward(const FewBackward<T> &of, cudaStream_t stream) {
  constexpr int N = VECTOR<T>, E = 2 * N, X = 4, U = 2, R = FUSED == ALONE ? 1024 : 512;
  constexpr int B96 = FUSED == ALONE ? 480 : 192, B160 = FUSED == ALONE ? 320 : 160;
  using Known = Shapes<FewShape<256, 32, E, X, U, R>, FewShape<256, 64, E, X, U, R>,
                       FewShape<B96, 96, E, X, U, R>, FewShape<256, 128, E, X, U, R>,
                       FewShape<B160, 160, E, X, U, R>, FewShape<192, 192, E, X, U, R>,
                       FewShape<224, 224, E, X, U, R>, FewShape<256, 256, E, X, U, R>,
                       FewShape<320, 320, E, X, U, R>, FewShape<384, 384, E, X, U, R>,
                       FewShape<448, 448, E, X, U, R>, FewShape<512, 512, E, X, U, R>>;
  FewBackward<T> p = of;
  constexpr int MOST = FUSED != ADDED ? 16 << 10 : sizeof(T) == 2 ? 14 << 10 : 12 << 10;  // bytes
  const int row = p.cols * static_cast<int>(sizeof(T));
  const bool is_large = p.rows * row > 32 << 20;
  if (row < 512 || row > MOST) return NOT_TAKEN;
  return with_shape<N>(p.cols, Known{}, [&](auto shape) {
    using S = decltype(shape);
    constexpr int resident = FUSED == ALONE ? R / S::BLOCK * S::BLOCK : R;
    // Of float so little work that less of it may be busy; narrow rows with a residual are slow through the ring in any case.
    const double busy = FUSED == ADDED ? (p.cols < 512 ? 0 : 0.8) : sizeof(T) == 2 ? 0.9 : 0.7;
    if (is_large && static_cast<double>(p.cols) * resident < busy * S::WIDEST * R) return NOT_TAKEN;
    if constexpr (S::WIDEST * static_cast<int>(sizeof(T)) <= MOST)
      return launch_few<T, CENTERED, FUSED, S>(p, stream);
    return NOT_TAKEN;
  });
}

}  // namespace norm_cuda

#endif
