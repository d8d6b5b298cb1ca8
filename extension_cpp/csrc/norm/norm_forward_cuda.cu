// layer_norm and rms_norm on the GPU, in one pass over x (norm_rows.cuh says how rows meet threads).
//
// Rows that fit into a block's registers: a team a row, most often the block's only one, and as many blocks as there are rows for. Odd
// rows: norm_forward_odd.cuh; wide rows, which several blocks share: norm_forward_cluster.cuh and norm_forward_ring.cuh; which shape
// takes which width: norm_forward_shapes.cuh. What is read of large tensors outlasts in the L2 what is written (cuda_cache.cuh).
#include "norm/norm_forward_odd.cuh"
#include "norm/norm_forward_ring.cuh"
#include "norm/norm_forward_shapes.cuh"
#include "norm/norm_plain_forward.cuh"

namespace norm_cuda {

// Bytes of x up to which its rows are few, as measured: more where float weights beside half types fill the threads of FewShapes.
constexpr int64_t most_of_few(int cols, bool are_floats) {
  const bool fill = cols >= 512 && (cols & (cols - 1)) == 0;
  return (!are_floats || !fill ? 2 : cols > 4096 ? 4 : 8) << 20;
}

// Threads that a multiprocessor holds, as far as registers do: the more blocks, the steadier. A few shapes of add_layer_norm spill by it.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int E>
constexpr int RESIDENT = FUSED == ADDED && sizeof(T) == 4 ? 512
                         : CENTERED &&FUSED == ALONE && sizeof(T) == 4 && TEAM > 256 && E <= 16
                             ? 1536
                         : CENTERED &&FUSED == ALONE && sizeof(T) == 2 && TEAM <= 32 && E == 24
                             ? 1280
                         : E > (sizeof(T) == 2 && FUSED == ALONE ? 40 : 32) ||
                                 (FUSED == ADDED && E <= 16)
                             ? 768
                             : 1024;

// When the weights are asked for: where registers are left for them before the row, or behind it; else when its sums are there. As
// measured.
enum When { BEFORE, BEHIND, LAST };
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, typename W>
__host__ __device__ constexpr When weights_come() {
  constexpr bool HALF = sizeof(T) == 2;
  if (std::is_same_v<W, Any>) return LAST;
  if (K <= 2) return BEFORE;
  if (!std::is_same_v<W, T>) return LAST;
  if (K > 4) return LAST;
  if (FUSED == DROPPED) return K == 3 ? BEFORE : LAST;
  if (FUSED == ADDED && HALF) return K == 4 ? LAST : TEAM <= 192 ? BEHIND : BEFORE;
  if (FUSED == ADDED) return TEAM <= 128 || TEAM == 256 ? BEFORE : LAST;
  if ((TEAM > 256 && (CENTERED || HALF)) || (CENTERED && HALF && K == 3)) return LAST;
  return !CENTERED && HALF && K == 4 && TEAM > 32 ? BEHIND : BEFORE;
}

// Whether the mean's sum comes before that of squared deviations, as float needs it where the mean is large; with dropout or a residual
// that is also fewer instructions, of which they have enough.
template <typename T, bool CENTERED, Fused FUSED>
constexpr bool TWICE = CENTERED && (sizeof(T) == 4 || FUSED != ALONE);

// EXACT: the row is as wide as the shape, and all threads have all vectors. W: the type of the weights, which are there, or Any: then the
// compiler loads them one by one, with branches in the way, and of few rows the time to fetch these branches' code shows.
template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, int BLOCK, bool EXACT,
          typename W>
__global__ void __launch_bounds__(
    BLOCK, resident(BLOCK, RESIDENT<T, CENTERED, FUSED, TEAM, K * VECTOR<T>> / BLOCK))
    forward_kernel(const __grid_constant__ Forward<T> p) {
  constexpr int TEAMS = BLOCK / TEAM, N = VECTOR<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * TEAMS + threadIdx.x / TEAM;
  const bool is_row = row < p.rows;  // all lanes of a warp go on: they sum together
  const Columns<TEAM, K, N, false> columns(p, row, threadIdx.x % TEAM, 0);
  if (EXACT) __builtin_assume(columns.left > (K - 1) * TEAM * N);
  Part<T, TEAM, K, N, false> part{};
  Mask<TEAM, K, N, false> mask{};
  constexpr When WHEN = weights_come<T, CENTERED, FUSED, TEAM, K, W>();
  using Mine = Held<std::conditional_t<std::is_same_v<W, Any>, T, W>, TEAM, K, N>;
  Mine weight, bias;
  if (WHEN == BEFORE) {
    weight.template load<true>(p.weight, columns);
    if (CENTERED) bias.template load<true>(p.bias, columns);
  }
  if (is_row) {
    part.load(p.x + row * p.x_stride, columns, p.policy);
    Part<T, TEAM, K, N, false> residual;
    if (FUSED == ADDED) residual.load(p.residual + row * p.residual_stride, columns, p.policy);
    if (FUSED != ALONE && p.dropout.seed != nullptr)
      mask.make(p.dropout, *p.dropout.seed, row * p.cols, columns);
    if constexpr (FUSED == ADDED) add_residual(part, residual, p, row, mask, columns);
  }
  if (WHEN == BEHIND) {
    weight.template load<false>(p.weight, columns);
    if (CENTERED) bias.template load<false>(p.bias, columns);
  }
  float x[K][N], shift = 0;  // TWICE: x becomes its distance from a mean that is `shift` off
  Moments moments[1];
  if constexpr (TWICE<T, CENTERED, FUSED>) {
    moments[0] = moments_twice<T, TEAM, BLOCK>(x, shift, part, columns, p);
  } else {
    constexpr bool FILLS = sizeof(T) == 2;
    moments[0] =
        moments_of<T, CENTERED, FILLS>(part, columns, columns.count_of(threadIdx.x % TEAM / 32));
    join_team<CENTERED, TEAM, BLOCK>(moments, p.per_col);
  }
  const float mean = moments[0].mean, rstd = rstd_of(moments[0], p.per_col, p.eps);
  if (!is_row) return;
  if (threadIdx.x % TEAM == 0) write_statistics<CENTERED>(p, row, mean, rstd);
  T *const y = p.y + row * p.cols;
  const auto widen_weights = [&](float(&w)[N], const Weights &weights, const Mine &held, int k) {
    if constexpr (WHEN != LAST) {
      held.get(w, k);
    } else if constexpr (std::is_same_v<W, Any>) {
      weights.template load<T>(w, columns.column(k));
    } else {
      weights.template load_as<W, N, true>(w, columns.column(k));
    }
  };
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float w[N], b[N];
    widen_weights(w, p.weight, weight, k);
    if (CENTERED) widen_weights(b, p.bias, bias, k);
    if constexpr (TWICE<T, CENTERED, FUSED>) {
      normalize_distance<T>(x[k], shift, rstd, w, b);
    } else {
      unpack<T, N>(x[k], part.bits[k]);
      normalize<CENTERED>(x[k], mean, rstd, w, b);
    }
    if (FUSED == DROPPED) drop(x[k], p.dropout, mask.of(k));
    store<T, N>(y + columns.column(k), x[k]);
  }
  if (row < p.let_go) return;
  let_go(p.x + row * p.x_stride, columns);
  if (FUSED == ADDED) let_go(p.residual + row * p.residual_stride, columns);
}

