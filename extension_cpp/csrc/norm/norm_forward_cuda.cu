// layer_norm and rms_norm on the GPU, in one pass over x (norm_rows.cuh says how rows meet threads).
//
// A warp takes mean and squared deviations of its part of the row in registers, in two passes with the correction for the
// rounding of the mean; the parts are then joined: the row's mean is that of the parts' means, and each part's distance from
// it counts as many times as the part has columns. In a cluster the numbers of row i + 1 are sent before row i is finished.
#include "norm/norm_rows.cuh"

namespace norm_cuda {

// Blocks that a multiprocessor holds: two, so that one computes while the other waits for its sums, unless registers forbid.
template <bool CENTERED, int TEAM, int ELEMENTS>
constexpr int BLOCKS = CENTERED &&TEAM == 32 && ELEMENTS > 24 ? 1 : 2;

template <typename T>
struct Forward : Geometry {
  const T *x;
  const void *weight;  // may be NULL
  const void *bias;    // may be NULL
  bool float_weight;
  T *y;
  float *mean;  // NULL: rms_norm
  float *rstd;
  float eps;
  int64_t x_stride;
};

// One block's rows of one class.
template <typename T, bool CENTERED, int TEAM, int K, bool CLUSTER>
struct ForwardRows {
  static constexpr int N = 16 / sizeof(T);
  static constexpr int TEAMS = THREADS / TEAM;
  static constexpr int WIDTH = TEAM < 32 ? TEAM : 32;  // lanes that sum together
  static constexpr int STAGE = K * THREADS;
  static constexpr int PARTS = CLUSTER ? MAX_CLUSTER * WARPS / 32 : 1;  // parts of a row that one lane joins

  const Forward<T> &p;
  uint4 *ring;  // this thread's first slot
  Exchange &exchange;
  const int rank;
  const int turns;  // rows of the busiest team
  const int rows;   // of this team: from `first` on, every `step`-th
  const int64_t first;
  const int64_t step;
  const Columns<T, TEAM, K> columns;
  Fetcher<T, TEAM, K> x_rows;
  bool ragged;          // whether these lanes have fewer columns than slots
  float count;          // the columns of these lanes
  float per_count;      // 1 / count
  float counts[PARTS];  // those of the parts that this lane joins
  float weight[K][N], bias[CENTERED ? K : 1][N];

  __device__ ForwardRows(const Forward<T> &p, uint4 *ring, Exchange &exchange, int rank, int64_t klass, int64_t begin,
                         int64_t end, int64_t jump)
      : p(p),
        ring(ring),
        exchange(exchange),
        rank(rank),
        turns(static_cast<int>((end - begin + jump - 1) / jump)),
        rows(static_cast<int>((end - begin - team() + jump - 1) / jump)),
        first(klass + p.classes * (begin + team())),
        step(p.classes * jump),
        columns(p, static_cast<int>(klass), threadIdx.x % TEAM, rank),
        x_rows(p.x, first, step, p.x_stride, columns) {}

  __device__ static int team() { return threadIdx.x / TEAM; }
  __device__ int64_t row(int i) const { return first + i * step; }

  __device__ void fetch(int i, uint4 *slots) {
    if (i < rows) x_rows.fetch(slots, columns, row(i) == 0, row(i) == p.rows - 1);
    commit_copies();
  }

  // The parts of the row that this lane joins: f(j, numbers of the part).
  template <typename F>
  __device__ void for_parts(const float2 *parts, F &&f) const {
    if constexpr (CLUSTER) {
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        const int part = threadIdx.x % 32 + 32 * j;
        if (part < p.cluster * WARPS) f(j, parts[part]);
      }
    } else {
      f(0, parts[threadIdx.x % (TEAM / 32)]);
    }
  }
  static constexpr int JOINED = CLUSTER ? 32 : TEAM / 32;  // lanes over which the parts are spread

  // Counts the columns; for rows of several warps, of all parts.
  __device__ void count_columns(int &turn) {
    const int mine = __popc(columns.valid);
    ragged = __any_sync(0xffffffffu, mine < K * N);
    float v[1] = {static_cast<float>(mine)};
    group_sum(v, WIDTH);
    count = v[0];
    per_count = 1 / fmaxf(count, 1);
    if constexpr (TEAM > 32) {
      post<TEAM, CLUSTER>(exchange, turn, {count, 0}, rank, p.cluster);
      for_parts(collect<TEAM, CLUSTER>(exchange, turn), [&](int j, float2 part) { counts[j] = part.x; });
      ++turn;
    }
  }

