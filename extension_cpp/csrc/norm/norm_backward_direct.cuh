// The gradients of layer_norm and rms_norm by blocks that stay, without the ring of norm_backward_rows.cuh: its start and end show where
// tensors are not large, and its threads are few where elements are little work. A row comes straight from memory into a team's
// registers, while the one before it becomes grad_x. The sums of the weight gradients stay in registers, too, over all rows of a
// block, which writes them as one partial row.
#ifndef EXTENSION_CPP_NORM_BACKWARD_DIRECT_CUH
#define EXTENSION_CPP_NORM_BACKWARD_DIRECT_CUH

#include "norm/norm_backward.cuh"
#include "norm/norm_launch.cuh"

namespace norm_cuda {

// Threads of a multiprocessor, which one block has, by their elements: more would spill.
template <typename T, bool CENTERED, Fused FUSED, int ELEMENTS>
constexpr int DIRECT_MOST = ELEMENTS > 24                                                     ? 256
                            : ELEMENTS > 16 || (sizeof(T) == 4 && CENTERED && FUSED == ADDED) ? 384
                                                                                              : 512;

// Whether what is read outlasts what is written also of tensors that are not large.
template <typename T, bool DROPS>
constexpr bool OUTLASTS_MEDIUM = sizeof(T) == 4 && !DROPS;

// One of the sums over the rows to its partial row: the teams' together.
template <int THREADS, int TEAM, int K, int N>
__device__ inline void write_partial(const float (&sums)[K][N],
                                     const Columns<TEAM, K, N, false> &columns, int cols,
                                     float *partial) {
  constexpr int TEAMS = THREADS / TEAM;
  __shared__ float4 shared[TEAMS][TEAM * K * N / 4];
  __syncthreads();  // the sum before has been read
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float4 *const mine = &shared[threadIdx.x / TEAM][columns.column(k) / 4];
#pragma unroll
    for (int j = 0; j < N; j += 4)
      mine[j / 4] = {sums[k][j], sums[k][j + 1], sums[k][j + 2], sums[k][j + 3]};
  }
  __syncthreads();
  for (int v = threadIdx.x; v < cols / 4; v += THREADS) {
    float4 sum = shared[0][v];
#pragma unroll
    for (int t = 1; t < TEAMS; ++t) {
      const float4 &more = shared[t][v];
      sum = {sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
    reinterpret_cast<float4 *>(partial)[v] = sum;
  }
}

// The block's partial rows.
template <bool CENTERED, int THREADS, typename T, int TEAM, int K, int N, int BIASES>
__device__ inline void write_partials(const Backward<T> &p, const float (&grad_weight)[K][N],
                                      const float (&grad_bias)[BIASES][N],
                                      const Columns<TEAM, K, N, false> &columns) {
  float *partial = p.partial + static_cast<int64_t>(blockIdx.x) * p.cols;
  if (p.wants_weight) {
    write_partial<THREADS>(grad_weight, columns, p.cols, partial);
    partial += p.chunks * p.cols;
  }
  if constexpr (CENTERED) {
    if (p.wants_bias) write_partial<THREADS>(grad_bias, columns, p.cols, partial);
  }
}

// Asks the L2 for the row behind the next one, too, by one thread of a team. Memory wants 48 to 64 KB on their way to a multiprocessor,
// and no more; the registers have fewer of half types, whose next row is 32 KB or, where threads idle, less. (With dropout they wait
// for instructions. Without grad_x 32 KB are enough. Why it also pays for these rows of float was not found.)
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int BLOCK, bool EXACT,
          bool DROPS>
__device__ inline void ask_ahead(const Backward<T> &p, int64_t row) {
  constexpr bool IDLES = BLOCK * K < 900,
                 HAS_ROOM = sizeof(T) == 2 && (!DROPS || (FUSED == ADDED && IDLES)),
                 FETCHES = HAS_ROOM || (sizeof(T) == 4 && CENTERED && FUSED == ADDED && !EXACT);
  if (!FETCHES || threadIdx.x % TEAM > 0 || row >= p.rows || !(IDLES || p.grad_x != nullptr))
    return;
  prefetch_bulk(p.x + row * p.x_stride, p.cols * sizeof(T), p.policy);
  prefetch_bulk(p.grad_out + row * p.grad_out_stride, p.cols * sizeof(T), p.policy);
}

// x becomes xhat, and g, which is grad_out, weighted(); their part in the sums over the rows, and in those of this row.
template <typename T, bool CENTERED, int N, int COUNT>
__device__ inline void add_vector(float (&x)[N], float (&g)[N], const float (&w)[N],
                                  const Statistics &s, float (&grad_weight)[N],
                                  float (&grad_bias)[N], float (&sums)[COUNT]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    x[j] = normalize<T, CENTERED>(x[j], s);
    grad_weight[j] = fmaf(g[j], x[j], grad_weight[j]);
    if (CENTERED) grad_bias[j] += g[j];
    g[j] = weighted<T>(g[j], w[j], s);
    sums[0] = fmaf(g[j], x[j], sums[0]);
    if (CENTERED) sums[COUNT - 1] += g[j];
  }
}

// EXACT: every thread has all its vectors. DROPS: with dropout, of grad_out or ADDED's of grad_dropped. W: the type of the weights.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int BLOCK, bool EXACT,
          bool DROPS, typename W>
__global__ void __launch_bounds__(BLOCK, 1)
    direct_backward_kernel(const __grid_constant__ Backward<T> p) {
  constexpr int N = VECTOR<T>, TEAMS = BLOCK / TEAM, COUNT = CENTERED ? 2 : 1;
  // Whether the weights stay in registers, packed; where few of these are left the cache has them.
  constexpr bool STAY = (sizeof(T) == 2 && K == 2) || (!CENTERED && FUSED == ALONE);
  // Lines that outlast others are let go with their row, in time that shows where tensors are not large; half types' would cost registers.
  constexpr bool ROW_BY_ROW = OUTLASTS_MEDIUM<T, DROPS>;
  __shared__ float shared[2][BLOCK / 32][COUNT];  // for every other row
  const int team = threadIdx.x / TEAM;
  const int64_t step = static_cast<int64_t>(gridDim.x) * TEAMS;
  const Columns<TEAM, K, N, false> columns(p, 0, threadIdx.x % TEAM, 0);
  if (EXACT) __builtin_assume(columns.left > (K - 1) * TEAM * N);
  Part<T, TEAM, K, N, false> x, grad_out, grad_sum{};
  Held<W, TEAM, K, N> weight;
  Statistics next;
  const auto load = [&](int64_t row) {
    if (row >= p.rows) return;
    x.load(p.x + row * p.x_stride, columns, p.policy);
    grad_out.load(p.grad_out + row * p.grad_out_stride, columns, p.policy);
    next = {CENTERED ? p.mean[row] : 0, p.rstd[row]};
  };
  const auto fetch = [&](int64_t row) {
    ask_ahead<T, CENTERED, FUSED, TEAM, K, BLOCK, EXACT, DROPS>(p, row);
  };
  // Made while the next row is on its way: ADDED's of the row at hand, whose grad_dropped is still to come, else of the next one.
  Mask<TEAM, K, N, false> mask{};
  const int64_t seed = DROPS ? seed_of(p.dropout) : 0;
  const auto make_mask = [&](int64_t row) { mask.make(p.dropout, seed, row * p.cols, columns); };
  float grad_weight[K][N] = {}, grad_bias[CENTERED ? K : 1][N] = {};
  int64_t row = static_cast<int64_t>(blockIdx.x) * TEAMS + team;
  load(row);
  fetch(row + step);
  if (FUSED == DROPPED && row < p.rows) make_mask(row);
  if (STAY) weight.template load<false>(p.weight, columns);
  for (int turn = 0; row < p.rows; row += step, ++turn) {
    if (!STAY) weight.template load<false>(p.weight, columns);
    // It is there; but without a branch the compiler asks for it sooner, and spills.
    if (FUSED == ADDED && p.grad_sum != nullptr) {
      grad_sum.load(p.grad_sum + row * p.grad_sum_stride, columns, p.policy);
    }
    const Statistics s = next;
    float xhat[K][N], g[K][N], sums[COUNT] = {};  // of g * xhat, and of g
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float w[N];
      unpack<T, N>(xhat[k], x.bits[k]);
      unpack<T, N>(g[k], grad_out.bits[k]);
      if (FUSED == DROPPED) drop(g[k], p.dropout, mask.of(k));
      weight.template get<STAY>(w, k);
      add_vector<T, CENTERED>(xhat[k], g[k], w, s, grad_weight[k], grad_bias[CENTERED ? k : 0],
                              sums);
    }
    load(row + step);
    fetch(row + 2 * step);
    if (FUSED == ADDED && DROPS) make_mask(row);
    if (FUSED == DROPPED && row + step < p.rows) make_mask(row + step);
    team_sum<TEAM>(sums, shared[turn % 2]);
    if (ROW_BY_ROW && row >= p.let_go) let_row_go<FUSED>(p, row, columns);
    if (p.grad_x != nullptr) {
      write_grad_x<T, CENTERED, FUSED>(p, row, columns, xhat, g, sums, s, grad_sum, mask,
                                       FUSED == ADDED && DROPS);
    }
  }
  write_partials<CENTERED, BLOCK>(p, grad_weight, grad_bias, columns);
  if (!ROW_BY_ROW) let_rows_go<FUSED>(p);
}

