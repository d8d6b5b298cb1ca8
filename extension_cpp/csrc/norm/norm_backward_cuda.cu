// The gradients of layer_norm and rms_norm on the GPU: norm_backward_direct.cuh or norm_backward_rows.cuh, and then a second kernel that adds
// the partial rows of the weight gradients in order; of few rows, and for grad_x alone, norm_backward_few.cuh. Nothing is atomic.
#include <algorithm>
#include <array>
#include <numeric>

#include "norm/norm_backward_direct.cuh"
#include "norm/norm_backward_few.cuh"
#include "norm/norm_backward_rows.cuh"
#include "norm/norm_launch.cuh"
#include "norm/norm_plain_backward.cuh"

namespace norm_cuda {

// The same call with the parameters of the fast kernel.
template <typename T>
Backward<T> fast_parameters(const norm_backward_args &args) {
  Backward<T> p{};
  p.grad_out = static_cast<const T *>(args.grad_out);
  p.x = static_cast<const T *>(args.x);
  p.mean = static_cast<const float *>(args.mean);
  p.rstd = static_cast<const float *>(args.rstd);
  p.weight = {args.weight, 1, args.weight_dtype != args.dtype};
  p.wants_weight = args.grad_weight != nullptr;
  p.wants_bias = args.grad_bias != nullptr;
  p.grad_x = static_cast<T *>(args.grad_x);
  p.partial = static_cast<float *>(args.partial);
  p.x_stride = args.x_stride;
  p.grad_out_stride = args.grad_out_stride;
  p.grad_sum = static_cast<const T *>(args.grad_sum);
  p.grad_sum_stride = args.grad_sum_stride;
  p.grad_dropped = static_cast<T *>(args.grad_dropped);
  p.dropout = args.dropout_y.seed == nullptr ? args.dropout_x : args.dropout_y;
  return p;
}

// Rows of odd or great width that are few: the kernel that adds the partial rows comes early (of others: norm_backward_few.cuh).
constexpr int EARLY_SUM_ROWS = 512;

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, bool CLUSTER, bool ODD, int FULL,
          bool PACKED>
__global__ void __launch_bounds__(THREADS<TEAM>,
                                  BLOCKS<CENTERED, FUSED, TEAM, K, VECTOR<T>, CLUSTER, ODD>)
    backward_kernel(const __grid_constant__ Backward<T> p) {
  if constexpr (CLUSTER && !HAS_CLUSTERS) return;
  using Rows = BackwardRows<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD, FULL, PACKED>;
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ Exchange<TEAM, CLUSTER> exchanges[Rows::TEAMS];
  Exchange<TEAM, CLUSTER> &exchange = exchanges[Rows::team()];
  const int64_t chunk = blockIdx.x / p.cluster;
  int rank = 0;
#if HAS_CLUSTERS
  if (CLUSTER) rank = cluster_rank();
#endif
  exchange.open(Rows::lane());
#if HAS_CLUSTERS
  // The kernel that adds the partial rows may take its places now, and wait there. Of many rows it would be in the way.
  if (p.rows <= EARLY_SUM_ROWS) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  Rows rows(p, shared + Rows::team() * p.stages * Rows::TENSORS * p.slot, exchange, chunk, rank);
  rows.run(chunk, reinterpret_cast<float *>(shared));
  let_rows_go<FUSED>(p);
#if HAS_CLUSTERS
  if (CLUSTER) sync_cluster();  // no block ends while another still sends to it
#endif
}

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int ELEMENTS, bool CLUSTER, bool ODD,
          int FULL = 0, bool PACKED = false>
cudaError_t launch_backward(Backward<T> &p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>, K = ELEMENTS / N,
                blocks = BLOCKS<CENTERED, FUSED, TEAM, K, N, CLUSTER, ODD>;
  using Rows = BackwardRows<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD, FULL, PACKED>;
  // KB; a row that is read again holds its place for a turn more. Odd rows want a third row a team in the shapes of THIRD (by the sweeps).
  constexpr bool THIRD = ODD && FUSED == ALONE && (sizeof(T) == 2 || TEAM == 16 || TEAM > 256);
  constexpr int ring = CLUSTER          ? (Rows::REREAD && FUSED == ALONE                   ? 227
                                           : sizeof(T) == 4 || FUSED == ADDED || TEAM > 256 ? 192
                                                                                            : 128)
                       : THIRD          ? 176
                       : Rows::KEEP     ? 96
                       : FUSED == ADDED ? 144
                                        : 128;
  constexpr auto kernel = backward_kernel<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD, FULL, PACKED>;
  // With dropout more rows are slower, as measured.
  const int most =
      CLUSTER && FUSED == ADDED && sizeof(T) == 2 && p.grad_dropped != nullptr ? 4 : MAX_STAGES;
  return launch_ring<kernel, Rows::TENSORS, TEAM, K, N, CLUSTER, blocks, ODD, FULL>(
      p, (ring << 10) / blocks, Rows::REREAD ? 3 : 2, most, max_parts(p.cols), stream);
}

// Clusters of this shape: by the kernel whose threads have all vectors but one, if they do.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int ELEMENTS, bool ODD>
cudaError_t launch_shape(Backward<T> &p, cudaStream_t stream) {
  constexpr int K = ELEMENTS / VECTOR<T>, FULL = K - 1;
  if constexpr (ODD && CENTERED && FUSED == ALONE && sizeof(T) == 2 && (K == 5 || TEAM > 256)) {
    if (p.weight.is_own()) {
      return launch_backward<T, CENTERED, FUSED, TEAM, ELEMENTS, true, ODD, FULL, true>(p, stream);
    }
  }
  return launch_backward<T, CENTERED, FUSED, TEAM, ELEMENTS, true, ODD, FULL>(p, stream);
}

// first_to_take() of f(shape), the shapes in the order of how many rows they take a time: a row takes a thread its vectors' time, and
// about that of `more` vectors; with many of them one more, with many threads half a one.
template <int N, typename F, typename... S>
cudaError_t by_rate(int cols, int more, Shapes<S...>, F &&f) {
  const auto rate = [&](auto shape) {
    using Each = decltype(shape);
    constexpr int columns = Each::TEAM * Each::ELEMENTS;
    const double size = std::max<double>(2, ceil_div(cols, columns));
    const double all = Each::ELEMENTS / N + more +
                       (Each::ELEMENTS > 4 * N ? 1
                        : Each::TEAM > 320     ? 0.5
                                               : 0);
    return places_taken(cols, columns, 1) / (size * Each::TEAM * all);
  };
  const double rates[] = {rate(S{})...};
  std::array<size_t, sizeof...(S)> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return rates[a] > rates[b]; });
  cudaError_t error = NOT_TAKEN;
  for (const size_t next : order) {
    size_t i = 0;
    ((i++ == next && error == NOT_TAKEN ? void(error = f(S{})) : void()), ...);
  }
  return error;
}

