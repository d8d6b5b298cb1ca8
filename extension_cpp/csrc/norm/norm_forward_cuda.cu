// layer_norm and rms_norm on the GPU, in one pass over x (norm_rows.cuh says how rows meet threads).
//
// Rows that fit into a block's registers: a team a row, and as many blocks as there are rows for; a block takes 16 KB or more,
// for smaller ones cannot be started fast enough. Plain loads and stores: another cache policy on one of the two sides costs
// 4 %. Wider rows: clusters of persistent blocks behind a ring.
//
// Mean and squared deviations take two passes over the registers, for float with the correction for the rounding of the mean
// (half types cannot hold a mean so large that it would show). In a cluster every warp does so for its part of the row, and the
// parts are then joined: the row's mean is that of the parts' means, and each part's distance from it counts as many times as
// the part has columns.
#include "norm/norm_plain.cuh"
#include "norm/norm_rows.cuh"

namespace norm_cuda {

template <typename T>
struct Forward : Geometry {
  const T *x;
  Weights weight;
  Weights bias;
  T *y;
  float *mean;  // NULL: rms_norm
  float *rstd;
  float eps;
  int64_t x_stride;
  const T *residual;
  int64_t residual_stride;
  T *sum;
  dropout_t dropout;  // ADDED: of x, perhaps none; DROPPED: of y
};

// x, given as bits, becomes residual + dropout(x), which is also written.
template <typename T, int TEAM, int K, int N>
__device__ inline void add_residual(Vector<T, N> (&bits)[K], const Vector<T, N> (&residual)[K], const Forward<T> &p,
                                    int64_t row, int64_t seed, const Columns<TEAM, K, N> &columns) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float x[N], r[N];
    unpack<T, N>(x, bits[k]);
    unpack<T, N>(r, residual[k]);
    const int64_t i = row * p.cols + columns.column(k);
    if (p.dropout.seed != nullptr) drop(x, p.dropout, seed, i);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] += r[j];
    bits[k] = pack<T, N>(x);
    __stwb(reinterpret_cast<Vector<T, N> *>(p.sum + i), bits[k]);
  }
}

// Sums of v over a team; `shared` is for the warps of the block, and for this sum alone.
template <int TEAM, int COUNT>
__device__ inline void team_sum(float (&v)[COUNT], float (&shared)[THREADS<TEAM> / 32][COUNT]) {
  if constexpr (TEAM >= 32 && COUNT == 2) {
    const float2 both = warp_sum<true>({v[0], v[1]});
    v[0] = both.x, v[1] = both.y;
  } else {
    group_sum(v, TEAM < 32 ? TEAM : 32);
  }
  if constexpr (TEAM > 32) {
    constexpr int WARPS = TEAM / 32;
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) shared[threadIdx.x / 32][n] = v[n];
    }
    sync_group(1 + threadIdx.x / TEAM, TEAM);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) v[n] = shared[threadIdx.x / TEAM * WARPS + threadIdx.x % WARPS][n];
    group_sum(v, WARPS);
  }
}

