// The gradients of layer_norm and rms_norm on the GPU, in one pass over x and grad_out (norm_rows.cuh says how rows meet threads).
//
// A row is read twice from shared memory: for its sums of g * (x - mean) and of g, and, when the whole team's are there, for
// grad_x. The weights and the sums of the weight gradients stay in registers over all rows of a block; at the end a block
// writes them as one partial row (one a class of rows), and a second kernel adds the partial rows in order. Nothing is
// atomic. In a cluster the sums of row i + 1 are sent before row i is finished, so that nobody waits for them.
#include "norm/norm_rows.cuh"

namespace norm_cuda {

// Blocks that a multiprocessor holds: two, so that one computes while the other waits for its sums, where registers allow.
template <bool CENTERED, int ELEMENTS>
constexpr int BLOCKS = ELEMENTS <= (CENTERED ? 8 : 16) ? 2 : 1;

template <typename T>
struct Backward : Geometry {
  const T *grad_out;
  const T *x;
  const float *mean;  // NULL: rms_norm
  const float *rstd;
  const void *weight;  // may be NULL
  bool float_weight;
  bool wants_weight;
  bool wants_bias;
  T *grad_x;       // may be NULL
  float *partial;  // (wants_weight + wants_bias, parts, cols)
  int64_t x_stride;
  int64_t grad_out_stride;

  __host__ __device__ int64_t parts() const { return chunks + classes - 1; }
};

struct Statistics {
  float mean;
  float rstd;
};

// One block's rows of one class.
template <typename T, bool CENTERED, int TEAM, int K, bool CLUSTER>
struct BackwardRows {
  static constexpr int N = 16 / sizeof(T);
  static constexpr int TEAMS = THREADS / TEAM;
  static constexpr int STAGE = 2 * K * THREADS;  // vectors: x, and behind it grad_out

  const Backward<T> &p;
  uint4 *ring;  // this thread's first slot
  Exchange &exchange;
  const int rank;
  const int turns;  // rows of the busiest team
  const int rows;   // of this team: from `first` on, every `step`-th
  const int64_t first;
  const int64_t step;
  const Columns<T, TEAM, K> columns;
  Fetcher<T, TEAM, K> x_rows, grad_out_rows;
  float weight[K][N], grad_weight[K][N], grad_bias[CENTERED ? K : 1][N];

  __device__ BackwardRows(const Backward<T> &p, uint4 *ring, Exchange &exchange, int rank, int64_t klass, int64_t begin,
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
        x_rows(p.x, first, step, p.x_stride, columns),
        grad_out_rows(p.grad_out, first, step, p.grad_out_stride, columns) {}

  __device__ static int team() { return threadIdx.x / TEAM; }
  __device__ int64_t row(int i) const { return first + i * step; }

  __device__ void fetch(int i, uint4 *slots) {
    if (i < rows) {
      const int64_t r = row(i);
      x_rows.fetch(slots, columns, r == 0, r == p.rows - 1);
      grad_out_rows.fetch(slots + K * THREADS, columns, r == 0, r == p.rows - 1);
    }
    commit_copies();
  }

  __device__ Statistics statistics(int i) const {
    if (i >= rows) return {0, 0};
    return {CENTERED ? p.mean[row(i)] : 0, p.rstd[row(i)]};
  }

  // This warp's (TEAM <= 32: team's) sums over a row: of g * rstd * (x - mean) and g * rstd.
  __device__ float2 sums(uint4 *slots, const Statistics &s) const {
    clear_outside<T>(slots, columns);
    clear_outside<T>(slots + K * THREADS, columns);
    float v[CENTERED ? 2 : 1] = {};
    uint4 x_bits[K], g_bits[K];
    load_slots(x_bits, slots);
    load_slots(g_bits, slots + K * THREADS);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float x[N], g[N];
      unpack<T, N>(x, x_bits[k]);
      unpack<T, N>(g, g_bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        g[j] = g[j] * s.rstd * weight[k][j];  // rstd first: where it is 0, x - mean is huge
        v[0] = fmaf(g[j], CENTERED ? x[j] - s.mean : x[j], v[0]);
        if (CENTERED) v[1] += g[j];
      }
    }
    group_sum(v, TEAM < 32 ? TEAM : 32);
    return {v[0], CENTERED ? v[1] : 0};
  }