// Rows of half types that fill a shape: a thread then has more elements, which share a row's other work. Without dropout where 512 threads
// of 16 elements would leave many idle.
template <typename T, bool DROPS>
using FilledShapes = std::conditional_t<
    sizeof(T) == 4, Shapes<>,
    std::conditional_t<
        DROPS,
        Shapes<Shape<32, 24>, Shape<32, 40>, Shape<64, 24>, Shape<96, 24>, Shape<64, 40>,
               Shape<128, 24>, Shape<192, 24>, Shape<128, 40>, Shape<384, 24>, Shape<256, 40>>,
        Shapes<Shape<32, 24>, Shape<192, 24>, Shape<128, 40>, Shape<384, 24>, Shape<256, 40>>>>;
// Other rows.
using DirectShapes =
    Shapes<Shape<32, 16>, Shape<64, 16>, Shape<96, 16>, Shape<128, 16>, Shape<160, 16>,
           Shape<192, 16>, Shape<256, 16>, Shape<384, 16>, Shape<448, 16>, Shape<512, 16>>;

// Whether other rows are faster so than through the ring, as measured on an H200. is_exact: all threads have all their vectors; busy: the
// share of 512 threads with 16 elements that has columns.
template <typename T, bool CENTERED, Fused FUSED, typename W>
bool takes_direct(int64_t mib, int cols, bool is_exact, double busy) {
  if (cols < 256) return false;
  if (sizeof(T) == 4) {
    if (FUSED == ALONE) return mib <= 128 || (cols > 256 && !(CENTERED && cols > 6144));
    if (!CENTERED) return mib <= 128 || is_exact || busy >= 0.75;
    return mib <= 32 || (cols <= 4096 && (is_exact || cols <= 512 || cols > 768));
  }
  if (mib <= (FUSED == ADDED || cols > 4096 ? 64 : 32) || (FUSED == ADDED && cols < 512))
    return true;
  return busy >= (!CENTERED && !std::is_same_v<W, T> && cols > 1024 ? 0.55 : 0.73);
}