// Threads that a multiprocessor holds, as far as that many registers do without spills: the more blocks, the steadier.
template <Fused FUSED, int K, int N>
constexpr int RESIDENT = FUSED != ALONE                     ? 512
                         : K *N <= 32 && (N > 1 || K <= 16) ? 1024
                                                            : 768;

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int N>
__global__ void __launch_bounds__(THREADS<TEAM>, RESIDENT<FUSED, K, N> / THREADS<TEAM>)
    forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr bool CORRECTS = CENTERED && sizeof(T) == 4;
  constexpr int TEAMS = THREADS<TEAM> / TEAM, COUNT = CORRECTS ? 2 : 1;
  __shared__ float sums[THREADS<TEAM> / 32][1], squares[THREADS<TEAM> / 32][COUNT];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
  const bool is_row = row < p.rows;  // all lanes of a warp go on: they sum together
  const Columns<TEAM, K, N> columns(p, threadIdx.x % TEAM, 0);
  Vector<T, N> bits[K] = {};
  const int64_t seed = FUSED == ALONE ? 0 : seed_of(p.dropout);
  if (is_row) {
    load_row<T>(bits, p.x + row * p.x_stride, columns);
    if constexpr (FUSED == ADDED) {
      Vector<T, N> residual[K];
      load_row<T>(residual, p.residual + row * p.residual_stride, columns);
      add_residual(bits, residual, p, row, seed, columns);
    }
  }
  float x[K][N], mean = 0, shift = 0, sum[1] = {}, v[COUNT] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    unpack<T, N>(x[k], bits[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[0] = CENTERED ? sum[0] + x[k][j] : fmaf(x[k][j], x[k][j], sum[0]);
  }
  team_sum<TEAM>(sum, sums);
  if (CENTERED) {
    mean = sum[0] * p.per_col;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        x[k][j] -= mean;
        v[0] = fmaf(x[k][j], x[k][j], v[0]);
        if (CORRECTS) v[COUNT - 1] += x[k][j];
      }
    }
    team_sum<TEAM>(v, squares);
    sum[0] = v[0];
    if (CORRECTS) {
      shift = v[COUNT - 1] * p.per_col;  // how far the mean is off
      mean += shift;
      if (!isinf(v[0])) sum[0] -= shift * shift * p.cols;
    }
  }
  const float rstd = rsqrtf(fmaf(sum[0], p.per_col, p.eps));
  if (!is_row) return;
  if (threadIdx.x % TEAM == 0) {
    if (CENTERED) p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
  T *const y = p.y + row * p.cols;
  const auto finish = [&](auto load_weight, auto load_bias) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float w[N], b[N];
      load_weight(w, columns.column(k));
      if (CENTERED) load_bias(b, columns.column(k));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = CORRECTS ? fmaf(x[k][j], rstd, -shift * rstd) : x[k][j] * rstd;
        x[k][j] = CENTERED ? fmaf(xhat, w[j], b[j]) : xhat * w[j];
      }
      if (FUSED == DROPPED) drop(x[k], p.dropout, seed, row * p.cols + columns.column(k));
      store<T, N>(y + columns.column(k), x[k]);
    }
  };
  // The usual weights apart, for with the branches of the others in its way the compiler loads them one by one.
  if (p.weight.is_plain() && (!CENTERED || p.bias.is_plain())) {
    finish([&](float(&w)[N], int c) { load<T, N>(w, static_cast<const T *>(p.weight.data) + c); },
           [&](float(&b)[N], int c) { load<T, N>(b, static_cast<const T *>(p.bias.data) + c); });
  } else {
    finish([&](float(&w)[N], int c) { p.weight.template load<T>(w, c); },
           [&](float(&b)[N], int c) { p.bias.template load<T>(b, c); });
  }
}

// One cluster's rows; the walk is that of BackwardRows.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int N>
struct WideRows {
  static constexpr int PARTS = MAX_CLUSTER * TEAM / 32 / 32;  // parts of a row that one lane joins
  static constexpr int TENSORS = FUSED == ADDED ? 2 : 1;
  using TeamRing = Ring<T, TENSORS, TEAM, K, N, true>;

  const Forward<T> &p;
  TeamRing ring;
  const int64_t seed;
  const int rank;
  const int64_t first;  // row; from there on every `chunks`-th
  const int rows;
  const Columns<TEAM, K, N> columns;
  float count;          // the columns of this warp
  float counts[PARTS];  // those of the parts that this lane joins
  float weight[K][N], bias[CENTERED ? K : 1][N];

  __device__ WideRows(const Forward<T> &p, uint4 *slots, Exchange<TEAM, true> &exchange, int64_t chunk, int rank)
      : p(p),
        ring{slots, exchange, p.stages},
        seed(FUSED == ALONE ? 0 : seed_of(p.dropout)),
        rank(rank),
        first(chunk),
        rows(static_cast<int>((p.rows - first + p.chunks - 1) / p.chunks)),
        columns(p, threadIdx.x, rank) {}

  __device__ int64_t row(int i) const { return first + i * p.chunks; }

  __device__ void fetch(int i) {
    if (threadIdx.x > 0 || i >= rows) return;
    const T *starts[TENSORS] = {p.x + row(i) * p.x_stride};
    if (FUSED == ADDED) starts[TENSORS - 1] = p.residual + row(i) * p.residual_stride;
    ring.fetch(starts, columns, row(i) == p.rows - 1);
  }

  // Row i from the ring, its numbers to the cluster.
  __device__ void read(Vector<T, N> (&bits)[K], int i, int turn) {
    ring.wait();
    ring.load(bits, 0, p.x + row(i) * p.x_stride, columns);
    if constexpr (FUSED == ADDED) {
      Vector<T, N> residual[K];
      ring.load(residual, 1, p.residual + row(i) * p.residual_stride, columns);
      add_residual(bits, residual, p, row(i), seed, columns);
    }
    ring.exchange.post(turn, deviations(bits), rank, p.cluster);
    ring.now.advance(p.stages);
  }