  // Mean and squared deviations of these lanes' part of a row; for rms_norm, 0 and the sum of squares.
  __device__ float2 deviations(uint4 *slots) const {
    clear_outside<T>(slots, columns);
    uint4 bits[K];
    load_slots(bits, slots);
    float x[K][N], v[2] = {};
#pragma unroll
    for (int k = 0; k < K; ++k) {
      unpack<T, N>(x[k], bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0] = CENTERED ? v[0] + x[k][j] : fmaf(x[k][j], x[k][j], v[0]);
    }
    float sum[1] = {v[0]};
    group_sum(sum, WIDTH);
    if (!CENTERED) return {0, sum[0]};
    const float mean = sum[0] * per_count;
    v[0] = 0;
    if (ragged) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int j = 0; j < N; ++j) x[k][j] = columns.in_row(k, j) ? x[k][j] : mean;
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = x[k][j] - mean;
        v[0] += d;
        v[1] = fmaf(d, d, v[1]);
      }
    }
    group_sum(v, WIDTH);
    return {mean + v[0] * per_count, isinf(v[1]) ? v[1] : v[1] - v[0] * v[0] * per_count};
  }

  // Mean and rstd of the row that is number `turn` of this block.
  __device__ float2 statistics(int turn, float2 mine) const {
    float mean[1] = {mine.x}, squares[1] = {mine.y};
    if constexpr (TEAM > 32) {
      const float2 *parts = collect<TEAM, CLUSTER>(exchange, turn);
      mean[0] = squares[0] = 0;
      if (CENTERED) {  // the first part's mean, and how far the row's is from it
        const float start = parts[0].x;
        for_parts(parts, [&](int j, float2 part) { mean[0] = fmaf(counts[j], part.x - start, mean[0]); });
        group_sum(mean, JOINED);
        mean[0] = fmaf(mean[0], p.per_col, start);
      }
      for_parts(parts, [&](int j, float2 part) {
        squares[0] += part.y;
        if (CENTERED) squares[0] = fmaf(counts[j] * (part.x - mean[0]), part.x - mean[0], squares[0]);
      });
      group_sum(squares, JOINED);
    }
    return {mean[0], rsqrtf(fmaf(squares[0], p.per_col, p.eps))};
  }

  __device__ void finish(int i, uint4 *slots, float2 statistics) const {
    if (i >= rows) return;
    const int64_t r = row(i);
    if (threadIdx.x % TEAM == 0 && rank == 0) {
      if (CENTERED) p.mean[r] = statistics.x;
      p.rstd[r] = statistics.y;
    }
    T *y = p.y + r * p.cols + columns.first;
    uint4 bits[K];
    load_slots(bits, slots);
    const float shift = -statistics.x * statistics.y;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float x[N];
      unpack<T, N>(x, bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        // Half types cannot hold a mean so large that the product's rounding would show; float can.
        const float xhat = !CENTERED        ? x[j] * statistics.y
                           : sizeof(T) == 2 ? fmaf(x[j], statistics.y, shift)
                                            : (x[j] - statistics.x) * statistics.y;
        x[j] = CENTERED ? fmaf(xhat, weight[k][j], bias[k][j]) : xhat * weight[k][j];
      }
      store_vector<T>(y, slots, k, x, columns);
    }
    store_edges<T>(y, slots, columns);
  }

  // `turn` counts the rows of the block over all its classes.
  __device__ void run(int &turn) {
    // A vector that this class has not is zero throughout.
    for (int i = 0; i < p.stages * (STAGE / THREADS); ++i) {
      if (i % K >= columns.present) store_shared(ring + i * THREADS, uint4{});
    }
    for (int i = 0; i < p.stages; ++i) fetch(i, ring + i * STAGE);
    load_weights<T>(weight, p.weight, p.float_weight, 1, columns);
    if constexpr (CENTERED) load_weights<T>(bias, p.bias, p.float_weight, 0, columns);
    if constexpr (CENTERED) count_columns(turn);
    uint4 *slots = ring, *const ring_end = ring + p.stages * STAGE;
    if (CLUSTER && turns > 0) {
      wait_for_copies(p.stages - 1);
      post<TEAM, CLUSTER>(exchange, turn, deviations(slots), rank, p.cluster);
    }
    for (int i = 0; i < turns; ++i, ++turn) {
      uint4 *const next_slots = slots + STAGE == ring_end ? ring : slots + STAGE;
      float2 mine{};
      if (!CLUSTER) {
        wait_for_copies(p.stages - 1);
        mine = deviations(slots);
        post<TEAM, CLUSTER>(exchange, turn, mine, rank, p.cluster);
      } else if (i + 1 < turns) {
        wait_for_copies(p.stages - 2);
        post<TEAM, CLUSTER>(exchange, turn + 1, deviations(next_slots), rank, p.cluster);
      }
      finish(i, slots, statistics(turn, mine));
      fetch(i + p.stages, slots);
      slots = next_slots;
    }
  }
};