// Rows wider than a block.
template <typename T, bool CENTERED, Fused FUSED, bool ODD>
cudaError_t launch_cluster(Backward<T> &p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>;
  using Halves = Shapes<Shape<256, 5 * N>, Shape<256, 3 * N>, Shape<256, 4 * N>, Shape<384, 4 * N>>;
  using Floats = Shapes<Shape<256, 4 * N>, Shape<256, 7 * N>, Shape<320, 4 * N>, Shape<384, 4 * N>>;
  using FusedHalves = Shapes<Shape<256, 4 * N>, Shape<256, 3 * N>>;
  using Alone = std::conditional_t<N == 8, Halves, Floats>;
  using Others = std::conditional_t<N == 8, FusedHalves, Shapes<Shape<256, 4 * N>>>;
  const int cols = p.cols / N * N;  // those of an odd row's ends have places of their own
  cudaError_t error = NOT_TAKEN;
  if constexpr (N == 4) {
    if (places_taken(cols, 256 * 4 * N, 1) >= 28) {
      error = launch_shape<T, CENTERED, FUSED, 256, 4 * N, ODD>(p, stream);
      if (error != NOT_TAKEN) return error;
    }
  }
  error = by_rate<N>(
      cols, CENTERED ? 2 : 1, std::conditional_t<FUSED == ALONE, Alone, Others>{}, [&](auto shape) {
        using S = decltype(shape);
        return launch_shape<T, CENTERED, FUSED, S::TEAM, S::ELEMENTS, ODD>(p, stream);
      });
  // Where some threads have fewer vectors than that, or the chip does not run clusters of these sizes.
  if (error == NOT_TAKEN)
    error = launch_backward<T, CENTERED, FUSED, 256, 4 * N, true, ODD>(p, stream);
  if constexpr (N == 4) {
    if (error == NOT_TAKEN)
      error = launch_backward<T, CENTERED, FUSED, 512, 4 * N, true, ODD>(p, stream);
  }
  return error;
}