template <typename T, bool CENTERED, Fused FUSED, int TEAM, int K, typename W>
cudaError_t launch_odd(const Forward<T> &p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>, ROWS = odd_rows<T, CENTERED, FUSED, TEAM, K, W>(),
                TEAMS = THREADS<TEAM> / TEAM;
  const int64_t teams = ROWS == 1 ? p.rows : ceil_div(p.rows, N * ROWS) * N,
                blocks = ceil_div(teams, TEAMS);
  if (blocks > INT32_MAX) return NOT_TAKEN;
  odd_forward_kernel<T, CENTERED, FUSED, TEAM, K, W, ROWS>
      <<<static_cast<unsigned>(blocks), THREADS<TEAM>, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool CENTERED, Fused FUSED, typename S, bool EXACT, typename W>
cudaError_t launch_aligned(const Forward<T> &p, cudaStream_t stream) {
  constexpr int K = S::ELEMENTS / VECTOR<T>;
  const int64_t blocks = ceil_div(p.rows, S::BLOCK / S::TEAM);
  if (blocks > INT32_MAX) return NOT_TAKEN;
  forward_kernel<T, CENTERED, FUSED, S::TEAM, K, S::BLOCK, EXACT, W>
      <<<static_cast<unsigned>(blocks), S::BLOCK, 0, stream>>>(p);
  return cudaGetLastError();
}

// By a shape of clusters that end with their rows, where it takes rows of this width, and the chip runs such clusters.
template <typename T, bool CENTERED, Fused FUSED, bool ODD, typename W, typename S>
cudaError_t launch_cluster(Forward<T> &p, cudaStream_t stream) {
  using Rows = ClusterRows<T, CENTERED, FUSED, ODD, W, S>;
  constexpr int COLUMNS = S::TEAM * S::ELEMENTS;  // of a block, of which a cluster has two or more
  if (S::EXACT && (p.cols % COLUMNS > 0 || p.cols == COLUMNS)) return NOT_TAKEN;
  if (p.cols / Rows::N * Rows::N > S::WIDEST) return NOT_TAKEN;
  const int64_t clusters =
      S::ROWS == 1 ? p.rows : ceil_div(p.rows, Rows::STEP * S::ROWS) * Rows::STEP;
  return launch_clusters<cluster_forward_kernel<T, CENTERED, FUSED, ODD, W, S>, S::TEAM, Rows::K,
                         Rows::N>(p, clusters, Rows::SHARED, stream);
}

// By the first shape of clusters that stay whose blocks are nearly full and leave few places empty.
template <typename T, bool CENTERED, bool OWN, typename... S>
cudaError_t launch_stays(Forward<T> &p, cudaStream_t stream, Shapes<S...>) {
  constexpr int N = VECTOR<T>;
  const auto one = [&](auto shape) {
    using Each = decltype(shape);
    constexpr int TEAM = Each::TEAM, K = Each::K, BLOCKS = Each::BLOCKS;
    const int cols = p.cols / N * N;  // those of an odd row's ends have places of their own
    if (cols > Each::WIDEST || places_taken(cols, TEAM * K * N, BLOCKS) < Each::TAKEN)
      return NOT_TAKEN;
    constexpr auto KERNEL = ring_forward_kernel<T, CENTERED, OWN, TEAM, K, BLOCKS>;
    return launch_ring<KERNEL, 1, TEAM, K, N, true, BLOCKS, true, K - 1>(
        p, 0, Each::STAGES, MAX_STAGES, INT32_MAX, stream);
  };
  return first_to_take([&] { return one(S{}); }...);
}

template <typename T, bool CENTERED, Fused FUSED, bool ODD, typename W, typename... S>
cudaError_t launch_first_cluster(Forward<T> &p, cudaStream_t stream, Shapes<S...>) {
  return first_to_take([&] { return launch_cluster<T, CENTERED, FUSED, ODD, W, S>(p, stream); }...);
}

// By clusters.
template <typename T, bool CENTERED, Fused FUSED, bool ODD>
cudaError_t launch_wide(Forward<T> &p, cudaStream_t stream) {
  constexpr bool HALF = sizeof(T) == 2, LAYER_NORM = CENTERED && FUSED == ALONE;
  cudaError_t error = NOT_TAKEN;
  const auto launch = [&](auto weights, auto shapes) {
    if (error != NOT_TAKEN) return;
    error = launch_first_cluster<T, CENTERED, FUSED, ODD, decltype(weights)>(p, stream, shapes);
  };
  if (!p.weight.is_own() || (CENTERED && !p.bias.is_own())) {
    if constexpr (HALF && FUSED == ALONE) {
      const bool are_there = p.template has_weights<CENTERED>();
      if constexpr (!ODD) {
        if (are_there) launch(float{}, float_shapes<CENTERED>());
      }
      if (error == NOT_TAKEN && others_may_stay<CENTERED, ODD>(p.rows, p.cols, are_there)) {
        error = launch_stays<T, CENTERED, false>(p, stream, OtherRingShapes{});
      }
      if constexpr (ODD) {
        if (are_there) launch(float{}, Shapes<OddFloatShape>{});
      }
    }
    launch(Any{}, Shapes<UsualShape<HALF, CENTERED, FUSED>, WidestShape<HALF, 1>>{});
    return error;
  }
  if constexpr (FUSED == ALONE && (LAYER_NORM || (HALF && ODD))) {
    if (may_stay<HALF, CENTERED, ODD>(p.cols))
      error = launch_stays<T, CENTERED, true>(p, stream, ring_shapes<HALF, CENTERED>());
  }
  if constexpr (FUSED == ADDED) {
    if (p.dropout.seed != nullptr) launch(T{}, wide_shapes<HALF, CENTERED, FUSED, ODD, true>());
  }
  launch(T{}, wide_shapes<HALF, CENTERED, FUSED, ODD, false>());
  // Two rows need more shared memory than some chips have.
  if constexpr (LAYER_NORM) launch(T{}, Shapes<WidestShape<HALF, 2>>{});
  launch(T{}, Shapes<WidestShape<HALF, 1>>{});
  return error;
}

// By the first of the shapes that takes rows of this width.
template <typename T, bool CENTERED, Fused FUSED, bool ODD, typename W, typename... S>
cudaError_t launch_block(const Forward<T> &p, cudaStream_t stream, Shapes<S...> shapes) {
  constexpr int N = VECTOR<T>;
  return with_shape<N>(p.cols, shapes, [&](auto shape) {
    using Each = decltype(shape);
    constexpr int K = Each::ELEMENTS / N;
    if constexpr (ODD) {
      return launch_odd<T, CENTERED, FUSED, Each::TEAM, K, W>(p, stream);
    } else {
      // The shapes that do not spill for it and gain by it where rows are many.
      constexpr bool GAINS =
          !CENTERED && (FUSED == ALONE ? N == 8 && K == 4 && Each::TEAM > 32 : N == 4 && K <= 4);
      if constexpr (GAINS && std::is_same_v<W, T>) {
        if (p.cols == Each::TEAM * Each::ELEMENTS) {
          return launch_aligned<T, CENTERED, FUSED, Each, true, W>(p, stream);
        }
      }
      return launch_aligned<T, CENTERED, FUSED, Each, false, W>(p, stream);
    }
  });
}

template <typename T, bool CENTERED, Fused FUSED, bool ODD>
cudaError_t launch_forward(Forward<T> &p, cudaStream_t stream) {
  constexpr int N = VECTOR<T>;
  constexpr bool HALF = N == 8;
  cudaError_t error = NOT_TAKEN;
  const auto launch = [&](auto weights, auto shapes) {
    if (error != NOT_TAKEN) return;
    error = launch_block<T, CENTERED, FUSED, ODD, decltype(weights)>(p, stream, shapes);
  };
  const auto shapes = block_shapes<HALF, CENTERED, FUSED, ODD>();
  const bool are_there = p.template has_weights<CENTERED>();
  const bool are_own = are_there && !p.weight.is_float,
             are_floats = HALF && FUSED == ALONE && are_there && !are_own;
  if constexpr (ODD) {
    if constexpr (HALF && FUSED == ALONE) {
      if (are_floats) launch(float{}, shapes);
    }
    launch(Any{}, shapes);
  } else {
    const bool are_few = bytes_of<T>(p) <= most_of_few(p.cols, are_floats);
    if (are_few && are_own) launch(T{}, FewShapes<N>{});
    if (error == NOT_TAKEN && !are_few &&
        !prefers_block<HALF, CENTERED, FUSED>(p.cols, are_there, are_own)) {
      error = launch_wide<T, CENTERED, FUSED, ODD>(p, stream);
    }
    if constexpr (HALF && FUSED == ALONE) {
      if (are_few && are_floats) launch(float{}, FewShapes<N>{});
      if (are_floats) launch(float{}, shapes);
    }
    if (are_own) {
      launch(T{}, shapes);
    } else {
      launch(Any{}, OtherShapes<N>{});
    }
  }
  if (error == NOT_TAKEN) error = launch_wide<T, CENTERED, FUSED, ODD>(p, stream);
  // Chips without clusters: layer_norm's odd rows would need too many registers, other shapes are among those above.
  if constexpr (ODD && !CENTERED) launch(Any{}, Shapes<Shape<512, 16>, Shape<512, 32>>{});
  if constexpr (!ODD && !HALF) {
    using Widest = Shapes<Shape<512, 24>, Shape<512, 32>>;
    if (!are_own) launch(Any{}, Widest{});
    if constexpr (FUSED != DROPPED) {
      if (are_own) launch(T{}, Widest{});
    }
  }
  return error;
}

template <typename T, bool CENTERED, Fused FUSED>
cudaError_t forward(const norm_forward_args &args, cudaStream_t stream) {
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
  const bool in_step =
      is_in_step<T>(p, args.x, args.x_stride) && is_in_step<T>(p, args.y, args.cols) &&
      is_in_step<T>(p, args.residual, args.residual_stride) &&
      is_in_step<T>(p, args.sum, args.cols) && is_aligned(args.weight) && is_aligned(args.bias);
  if (!in_step) return plain_forward<T>(args, stream);
  constexpr int tensors = FUSED == ADDED ? 2 : 1;
  const int64_t read = tensors * bytes_of<T>(p);
  int cache;
  cudaError_t error = hopper_cache(cache, read);
  if (error != cudaSuccess) return error;
  // As measured, alone and with a kernel behind it that reads y.
  if (cache > 0 && read >= cache / 4 * 3) set_policy<T>(p, OUTLASTS, tensors, cache);
  error = args.cols % VECTOR<T> == 0 ? launch_forward<T, CENTERED, FUSED, false>(p, stream)
                                     : launch_forward<T, CENTERED, FUSED, true>(p, stream);
  return error == NOT_TAKEN ? plain_forward<T>(args, stream) : error;
}

}  // namespace norm_cuda

extern "C" int norm_forward_cuda(const norm_forward_args *args, void *stream) {
  using namespace norm_cuda;
  const auto on = static_cast<cudaStream_t>(stream);
  if (args->dtype == DTYPE_FLOAT64) return plain_forward<double>(*args, on);
  return with_half_or_float(args->dtype, [&](auto zero) {
    using T = decltype(zero);
    if (args->residual)
      return args->centered ? forward<T, true, ADDED>(*args, on)
                            : forward<T, false, ADDED>(*args, on);
    if (args->dropout_y.seed) return forward<T, true, DROPPED>(*args, on);
    return args->centered ? forward<T, true, ALONE>(*args, on)
                          : forward<T, false, ALONE>(*args, on);
  });
}