template <typename T, bool CENTERED, int TEAM, int K, bool CLUSTER>
__global__ void __launch_bounds__(THREADS, BLOCKS<CENTERED, TEAM, K * 16 / sizeof(T)>)
    forward_kernel(const __grid_constant__ Forward<T> p) {
  extern __shared__ uint4 ring[];
  __shared__ Exchange exchange;
  int rank = 0;
#if HAS_CLUSTERS
  if (CLUSTER) rank = cluster_rank();
#endif
  open_exchange<CLUSTER>(exchange);
  const int64_t chunk = blockIdx.x / p.cluster;
  int turn = 0;
  constexpr int TEAMS = THREADS / TEAM;
  if (p.classes == 1) {  // all blocks move on together
    ForwardRows<T, CENTERED, TEAM, K, CLUSTER> rows(p, ring + threadIdx.x, exchange, rank, 0, chunk * TEAMS, p.rows,
                                                    p.chunks * TEAMS);
    rows.run(turn);
    return;
  }
  const int64_t first = p.rows * chunk / p.chunks, last = p.rows * (chunk + 1) / p.chunks;
  for (int64_t c = 0; c < p.classes; ++c) {
    const int64_t start = class_begin(p, c), end = class_begin(p, c + 1);
    const int64_t b = (start > first ? start : first) - start, e = (end < last ? end : last) - start;
    if (b >= e) continue;
    ForwardRows<T, CENTERED, TEAM, K, CLUSTER> rows(p, ring + threadIdx.x, exchange, rank, c, b, e, TEAMS);
    rows.run(turn);
  }
}

// For what the fast kernel does not take: a block a row, which it reads three times, element by element.
template <typename T, bool CENTERED>
__global__ void __launch_bounds__(THREADS) plain_forward_kernel(const norm_forward_args p) {
  using A = acc_t<T>;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + r * p.x_stride;
    A mean[1] = {}, v[2] = {};
    if (CENTERED) {
      for (int64_t c = threadIdx.x; c < p.cols; c += THREADS) mean[0] += to_acc(x[c]);
      block_sum<THREADS>(mean);
      mean[0] /= p.cols;
    }
    for (int64_t c = threadIdx.x; c < p.cols; c += THREADS) {
      const A d = to_acc(x[c]) - mean[0];
      v[0] += d;
      v[1] += d * d;
    }
    block_sum<THREADS>(v);
    if (CENTERED) mean[0] += v[0] / p.cols;
    const A squares = CENTERED ? v[1] - v[0] * v[0] / p.cols : v[1];
    const A rstd = 1 / sqrt(squares / p.cols + static_cast<A>(p.eps));
    if (threadIdx.x == 0) {
      if (CENTERED) static_cast<A *>(p.mean)[r] = mean[0];
      static_cast<A *>(p.rstd)[r] = rstd;
    }
    for (int64_t c = threadIdx.x; c < p.cols; c += THREADS) {
      const A xhat = (to_acc(x[c]) - mean[0]) * rstd;
      const A w = weight_at<T>(p.weight, p.weight_dtype, 1, c), b = weight_at<T>(p.bias, p.weight_dtype, 0, c);
      static_cast<T *>(p.y)[r * p.cols + c] = from_acc<T>(xhat * w + b);
    }
  }
}

template <typename T>
cudaError_t plain_forward(const norm_forward_args &args, cudaStream_t stream) {
  const auto kernel = args.mean ? plain_forward_kernel<T, true> : plain_forward_kernel<T, false>;
  kernel<<<static_cast<unsigned>(std::min<int64_t>(args.rows, 1 << 16)), THREADS, 0, stream>>>(args);
  return cudaGetLastError();
}

template <typename T, bool CENTERED>
cudaError_t forward(const norm_forward_args &args, cudaStream_t stream) {
  Forward<T> p{};
  p.x = static_cast<const T *>(args.x);
  p.weight = args.weight;
  p.bias = args.bias;
  p.float_weight = args.weight_dtype != args.dtype;
  p.y = static_cast<T *>(args.y);
  p.mean = static_cast<float *>(args.mean);
  p.rstd = static_cast<float *>(args.rstd);
  p.eps = static_cast<float>(args.eps);
  p.x_stride = args.x_stride;
  const RowsOf<T> tensors[] = {{p.x, p.x_stride}, {p.y, args.cols}};
  bool launched = false;
  if (args.cols > 0 && align_rows(p, args.rows, args.cols, tensors, 2)) {
    const cudaError_t error = with_shape<T>(p, [&](auto team, auto k, auto cluster) {
      return launch_rows<1, team, k, cluster, BLOCKS<CENTERED, team, k * 16 / sizeof(T)>>(
          forward_kernel<T, CENTERED, team, k, cluster>, p, INT32_MAX, stream, launched);
    });
    if (error != cudaSuccess) return error;
  }
  return launched ? cudaSuccess : plain_forward<T>(args, stream);
}

}  // namespace norm_cuda

extern "C" int norm_forward_cuda(const norm_forward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_forward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return args->mean ? forward<T, true>(*args, on) : forward<T, false>(*args, on);
  });
}
