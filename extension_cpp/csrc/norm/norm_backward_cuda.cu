// The gradients of layer_norm and rms_norm on the GPU: norm_backward_rows.cuh, and then a second kernel that adds the partial rows of
// the weight gradients in order. Nothing is atomic.
#include "norm/norm_backward_rows.cuh"
#include "norm/norm_launch.cuh"
#include "norm/norm_plain.cuh"

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

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int ELEMENTS, bool CLUSTER, bool ODD>
cudaError_t launch_backward(Backward<T> &p, cudaStream_t stream, bool &launched) {
  constexpr int N = VECTOR<T>, K = ELEMENTS / N, blocks = BLOCKS<CENTERED, FUSED, TEAM, K, N, CLUSTER, ODD>;
  constexpr bool KEEP = KEEPS<T, CENTERED, FUSED, ELEMENTS>;
  constexpr int ring = (CLUSTER          ? (sizeof(T) * ELEMENTS > 32 ? 192 : 128)
                        : KEEP           ? 96
                        : FUSED == ADDED ? 144
                                         : 128)
                       << 10;
  using Rows = BackwardRows<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD>;
  constexpr auto kernel = backward_kernel<T, CENTERED, FUSED, TEAM, K, CLUSTER, ODD>;
  // A row that is read again holds its place for a turn more.
  return launch_ring<kernel, Rows::TENSORS, TEAM, K, N, CLUSTER, blocks, ODD>(p, ring / blocks, Rows::REREAD ? 3 : 2,
                                                                              max_parts(p.cols), stream, launched);
}

template <typename T, bool CENTERED, Fused FUSED, bool ODD>
cudaError_t launch_backward(Backward<T> &p, cudaStream_t stream, bool &launched) {
  constexpr int N = VECTOR<T>;
  constexpr bool HALF = N == 8;
  constexpr int WIDEST = CENTERED ? 24 : 32;
  using OddHalves =
      Shapes<Shape<16, 8>, Shape<32, 8>, Shape<32, 16>, Shape<32, 24>, Shape<32, 32>, Shape<32, 40>, Shape<64, 32>,
             Shape<128, 24>, Shape<128, 32>, Shape<128, 40>, Shape<256, 24>, Shape<512, 16>>;
  using Halves =
      Shapes<Shape<8, 8>, Shape<8, 32>, Shape<16, 24>, Shape<16, 32>, Shape<16, 40>, Shape<32, 24>, Shape<32, 32>,
             Shape<32, 40>, Shape<64, 24>, Shape<64, 32>, Shape<96, 24>, Shape<64, 40>, Shape<128, 24>, Shape<128, 32>,
             Shape<128, 40, 4608>, Shape<224, 24>, Shape<256, 24>, Shape<512, 16>, Shape<256, 40>>;
  using OddFloats = Shapes<Shape<16, 8>, Shape<32, 8>, Shape<32, 16>, Shape<32, 24>, Shape<32, 32>, Shape<64, 24>,
                           Shape<64, 32>, Shape<128, 24>, Shape<128, 32>, Shape<256, 24>>;
  using Floats =
      Shapes<Shape<8, 8>, Shape<16, 16>, Shape<32, 16, 384>, Shape<16, 32>, Shape<32, 24>, Shape<32, 32>, Shape<64, 24>,
             Shape<64, 32>, Shape<96, 24>, Shape<128, 24>, Shape<128, 32>, Shape<256, 24>, Shape<256, WIDEST>>;
  using FusedHalves = std::conditional_t<
      ODD, Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<64, 32>, Shape<128, 32>, Shape<512, 16>>,
      Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<32, 40>, Shape<64, 24>, Shape<64, 32>, Shape<64, 40>,
             Shape<128, 24>, Shape<128, 32>, Shape<128, 40>, Shape<512, 16>>>;
  // add_layer_norm's floats at odd widths would spill with 32 elements a thread.
  using FusedFloats =
      std::conditional_t<ODD && CENTERED && FUSED == ADDED,
                         Shapes<Shape<32, 8>, Shape<32, 16>, Shape<32, 24>, Shape<64, 16>, Shape<128, 12>,
                                Shape<128, 16>, Shape<256, 12>, Shape<256, 16>>,
                         Shapes<Shape<32, 8>, Shape<32, 24>, Shape<32, 32>, Shape<64, 32>, Shape<128, 32>>>;
  using Alone =
      std::conditional_t<HALF, std::conditional_t<ODD, OddHalves, Halves>, std::conditional_t<ODD, OddFloats, Floats>>;
  using Others = std::conditional_t<HALF, FusedHalves, FusedFloats>;
  using Known = std::conditional_t<FUSED == ALONE, Alone, Others>;
  const auto launch = [&](auto shape) {
    using S = decltype(shape);
    return launch_backward<T, CENTERED, FUSED, S::TEAM, S::ELEMENTS, false, ODD>(p, stream, launched);
  };
  cudaError_t error = cudaErrorNotSupported;
  if constexpr (!ODD) {
    // Few rows: as many threads for each as leave a multiprocessor, of which a chip has 128 or a few more, one turn.
    if (p.rows <= FEW_ROWS / 4) {
      error = with_shape<N>(p.cols, Shapes<Shape<256, 16>>{}, launch);
    } else if (p.rows <= FEW_ROWS / 2) {
      error = with_shape<N>(p.cols, Shapes<Shape<128, 16>>{}, launch);
    } else if (p.rows <= FEW_ROWS) {
      error = with_shape<N>(p.cols, Shapes<Shape<64, 16>>{}, launch);
    }
  }
  if (error == cudaErrorNotSupported) error = with_shape<N>(p.cols, Known{}, launch);
  if (error != cudaErrorNotSupported) return error;
  error = cudaSuccess;
  const auto attempt = [&](auto shape) {
    using S = decltype(shape);
    if (error != cudaSuccess || launched) return;
    error = launch_backward<T, CENTERED, FUSED, S::TEAM, S::ELEMENTS, true, ODD>(p, stream, launched);
  };
  // The best first; another if the chip does not run clusters of its size.
  [[maybe_unused]] const auto size = [&](int vectors) {
    return std::max<int64_t>(2, ceil_div(p.cols, 256 * vectors * N));
  };
  if constexpr (HALF && FUSED == ALONE) {
    // The most rows a time: one costs a thread its vectors, and about as much as so many more.
    const auto rate = [&](int vectors, int more) {
      return places_taken(p.cols, 256 * vectors * N, 1) / static_cast<double>(size(vectors) * (vectors + more));
    };
    const int more = CENTERED ? 2 : 1;
    const double most = std::max(rate(3, more), rate(4, more));
    if (rate(5, 2) > most) {  // one that is read twice
      attempt(Shape<256, 5 * N>{});
    } else if (rate(3, more) == most) {
      attempt(Shape<256, 3 * N>{});
    }
  } else if constexpr (HALF && !ODD) {
    if (size(3) == size(4)) attempt(Shape<256, 3 * N>{});
  } else if constexpr (!HALF && FUSED == ALONE) {
    if (!is_spread(p.cols, 256 * 16, 1)) {
      if (is_spread(p.cols, 320 * 16, 1)) {
        attempt(Shape<320, 16>{});
      } else if (is_spread(p.cols, 384 * 16, 1)) {
        attempt(Shape<384, 16>{});
      }
    }
  }
  attempt(Shape<256, 4 * N>{});
  if constexpr (HALF && FUSED == ALONE) attempt(Shape<256, 5 * N>{});
  if constexpr (!HALF) attempt(Shape<512, 16>{});
  return error;
}