  // The team's sums for row number `turn` of this block, from those of its warps.
  __device__ float2 total(int turn, float2 mine) const {
    if constexpr (TEAM <= 32) {
      return mine;
    } else {
      const float2 *slots = collect<TEAM, CLUSTER>(exchange, turn);
      float v[2] = {};
      if constexpr (CLUSTER) {
        for (int i = threadIdx.x % 32; i < p.cluster * WARPS; i += 32) {
          v[0] += slots[i].x;
          v[1] += slots[i].y;
        }
        group_sum(v);
      } else {
        constexpr int TEAM_WARPS = TEAM / 32;
        v[0] = slots[threadIdx.x % TEAM_WARPS].x;
        v[1] = slots[threadIdx.x % TEAM_WARPS].y;
        group_sum(v, TEAM_WARPS);
      }
      return {v[0], v[1]};
    }
  }

  // grad_x of row i, and the row's part in the weight gradients.
  __device__ void finish(int i, uint4 *slots, const Statistics &s, float2 total) {
    if (i >= rows) return;
    T *grad_x = p.grad_x == nullptr ? nullptr : p.grad_x + row(i) * p.cols + columns.first;
    const float along = total.x * p.per_col * s.rstd * s.rstd, shift = total.y * p.per_col;
    uint4 x_bits[K], g_bits[K];
    load_slots(x_bits, slots);
    load_slots(g_bits, slots + K * THREADS);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      float x[N], g[N];
      unpack<T, N>(x, x_bits[k]);
      unpack<T, N>(g, g_bits[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = CENTERED ? x[j] - s.mean : x[j], scaled = g[j] * s.rstd;
        grad_weight[k][j] = fmaf(scaled, d, grad_weight[k][j]);
        if (CENTERED) grad_bias[k][j] += g[j];
        // The product is rounded as in sums(), so that a row of one column has a gradient of exactly 0.
        x[j] = fmaf(-along, d, CENTERED ? __fmul_rn(scaled, weight[k][j]) - shift : scaled * weight[k][j]);
      }
      if (grad_x != nullptr) store_vector<T>(grad_x, slots, k, x, columns);
    }
    if (grad_x != nullptr) store_edges<T>(grad_x, slots, columns);
  }

  // One of the sums over the rows to its partial row.
  __device__ void write_partial(const float (&sums)[K][N], float *partial) const {
    float *to = partial;
    if constexpr (TEAMS > 1) {
      to = reinterpret_cast<float *>(ring - threadIdx.x) + team() * p.cols;  // the ring has no rows left
      __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (columns.in_row(k, j)) to[columns.first + k * columns.STEP + j] = sums[k][j];
      }
    }
    if constexpr (TEAMS > 1) {
      __syncthreads();
      const float *from = reinterpret_cast<const float *>(ring - threadIdx.x);
      for (int c = threadIdx.x; c < p.cols; c += THREADS) {
        float sum = 0;
        for (int t = 0; t < TEAMS; ++t) sum += from[t * p.cols + c];
        partial[c] = sum;
      }
      __syncthreads();
    }
  }

  // `turn` counts the rows of the block over all its classes.
  __device__ void run(int &turn, int64_t part) {
    // A vector that this class has not is zero throughout.
    for (int i = 0; i < p.stages * (STAGE / THREADS); ++i) {
      if (i % K >= columns.present) store_shared(ring + i * THREADS, uint4{});
    }
    for (int i = 0; i < p.stages; ++i) fetch(i, ring + i * STAGE);
    Statistics now = statistics(0), next = statistics(1);
    load_weights<T>(weight, p.weight, p.float_weight, 1, columns);
    memset(grad_weight, 0, sizeof grad_weight);
    memset(grad_bias, 0, sizeof grad_bias);
    uint4 *slots = ring, *const ring_end = ring + p.stages * STAGE;
    if (CLUSTER && turns > 0) {
      wait_for_copies(p.stages - 1);
      post<TEAM, CLUSTER>(exchange, turn, sums(slots, now), rank, p.cluster);
    }
    for (int i = 0; i < turns; ++i, ++turn) {
      uint4 *const next_slots = slots + STAGE == ring_end ? ring : slots + STAGE;
      float2 mine{};
      const Statistics after = statistics(i + 2);
      if (!CLUSTER) {
        wait_for_copies(p.stages - 1);
        mine = sums(slots, now);
        post<TEAM, CLUSTER>(exchange, turn, mine, rank, p.cluster);
      } else if (i + 1 < turns) {
        wait_for_copies(p.stages - 2);
        post<TEAM, CLUSTER>(exchange, turn + 1, sums(next_slots, next), rank, p.cluster);
      }
      finish(i, slots, now, total(turn, mine));
      fetch(i + p.stages, slots);
      slots = next_slots;
      now = next;
      next = after;
    }
    float *partial = p.partial + part * p.cols;
    if (p.wants_weight) write_partial(grad_weight, partial);
    if constexpr (CENTERED) {
      if (p.wants_bias) write_partial(grad_bias, partial + (p.wants_weight ? p.parts() * p.cols : 0));
    }
  }
};