// Whether rows of half types without dropout, for which there is a shape, are nevertheless faster through the ring, as measured.
template <bool CENTERED, Fused FUSED, bool OWN>
bool leaves_to_ring(int64_t mib, int cols) {
  if (FUSED == ADDED) return mib > 64 && cols > 5632 && cols <= 6144;
  if (mib <= 128 || (!OWN && !CENTERED)) return false;
  if (!OWN && cols % 4096 == 0) return true;
  return cols % 896 == 0 || (cols > 5632 && cols < 8192) || (CENTERED && cols == 384);
}

// Whether rows that fill this shape are faster so with dropout, as measured; of half types others spill, or are for other shapes, and of float
// the ring has shapes that fit.
template <typename T, bool CENTERED, Fused FUSED>
constexpr bool drops_directly(int cols, int elements) {
  if (sizeof(T) == 4)
    return cols == 512 || cols == 1536 || cols == 2560 || cols == 3072 || cols == 6144;
  const bool is_power = (cols & (cols - 1)) == 0;
  if (FUSED == DROPPED) return elements > 16 || is_power;
  if (elements > 16)
    return !CENTERED && cols != 1536 && cols != 2560 && cols != 3072 && cols != 5120;
  return cols <= 4096 || cols == 6144 || (!CENTERED && is_power);
}