template <typename T, bool CENTERED, Fused FUSED>
cudaError_t backward(const norm_backward_args &args, cudaStream_t stream) {
  Backward<T> p = fast_parameters<T>(args);
  // One column: the gradient is exactly 0, which needs the plain kernel's order of operations.
  if (args.rows == 0 || args.cols == 1 || !set_shape(p, args.rows, args.cols)) return plain_backward<T>(args, stream);
  const bool in_step =
      is_in_step<T>(p, args.x, args.x_stride) && is_in_step<T>(p, args.grad_out, args.grad_out_stride) &&
      is_in_step<T>(p, args.grad_x, args.cols) && is_in_step<T>(p, args.grad_sum, args.grad_sum_stride) &&
      is_in_step<T>(p, args.grad_dropped, args.cols) && is_aligned(args.weight);
  if (!in_step) return plain_backward<T>(args, stream);
  bool launched = false;
  const cudaError_t error = args.cols % VECTOR<T> == 0 ? launch_backward<T, CENTERED, FUSED, false>(p, stream, launched)
                                                       : launch_backward<T, CENTERED, FUSED, true>(p, stream, launched);
  if (error != cudaSuccess) return error;
  if (!launched) return plain_backward<T>(args, stream);
  return sum_partial<float>(args, p.chunks, stream);
}

}  // namespace norm_cuda

extern "C" int64_t norm_partial_cuda(const norm_backward_args *args) {
  const int64_t sums = (args->grad_weight != nullptr) + (args->grad_bias != nullptr);
  const int64_t parts = std::min(args->rows, norm_cuda::max_parts(args->cols));
  return sums * parts * args->cols * (args->dtype == DTYPE_FLOAT64 ? sizeof(double) : sizeof(float));
}

extern "C" int norm_backward_cuda(const norm_backward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_backward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args->grad_sum || args->grad_dropped) {
      return args->mean ? backward<T, true, ADDED>(*args, on) : backward<T, false, ADDED>(*args, on);
    }
    if (args->dropout_y.seed) return backward<T, true, DROPPED>(*args, on);
    return args->mean ? backward<T, true, ALONE>(*args, on) : backward<T, false, ALONE>(*args, on);
  });
}