template <typename T, bool CENTERED, int TEAM, int K, bool CLUSTER>
__global__ void __launch_bounds__(THREADS, BLOCKS<CENTERED, K * 16 / sizeof(T)>)
    backward_kernel(const __grid_constant__ Backward<T> p) {
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
    BackwardRows<T, CENTERED, TEAM, K, CLUSTER> rows(p, ring + threadIdx.x, exchange, rank, 0, chunk * TEAMS, p.rows,
                                                     p.chunks * TEAMS);
    rows.run(turn, chunk);
    return;
  }
  const int64_t first = p.rows * chunk / p.chunks, last = p.rows * (chunk + 1) / p.chunks;
  // A class that begins where the chunk ends has a partial row, too: of zeros.
  for (int64_t c = 0; c < p.classes && class_begin(p, c) <= last; ++c) {
    const int64_t start = class_begin(p, c), end = class_begin(p, c + 1);
    if (end <= first) continue;
    const int64_t b = (start > first ? start : first) - start, e = (end < last ? end : last) - start;
    BackwardRows<T, CENTERED, TEAM, K, CLUSTER> rows(p, ring + threadIdx.x, exchange, rank, c, b, e, TEAMS);
    rows.run(turn, chunk + c);
  }
}

// For what the fast kernel does not take: a block a row, which it reads twice, element by element; its partial row is in memory.
template <typename T, bool CENTERED>
__global__ void __launch_bounds__(THREADS) plain_backward_kernel(const norm_backward_args p) {
  using A = acc_t<T>;
  A *const partial = static_cast<A *>(p.partial);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    const T *x = static_cast<const T *>(p.x) + r * p.x_stride;
    const T *grad_out = static_cast<const T *>(p.grad_out) + r * p.grad_out_stride;
    const A mean = CENTERED ? static_cast<const A *>(p.mean)[r] : A(0), rstd = static_cast<const A *>(p.rstd)[r];
    A v[2] = {};
    for (int64_t c = threadIdx.x; c < p.cols; c += THREADS) {
      const A g = to_acc(grad_out[c]) * rstd * weight_at<T>(p.weight, p.weight_dtype, 1, c);
      v[0] += g * (to_acc(x[c]) - mean);
      v[1] += g;
    }
    block_sum<THREADS>(v);
    const A along = v[0] / p.cols * rstd * rstd, shift = CENTERED ? v[1] / p.cols : A(0);
    for (int64_t c = threadIdx.x; c < p.cols; c += THREADS) {
      const A g = to_acc(grad_out[c]), d = to_acc(x[c]) - mean, w = weight_at<T>(p.weight, p.weight_dtype, 1, c);
      if (p.grad_x != nullptr) {
        static_cast<T *>(p.grad_x)[r * p.cols + c] = from_acc<T>(g * rstd * w - shift - along * d);
      }
      A *sum = partial + blockIdx.x * p.cols + c;
      const bool is_first = r == blockIdx.x;
      if (p.grad_weight != nullptr) {
        *sum = (is_first ? A(0) : *sum) + g * rstd * d;
        sum += gridDim.x * p.cols;
      }
      if (p.grad_bias != nullptr) *sum = (is_first ? A(0) : *sum) + g;
    }
  }
}

constexpr int SUM_X = 32, SUM_Y = 16;

// out[c] = the sum of its column of `partial` (parts, cols), in an order that parts alone fixes; the first blocks for the first
// output, the others for the second.
template <typename A, typename W>
__global__ void __launch_bounds__(SUM_X *SUM_Y)
    sum_partial_kernel(const A *partial, W *first, W *second, int64_t parts, int64_t cols) {
  __shared__ double fold[SUM_Y][SUM_X];
#if HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");  // the kernel before may still be writing
#endif
  const int64_t blocks = (cols + SUM_X - 1) / SUM_X, c = blockIdx.x % blocks * SUM_X + threadIdx.x;
  if (blockIdx.x >= blocks) partial += parts * cols;
  double sum = 0;
  if (c < cols) {
#pragma unroll 8
    for (int64_t part = threadIdx.y; part < parts; part += SUM_Y) sum += partial[part * cols + c];
  }
  fold[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || c >= cols) return;
  for (int y = 1; y < SUM_Y; ++y) sum += fold[y][threadIdx.x];
  (blockIdx.x < blocks ? first : second)[c] = from_acc<W>(static_cast<acc_t<W>>(sum));
}