  // The parts of the row that this lane joins: f(j, numbers of the part).
  template <typename F>
  __device__ void for_parts(const float2 *parts, F &&f) const {
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const int part = threadIdx.x % 32 + 32 * j;
      if (part < p.cluster * (TEAM / 32)) f(j, parts[part]);
    }
  }

  // Counts the columns, of this warp and of all parts.
  __device__ void count_columns() {
    float v[1] = {static_cast<float>(columns.count())};
    group_sum(v);
    count = v[0];
    ring.exchange.post(0, {count, 0}, rank, p.cluster);
    for_parts(ring.exchange.collect(0), [&](int j, float2 part) { counts[j] = part.x; });
  }

  // Mean and squared deviations of this warp's part of a row; for rms_norm, 0 and the sum of squares. Half types take one pass,
  // around the warp's first element: were it far away from all others, 9 of 24 bits would be lost.
  __device__ float2 deviations(const Vector<T, N> (&bits)[K]) const {
    float x[K][N], sum[1] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      unpack<T, N>(x[k], bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[0] = CENTERED ? sum[0] + x[k][j] : fmaf(x[k][j], x[k][j], sum[0]);
    }
    if (!CENTERED || sizeof(T) == 4) group_sum(sum);
    if (!CENTERED) return {0, sum[0]};
    const float per_count = 1 / fmaxf(count, 1);
    const float center = sizeof(T) == 4 ? sum[0] * per_count : __shfl_sync(0xffffffffu, x[0][0], 0);
    float2 v = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = x[k][j] - center;
        v.x += d;
        v.y = fmaf(d, d, v.y);
      }
    }
    v = warp_sum<true>(v);
    return {center + v.x * per_count, isinf(v.y) ? v.y : v.y - v.x * v.x * per_count};
  }

  // Mean and rstd of the row that is number `turn` of this block, around the mean of its first part.
  __device__ float2 statistics(int turn) const {
    const float2 *parts = ring.exchange.collect(turn);
    const float center = CENTERED ? parts[0].x : 0;
    float2 v = {};
    for_parts(parts, [&](int j, float2 part) {
      const float d = part.x - center;
      const float square = CENTERED ? fmaf(counts[j] * d, d, part.y) : part.y;
      if (CENTERED) v.x = fmaf(counts[j], d, v.x);
      v.y += square;
    });
    if (CENTERED) {
      v = warp_sum<true>(v);
      if (!isinf(v.y)) v.y -= v.x * v.x * p.per_col;
    } else {
      v.y = warp_sum<false>({v.y, 0}).x;
    }
    return {fmaf(v.x, p.per_col, center), rsqrtf(fmaf(v.y, p.per_col, p.eps))};
  }

  __device__ void finish(int i, const Vector<T, N> (&bits)[K], float2 statistics) const {
    const int64_t r = row(i);
    if (threadIdx.x == 0 && rank == 0) {
      if (CENTERED) p.mean[r] = statistics.x;
      p.rstd[r] = statistics.y;
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (!columns.has(k)) continue;
      float x[N];
      unpack<T, N>(x, bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (CENTERED ? x[j] - statistics.x : x[j]) * statistics.y;
        x[j] = CENTERED ? fmaf(xhat, weight[k][j], bias[k][j]) : xhat * weight[k][j];
      }
      if (FUSED == DROPPED) drop(x, p.dropout, seed, r * p.cols + columns.column(k));
      store<T, N>(p.y + r * p.cols + columns.column(k), x);
    }
  }

  __device__ void run() {
    for (int i = 0; i < p.stages; ++i) fetch(i);
    load_weights<T>(weight, p.weight, columns);
    if constexpr (CENTERED) {
      load_weights<T>(bias, p.bias, columns);
      count_columns();
    }
    constexpr int COUNTED = CENTERED ? 1 : 0;  // turns
    Vector<T, N> bits[K], following[K];
    if (rows > 0) read(bits, 0, COUNTED);
    for (int i = 0; i < rows; ++i) {
      if (i + 1 < rows) read(following, i + 1, i + 1 + COUNTED);
      const float2 s = statistics(i + COUNTED);
      fetch(i + p.stages);  // all warps have posted row i, so they have read it
      finish(i, bits, s);
#pragma unroll
      for (int k = 0; k < K; ++k) bits[k] = following[k];
    }
  }
};

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int N, int BLOCKS>
__global__ void __launch_bounds__(TEAM, BLOCKS) wide_forward_kernel(const __grid_constant__ Forward<T> p) {
#if HAS_CLUSTERS
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ Exchange<TEAM, true> exchange;
  exchange.open(threadIdx.x);
  WideRows<T, CENTERED, FUSED, TEAM, K, N>(p, shared, exchange, blockIdx.x / p.cluster, cluster_rank()).run();
  sync_cluster();  // no block ends while another still sends to it
#endif
}

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int ELEMENTS, int N, int BLOCKS>
cudaError_t launch_wide(Forward<T> &p, cudaStream_t stream, bool &launched) {
  constexpr int K = ELEMENTS / N;
  using Rows = WideRows<T, CENTERED, FUSED, TEAM, K, N>;
  return launch_ring<typename Rows::TeamRing, TEAM, K, N, true, BLOCKS>(
      wide_forward_kernel<T, CENTERED, FUSED, TEAM, K, N, BLOCKS>, p, (96 << 10) / BLOCKS, INT32_MAX, stream, launched);
}