template <typename T, bool CENTERED, Fused FUSED, bool ODD>
cudaError_t launch_backward(Backward<T> &p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>;
  constexpr bool HALF = N == 8;
  constexpr int WIDEST = CENTERED ? 24 : 32;
  using OddHalves = Shapes<Shape<16, 8>, Shape<16, 16>, Shape<16, 24>, Shape<32, 16>, Shape<16, 40>,
                           Shape<16, 48>, Shape<32, 32>, Shape<32, 40>, Shape<32, 48>,
                           Shape<64, 32>, Shape<64, 40>, Shape<64, 48>, Shape<128, 32>,
                           Shape<128, 40>, Shape<128, 48>, Shape<256, 32>>;
  using Halves =
      Shapes<Shape<8, 8>, Shape<8, 32>, Shape<16, 24>, Shape<16, 32>, Shape<16, 40>, Shape<32, 24>,
             Shape<32, 32>, Shape<32, 40>, Shape<64, 24>, Shape<64, 32>, Shape<96, 24>,
             Shape<64, 40>, Shape<128, 24>, Shape<128, 32>, Shape<128, 40, 4608>, Shape<224, 24>,
             Shape<256, 24>, Shape<512, 16>, Shape<256, 40>>;
  using OddFloats = Shapes<Shape<16, 8>, Shape<16, 16>, Shape<16, 24>, Shape<32, 16>, Shape<32, 24>,
                           Shape<32, 32>, Shape<64, 24>, Shape<64, 32>, Shape<128, 24>,
                           Shape<256, 16, 3840>, Shape<128, 32>, Shape<384, 16>>;
  using Floats =
      Shapes<Shape<8, 8>, Shape<16, 16>, Shape<32, 16, 384>, Shape<16, 32>, Shape<32, 32>,
             Shape<64, 32>, Shape<128, 32>, Shape<256, WIDEST>>;  // most others go directly
  using FusedHalves =
      std::conditional_t<ODD,
                         Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<64, 32>,
                                Shape<128, 32>, Shape<512, 16>>,
                         Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<32, 40>,
                                Shape<64, 24>, Shape<64, 32>, Shape<64, 40>, Shape<128, 24>,
                                Shape<128, 32>, Shape<128, 40>, Shape<512, 16>>>;
  // add_layer_norm's floats at odd widths would spill with 32 elements a thread.
  using FusedFloats = std::conditional_t<
      ODD && CENTERED && FUSED == ADDED,
      Shapes<Shape<32, 8>, Shape<32, 16>, Shape<32, 24>, Shape<64, 16>, Shape<128, 12>,
             Shape<128, 16>, Shape<256, 12>, Shape<256, 16>>,
      Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<64, 32>, Shape<128, 32>>>;
  using Alone = std::conditional_t<HALF, std::conditional_t<ODD, OddHalves, Halves>,
                                   std::conditional_t<ODD, OddFloats, Floats>>;
  using Others = std::conditional_t<HALF, FusedHalves, FusedFloats>;
  using Known = std::conditional_t<FUSED == ALONE, Alone, Others>;
  const cudaError_t error = with_shape<N>(p.cols, Known{}, [&](auto shape) {
    using S = decltype(shape);
    return launch_backward<T, CENTERED, FUSED, S::TEAM, S::ELEMENTS, false, ODD>(p, stream);
  });
  if (error != NOT_TAKEN) return error;
  if constexpr (!ODD) {  // rows that begin between two lines
    if (p.cols * sizeof(T) % 128 > 0) return launch_cluster<T, CENTERED, FUSED, true>(p, stream);
  }
  return launch_cluster<T, CENTERED, FUSED, ODD>(p, stream);
}

// Rows of more bytes are faster if what is read does not outlast what is written.
constexpr size_t WIDE = 128 << 10;

// Whether the rows of all tensors, `g` their shape, begin alike between multiples of 16 bytes.
template <typename T>
bool are_in_step(const Geometry &g, const norm_backward_args &args) {
  return is_in_step<T>(g, args.x, args.x_stride) &&
         is_in_step<T>(g, args.grad_out, args.grad_out_stride) &&
         is_in_step<T>(g, args.grad_x, args.cols) &&
         is_in_step<T>(g, args.grad_sum, args.grad_sum_stride) &&
         is_in_step<T>(g, args.grad_dropped, args.cols) && is_aligned(args.weight);
}

// One column: the gradient is exactly 0, which needs the plain kernel's order of operations.
template <typename T>
bool takes_plain(Geometry &g, const norm_backward_args &args) {
  return args.rows == 0 || args.cols == 1 || !set_shape(g, args.rows, args.cols) ||
         !are_in_step<T>(g, args);
}