template <typename A>
cudaError_t sum_partial(const norm_backward_args &args, int64_t parts, cudaStream_t stream) {
  void *outputs[2] = {args.grad_weight, args.grad_bias};
  if (outputs[0] == nullptr) std::swap(outputs[0], outputs[1]);
  if (outputs[0] == nullptr) return cudaSuccess;
  const int64_t blocks = ceil_div(args.cols, SUM_X) * (outputs[1] == nullptr ? 1 : 2);
  Launch launch(static_cast<unsigned>(blocks), dim3(SUM_X, SUM_Y), 0, stream);
  return with_dtype(args.weight_dtype, [&](auto zero) {
    using W = decltype(zero);
    if (is_for_sm_90(reinterpret_cast<const void *>(sum_partial_kernel<A, W>))) launch.overlap();
    return cudaLaunchKernelEx(&launch.config, sum_partial_kernel<A, W>, static_cast<const A *>(args.partial),
                              static_cast<W *>(outputs[0]), static_cast<W *>(outputs[1]), parts, args.cols);
  });
}

template <typename T>
cudaError_t plain_backward(const norm_backward_args &args, cudaStream_t stream) {
  const int64_t blocks = args.rows < MAX_PARTS ? args.rows : MAX_PARTS;
  const auto kernel = args.mean ? plain_backward_kernel<T, true> : plain_backward_kernel<T, false>;
  if (blocks > 0) kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  return error != cudaSuccess ? error : sum_partial<acc_t<T>>(args, blocks, stream);
}

// The same call with the parameters of the fast kernel.
template <typename T>
Backward<T> fast_parameters(const norm_backward_args &args) {
  Backward<T> p{};
  p.grad_out = static_cast<const T *>(args.grad_out);
  p.x = static_cast<const T *>(args.x);
  p.mean = static_cast<const float *>(args.mean);
  p.rstd = static_cast<const float *>(args.rstd);
  p.weight = args.weight;
  p.float_weight = args.weight_dtype != args.dtype;
  p.wants_weight = args.grad_weight != nullptr;
  p.wants_bias = args.grad_bias != nullptr;
  p.grad_x = static_cast<T *>(args.grad_x);
  p.partial = static_cast<float *>(args.partial);
  p.x_stride = args.x_stride;
  p.grad_out_stride = args.grad_out_stride;
  return p;
}

template <typename T, bool CENTERED>
cudaError_t backward(const norm_backward_args &args, cudaStream_t stream) {
  Backward<T> p = fast_parameters<T>(args);
  const RowsOf<T> tensors[] = {{p.x, p.x_stride}, {p.grad_out, p.grad_out_stride}, {p.grad_x, args.cols}};
  if (args.rows == 0 || !align_rows(p, args.rows, args.cols, tensors, 3)) return plain_backward<T>(args, stream);
  bool launched = false;
  const cudaError_t error = with_shape<T>(p, [&](auto team, auto k, auto cluster) {
    return launch_rows<2, team, k, cluster, BLOCKS<CENTERED, k * 16 / sizeof(T)>>(
        backward_kernel<T, CENTERED, team, k, cluster>, p, MAX_PARTS, stream, launched);
  });
  if (error != cudaSuccess) return error;
  if (!launched) return plain_backward<T>(args, stream);
  return sum_partial<float>(args, p.parts(), stream);
}

}  // namespace norm_cuda

extern "C" int64_t norm_partial_cuda(const norm_backward_args *args) {
  const int64_t sums = (args->grad_weight != nullptr) + (args->grad_bias != nullptr);
  const int64_t parts = args->rows < norm_cuda::MAX_PARTS ? args->rows + norm_cuda::MAX_CLASSES : norm_cuda::MAX_PARTS;
  return sums * parts * args->cols * (args->dtype == DTYPE_FLOAT64 ? sizeof(double) : sizeof(float));
}

extern "C" int norm_backward_cuda(const norm_backward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_backward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    return args->mean ? backward<T, true>(*args, on) : backward<T, false>(*args, on);
  });
}