// Rows of whole vectors, with weights of type W; ADDED: with grad_sum. It reads `tensors`, past an L2 of `cache` bytes (hopper_cache).
// NOT_TAKEN where other kernels are faster.
template <typename T, bool CENTERED, Fused FUSED, bool DROPS, typename W>
cudaError_t direct_backward(Backward<T> &p, int tensors, int cache, cudaStream_t stream) {
  constexpr int N = VECTOR<T>;
  const int64_t mib = bytes_of<T>(p) >> 20;
  int device, processors;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (sizeof(T) == 2 && !DROPS &&
      leaves_to_ring<CENTERED, FUSED, std::is_same_v<W, T>>(mib, p.cols))
    return NOT_TAKEN;
  const auto launch = [&](auto shape, auto filled) {
    using S = decltype(shape);
    constexpr bool FILLED = decltype(filled)::value;
    constexpr int K = S::ELEMENTS / N,
                  teams = DIRECT_MOST<T, CENTERED, FUSED, S::ELEMENTS> / S::TEAM;
    constexpr int threads = teams * S::TEAM;
    constexpr bool is_shape =
        teams > 0 && (!DROPS || drops_directly<T, CENTERED, FUSED>(S::WIDEST, S::ELEMENTS));
    const bool is_exact = p.cols == S::WIDEST;
    if constexpr (is_shape) {
      const double busy = static_cast<double>(p.cols) * teams / (512 * 16);
      const bool takes = DROPS || FILLED
                             ? is_exact
                             : takes_direct<T, CENTERED, FUSED, W>(mib, p.cols, is_exact, busy);
      if (takes) {
        const int64_t most = std::min<int64_t>(processors, max_parts(p.cols));
        p.chunks = std::min(ceil_div(p.rows, teams), most);
        const int64_t turns = ceil_div(p.rows, teams * p.chunks);
        // As few blocks as take no more turns; where instructions are the limit all, if turns are many.
        if (sizeof(T) == 4 || (turns <= 16 && !(DROPS && FUSED == ADDED)))
          p.chunks = ceil_div(p.rows, turns * teams);
        if (OUTLASTS_MEDIUM<T, DROPS> && cache > 0 && p.policy == USUAL)
          set_policy<T>(p, OUTLASTS, tensors, cache);
        constexpr bool ONLY_EXACT = FILLED || DROPS;
        const auto kernel =
            is_exact
                ? direct_backward_kernel<T, CENTERED, FUSED, S::TEAM, K, threads, true, DROPS, W>
                : direct_backward_kernel<T, CENTERED, FUSED, S::TEAM, K, threads, ONLY_EXACT, DROPS,
                                         W>;
        kernel<<<static_cast<unsigned>(p.chunks), threads, 0, stream>>>(p);
        return cudaGetLastError();
      }
    }
    return NOT_TAKEN;
  };
  error = with_shape<N>(p.cols, FilledShapes<T, DROPS>{},
                        [&](auto shape) { return launch(shape, std::true_type{}); });
  if (error != NOT_TAKEN) return error;
  return with_shape<N>(p.cols, DirectShapes{},
                       [&](auto shape) { return launch(shape, std::false_type{}); });
}

}  // namespace norm_cuda

#endif