// Whether grad_x is more than the norm's: ADDED.
inline bool is_added(const norm_backward_args &args) {
  return args.grad_sum != nullptr || args.grad_dropped != nullptr;
}

// Whether norm_backward_few.cuh takes them, which needs no scratch.
template <typename T>
bool takes_few(const norm_backward_args &args) {
  Geometry g;
  return are_few<T>(args.rows, args.cols, is_added(args)) && !takes_plain<T>(g, args);
}

// How long what is read stays in the L2: as measured, alone and with a kernel behind it that reads grad_x.
template <typename T>
CachePolicy policy_of(const Backward<T> &p, int64_t cache) {
  const int64_t bytes = bytes_of<T>(p), row = p.cols * static_cast<int64_t>(sizeof(T));
  if (cache == 0) return USUAL;
  if (bytes >= 2 * cache) return row > WIDE ? NORMAL : OUTLASTS;
  if (p.grad_dropped != nullptr) return bytes >= cache && row <= WIDE ? OUTLASTS : USUAL;
  return bytes <= (sizeof(T) == 2 ? 32 : 16) << 20 ? GOES_FIRST : USUAL;
}

template <typename T, bool CENTERED, Fused FUSED>
cudaError_t backward(const norm_backward_args &args, cudaStream_t stream) {
  Backward<T> p = fast_parameters<T>(args);
  if (takes_plain<T>(p, args)) return plain_backward<T>(args, stream);
  const auto few = [&] { return FewBackward<T>{p, args.grad_weight, args.grad_bias, 0}; };
  if (takes_few<T>(args)) return few_backward<T, CENTERED, FUSED>(few(), stream);
  const int tensors = 2 + (p.grad_sum != nullptr);
  int cache;
  cudaError_t error = hopper_cache(cache, tensors * bytes_of<T>(p));
  if (error != cudaSuccess) return error;
  set_policy<T>(p, policy_of(p, cache), tensors, cache);
  error = NOT_TAKEN;
  if (args.cols % VECTOR<T> == 0) {
    if constexpr (FUSED != DROPPED) {
      if (!p.wants_weight && !p.wants_bias)
        error = rows_backward<T, CENTERED, FUSED>(few(), stream);
      if (error != NOT_TAKEN) return error;
      if (p.weight.is_own() && p.grad_dropped == nullptr) {
        error = direct_backward<T, CENTERED, FUSED, false, T>(p, tensors, cache, stream);
      }
    }
    if constexpr (FUSED == ALONE && sizeof(T) == 2) {
      if (p.weight.data != nullptr && p.weight.is_float) {
        error = direct_backward<T, CENTERED, FUSED, false, float>(p, tensors, cache, stream);
      }
    }
    if constexpr (FUSED == DROPPED || (FUSED == ADDED && sizeof(T) == 2)) {
      if (p.weight.is_own() && (FUSED == DROPPED || p.grad_dropped != nullptr)) {
        error = direct_backward<T, CENTERED, FUSED, true, T>(p, tensors, cache, stream);
      }
    }
    if (error == NOT_TAKEN) error = launch_backward<T, CENTERED, FUSED, false>(p, stream);
  } else {
    error = launch_backward<T, CENTERED, FUSED, true>(p, stream);
  }
  if (error == NOT_TAKEN) return plain_backward<T>(args, stream);
  return error != cudaSuccess ? error : sum_partial<float>(args, p.chunks, stream);
}

}  // namespace norm_cuda

extern "C" int64_t norm_partial_cuda(const norm_backward_args *args) {
  using namespace norm_cuda;
  const bool few =
      args->dtype == DTYPE_FLOAT32
          ? takes_few<float>(*args)
          : args->dtype != DTYPE_FLOAT64 && takes_few<__half>(*args);  // bfloat16 is as long
  if (few) return 0;
  const int64_t sums = (args->grad_weight != nullptr) + (args->grad_bias != nullptr);
  const int64_t parts = std::min(args->rows, max_parts(args->cols));
  return sums * parts * args->cols *
         (args->dtype == DTYPE_FLOAT64 ? sizeof(double) : sizeof(float));
}

extern "C" int norm_backward_cuda(const norm_backward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_backward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (is_added(*args)) {
      return args->mean ? backward<T, true, ADDED>(*args, on)
                        : backward<T, false, ADDED>(*args, on);
    }
    if (args->dropout_y.seed) return backward<T, true, DROPPED>(*args, on);
    return args->mean ? backward<T, true, ALONE>(*args, on) : backward<T, false, ALONE>(*args, on);
  });
}