template <typename T, bool CENTERED, Fused FUSED, int N>
cudaError_t launch_forward(Forward<T> &p, cudaStream_t stream, bool &launched) {
  using Odd = Shapes<Shape<8, 8>, Shape<32, 8>, Shape<32, 16>, Shape<32, 32>, Shape<64, 18>, Shape<64, 32>,
                     Shape<128, 32>, Shape<256, 18>, Shape<256, 32>, Shape<512, 32>>;
  using Even = Shapes<Shape<8, 8>, Shape<32, 8>, Shape<32, 16>, Shape<32, 24>, Shape<32, 32>, Shape<32, 40>,
                      Shape<64, 32>, Shape<128, 24>, Shape<128, 32>, Shape<128, 40>, Shape<256, 24>, Shape<256, 32>,
                      Shape<512, 24>, Shape<512, 32>>;
  using FusedOdd = Shapes<Shape<32, 8>, Shape<32, 32>, Shape<128, 32>, Shape<512, 32>>;
  using FusedEven =
      Shapes<Shape<32, 8>, Shape<32, 16>, Shape<32, 32>, Shape<64, 32>, Shape<128, 32>, Shape<256, 32>, Shape<512, 32>>;
  using Known = std::conditional_t<FUSED == ALONE, std::conditional_t<N == 1, Odd, Even>,
                                   std::conditional_t<N == 1, FusedOdd, FusedEven>>;
  cudaError_t error = with_shape(p.cols, Known{}, [&](auto shape) {
    using S = decltype(shape);
    constexpr int threads = THREADS<S::TEAM>;
    const int64_t blocks = ceil_div(p.rows, threads / S::TEAM);
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    launched = true;
    forward_kernel<T, CENTERED, FUSED, S::TEAM, S::ELEMENTS / N, N>
        <<<static_cast<unsigned>(blocks), threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
  if (error != cudaErrorNotSupported) return error;
  if constexpr (N < 8) {
    error = launch_wide < T, CENTERED, FUSED, 256, 16, N, FUSED == ALONE ? 2 : 1 > (p, stream, launched);
    if (error != cudaSuccess || launched) return error;
  }
  return launch_wide<T, CENTERED, FUSED, 512, 16, N, 1>(p, stream, launched);
}

template <typename T, bool CENTERED, Fused FUSED>
cudaError_t forward(const norm_forward_args &args, cudaStream_t stream) {
  constexpr int N = 16 / sizeof(T);
  Forward<T> p{};
  p.x = static_cast<const T *>(args.x);
  p.weight = {args.weight, 1, args.weight_dtype != args.dtype};
  p.bias = {args.bias, 0, args.weight_dtype != args.dtype};
  p.y = static_cast<T *>(args.y);
  p.mean = static_cast<float *>(args.mean);
  p.rstd = static_cast<float *>(args.rstd);
  p.eps = static_cast<float>(args.eps);
  p.x_stride = args.x_stride;
  p.residual = static_cast<const T *>(args.residual);
  p.residual_stride = args.residual_stride;
  p.sum = static_cast<T *>(args.sum);
  p.dropout = FUSED == ADDED ? args.dropout_x : args.dropout_y;
  if (args.cols == 0 || !set_shape(p, args.rows, args.cols)) return plain_forward<T>(args, stream);
  const bool aligned = is_aligned<T>(args.x, args.x_stride) && is_aligned<T>(args.y, args.cols) &&
                       is_aligned<T>(args.weight) && is_aligned<T>(args.bias) && is_aligned<T>(args.sum) &&
                       is_aligned<T>(args.residual, args.residual_stride);
  bool launched = false;
  const cudaError_t error = aligned ? launch_forward<T, CENTERED, FUSED, N>(p, stream, launched)
                                    : launch_forward<T, CENTERED, FUSED, 1>(p, stream, launched);
  return error != cudaSuccess || launched ? error : plain_forward<T>(args, stream);
}

}  // namespace norm_cuda

extern "C" int norm_forward_cuda(const norm_forward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_forward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args->residual) return args->mean ? forward<T, true, ADDED>(*args, on) : forward<T, false, ADDED>(*args, on);
    if (args->dropout_y.seed) return forward<T, true, DROPPED>(*args, on);
    return args->mean ? forward<T, true, ALONE>(*args, on) : forward<T, false, ALONE>(*args, on);
  });
}
