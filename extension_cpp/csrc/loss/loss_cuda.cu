// cross_entropy and token_log_probs on the GPU.
//
// loss_forward_rows     inner = 1: a warp or a CTA streams through a row once, with a running
//                       maximum, and keeps nothing of it.
// loss_backward_rows    inner = 1: element by element, from the row's lse; a CTA takes a tile of a
//                       row, or a warp a narrow row.
// loss_gradient_rows    forward with the gradient, without softcap and smoothing: a row lies in
//                       registers (norm/norm_plan.h), and is read once and overwritten.
// loss_*_strips         everything else: other dimensions and float64.
// loss_reduce           the sum over the rows, in two steps.
#include <algorithm>

#include "loss/loss_math.cuh"

namespace losses {

constexpr int NARROW = 4096;  // columns up to which a warp takes a row in forward
constexpr int CTA_THREADS = 256;
// Vectors that a thread loads at once. TILE_VECTORS: those that it takes of a wide row in backward.
constexpr int FORWARD_VECTORS = 4, BACKWARD_VECTORS = 4, TILE_VECTORS = 8;

// Part number `part` of `count` things cut into `parts` equal parts.
struct Cut {
  int64_t begin, end;

  __device__ Cut(int64_t count, int64_t parts, int64_t part) {
    const int64_t width = (count + parts - 1) / parts;
    begin = min(part * width, count);
    end = min(begin + width, count);
  }
};

// ---- walking through a row in memory, whatever its alignment ----

template <typename T>
struct RowSpan {
  static constexpr int N = VECTOR<T>;
  int64_t head, vectors;  // columns before the first whole vector of 16 bytes; their number

  __device__ RowSpan(const T *row, int64_t cols) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = min(static_cast<int64_t>((N - misaligned) % N), cols);
    vectors = (cols - head) / N;
  }
};

// Calls f(values, column) for this thread's vectors from number `begin` to `end`, and for the
// columns before and behind the vectors if has_edges.
template <int UNROLL, typename T, typename F>
__device__ inline void walk(const T *row, int64_t cols, const RowSpan<T> &span, int64_t begin,
                            int64_t end, bool has_edges, F &&f) {
  constexpr int N = VECTOR<T>;
  const int step = blockDim.x;
  const T *const from = row + span.head;
  if (has_edges) {
    const int64_t tail = span.head + span.vectors * N, edges = span.head + cols - tail;
    for (int64_t i = threadIdx.x; i < edges; i += step) {
      const int64_t c = i < span.head ? i : tail + (i - span.head);
      float value[1] = {to_acc(row[c])};
      f(value, c);
    }
  }
  int64_t v = begin + threadIdx.x;
  for (; v + (UNROLL - 1) * step < end; v += UNROLL * step) {
    Vector<T, N> bits[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) bits[u] = load_vector<T, N>(from + (v + u * step) * N);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float values[N];
      unpack<T, N>(values, bits[u]);
      f(values, span.head + (v + u * step) * N);
    }
  }
  for (; v < end; v += step) {
    float values[N];
    load<T, N>(values, from + v * N);
    f(values, span.head + v * N);
  }
}

// ---- forward ----

template <typename T, Mode MODE>
__global__ void __launch_bounds__(CTA_THREADS)
    loss_forward_rows(const __grid_constant__ loss_forward_args p) {
  using Sum = RowSum<float, 4>;
  __shared__ typename Sum::Shared shared;
  const loss_rows &rows = p.rows;
  const Logit<MODE, float> logit(rows);
  Sum row_sum(shared, 1, 0);
  int turn = 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < rows.outer;
       first += step) {
    const int64_t row = first + threadIdx.y, cols = row < rows.outer ? rows.cols : 0;
    const T *const x = static_cast<const T *>(rows.logits) + row * rows.outer_stride;
    const RowSpan<T> span(x, cols);
    const float origin = MODE == GENERAL && cols > 0 ? smoothing_origin(logit.z(to_acc(x[0]))) : 0;
    ExpSum<float, MODE == ENTROPY> own;
    float smooth[1] = {0};
    walk<FORWARD_VECTORS>(x, cols, span, 0, span.vectors, true, [&](auto &values, int64_t c) {
      constexpr int M = sizeof(values) / sizeof(float);
#pragma unroll
      for (int j = 0; j < M; ++j) {
        values[j] = logit.z(values[j]);
        if (MODE == GENERAL) smooth[0] += class_weight<float>(rows, c + j) * (values[j] - origin);
      }
      own.add(values);
    });
    own.raise(row_sum.max_cta(own.max, turn++));
    float sums[2] = {own.sum, own.moment};
    row_sum.sum_cta(sums, turn++);
    if (MODE == GENERAL) row_sum.sum_cta(smooth, turn++);
    if (threadIdx.x > 0 || cols == 0) continue;
    const Target target(rows, row, MODE != ENTROPY);
    const float z = target.is_class ? logit.z(to_acc(x[target.c])) : 0;
    write_results<MODE, float>(p, row, target, z, finite_maximum(own.max), logarithm(sums[0]),
                               sums[1] / sums[0], smooth[0], origin);
  }
}

template <typename T, Mode MODE>
__global__ void __launch_bounds__(STRIP_THREADS)
    loss_forward_strips(const __grid_constant__ loss_forward_args p, int64_t strips) {
  using A = acc_t<T>;
  const loss_rows &rows = p.rows;
  const Logit<MODE, A> logit(rows);
  for (int64_t s = blockIdx.x; s < rows.outer * strips; s += gridDim.x) {
    const Strip strip(s, strips, rows.inner);
    const T *const x =
        static_cast<const T *>(rows.logits) + strip.outer * rows.outer_stride + strip.i;
    const int64_t end = strip.is_there ? rows.cols : 0;
    const A origin = MODE == GENERAL && end > 0 ? smoothing_origin(logit.z(to_acc(x[0]))) : A(0);
    ExpSum<A, MODE == ENTROPY> row;
    A smooth = 0;
    for (int64_t c = threadIdx.y; c < end; c += blockDim.y) {
      const A one[1] = {logit.z(to_acc(x[c * rows.inner]))};
      row.add(one);
      if (MODE == GENERAL) smooth += class_weight<A>(rows, c) * (one[0] - origin);
    }
    join_strip(row);
    if (MODE == GENERAL) smooth = join_strip(smooth, [](A a, A b) { return a + b; });
    if (threadIdx.y > 0 || end == 0) continue;
    const int64_t r = strip.outer * rows.inner + strip.i;
    const Target target(rows, r, MODE != ENTROPY);
    const A z = target.is_class ? logit.z(to_acc(x[target.c * rows.inner])) : A(0);
    write_results<MODE, A>(p, r, target, z, finite_maximum(row.max), logarithm(row.sum),
                           row.moment / row.sum, smooth, origin);
  }
}

// ---- backward ----

// Number i of an array of this dtype.
template <typename A>
__device__ inline A number(const void *data, dtype_t dtype, int64_t i) {
  switch (dtype) {
    case DTYPE_FLOAT64: return static_cast<A>(static_cast<const double *>(data)[i]);
    case DTYPE_FLOAT32: return static_cast<const float *>(data)[i];
    case DTYPE_BFLOAT16: return to_acc(static_cast<const __nv_bfloat16 *>(data)[i]);
    case DTYPE_FLOAT16: return to_acc(static_cast<const __half *>(data)[i]);
  }
  return 0;
}

template <typename A>
__device__ inline RowGradient<A> row_gradient(const loss_backward_args &p, int64_t r) {
  RowGradient<A> gradient;
  gradient.set_lse(p.lse[r]);
  A g = number<A>(p.grad_loss, p.grad_dtype, r * p.grad_stride);
  if (p.total != nullptr) g /= *static_cast<const A *>(p.total);
  const Target target(p.rows, r, p.entropy == nullptr);
  if (p.entropy == nullptr) {
    gradient.set(p.rows, target, g);
  } else {
    gradient.set_entropy(target, static_cast<const A *>(p.entropy)[r], g,
                         number<A>(p.grad_entropy, p.grad_dtype, r));
  }
  return gradient;
}

template <typename T, Mode MODE>
__global__ void __launch_bounds__(CTA_THREADS)
    loss_backward_rows(const __grid_constant__ loss_backward_args p, int64_t tiles, int64_t units) {
  const loss_rows &rows = p.rows;
  const Logit<MODE, float> logit(rows);
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t row = unit / tiles * blockDim.y + threadIdx.y, tile = unit % tiles;
    if (row >= rows.outer) continue;
    const T *const x = static_cast<const T *>(rows.logits) + row * rows.outer_stride;
    T *const out = static_cast<T *>(p.grad_logits) + row * rows.cols;
    const RowGradient<float> gradient = row_gradient<float>(p, row);
    const auto apply = [&](auto &values, int64_t c) {
      gradient.apply(values, rows, logit, c);
      store_at(out, c, values);
    };
    const RowSpan<T> span(x, rows.cols);
    if ((reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(out)) % 16 == 0) {
      const Cut mine(span.vectors, tiles, tile);
      walk<MODE == GENERAL ? 1 : BACKWARD_VECTORS>(x, rows.cols, span, mine.begin, mine.end,
                                                   tile == 0, apply);
      continue;
    }
    // Rows that do not begin alike have no vectors in common.
    const Cut mine(rows.cols, tiles, tile);
    for (int64_t c = mine.begin + threadIdx.x; c < mine.end; c += blockDim.x) {
      float value[1] = {to_acc(x[c])};
      apply(value, c);
    }
  }
}

template <typename T, Mode MODE>
__global__ void __launch_bounds__(STRIP_THREADS)
    loss_backward_strips(const __grid_constant__ loss_backward_args p, int64_t strips) {
  using A = acc_t<T>;
  const loss_rows &rows = p.rows;
  const Logit<MODE, A> logit(rows);
  for (int64_t s = blockIdx.x; s < rows.outer * strips; s += gridDim.x) {
    const Strip strip(s, strips, rows.inner);
    if (!strip.is_there) continue;
    const T *const x =
        static_cast<const T *>(rows.logits) + strip.outer * rows.outer_stride + strip.i;
    T *const out = static_cast<T *>(p.grad_logits) + strip.outer * rows.cols * rows.inner + strip.i;
    const RowGradient<A> gradient = row_gradient<A>(p, strip.outer * rows.inner + strip.i);
    for (int64_t c = threadIdx.y; c < rows.cols; c += blockDim.y) {
      A value[1] = {to_acc(x[c * rows.inner])};
      gradient.apply(value, rows, logit, c);
      out[c * rows.inner] = from_acc<T>(value[0]);
    }
  }
}

// ---- forward with the gradient ----

struct GradientParams : norms::Geometry {
  loss_forward_args args;
  int ahead;  // rows to the one that is brought into the L2; 0: none
};

template <typename T, int K, bool ALIGNED>
__global__ void __maxnreg__((ALIGNED  ? K == 8 ? 80 : 64
                             : K == 8 ? 96
                                      : 80))
    loss_gradient_rows(const __grid_constant__ GradientParams p) {
  using Slice = RowSlice<T, ALIGNED>;
  using Sum = RowSum<float, 4>;
  __shared__ typename Sum::Shared shared;
  int rank = 0;
#if HAS_CLUSTERS
  if (p.cluster > 1) rank = cluster_rank();
#endif
  const loss_rows &rows = p.args.rows;
  const int64_t row = static_cast<int64_t>(blockIdx.x / p.cluster) * blockDim.y + threadIdx.y;
  const bool is_row = row < p.rows;
  Sum row_sum(shared, p.cluster, rank);
  const Slice slice(p.cols, row, p.slice, rank);
  const RowWindow<T, K, ALIGNED> window(slice);
  RowFragment<T, K, ALIGNED> x{};
  const T *const from_row = static_cast<const T *>(rows.logits) + row * p.cols;
  // The row's maximum begins with the target's logit, which is one of the row. So every thread has
  // read it before the first sum, behind which others overwrite their part of the row.
  float own = -INFINITY, sum[1] = {0}, z_target = 0;
  if (is_row) {
    x.load(from_row, window, p.hint);
    if (p.ahead > 0 && row + p.ahead < p.rows) {
      prefetch_slice(from_row + static_cast<int64_t>(p.ahead) * p.cols, slice, p.hint);
    }
    const Target target(rows, row, true);
    if (target.is_class) own = z_target = to_acc(from_row[target.c]);
  }
  row_sum.wait_for_others();
  for_each_vector(x, window, [&](auto &values, int, int) {
    for (const float value : values) own = max(own, value);
  });
  own = row_sum.max_cta(own, 0);
  for_each_vector(x, window, [&](auto &values, int, int) {
    for (const float value : values) sum[0] += exponential(value - finite_maximum(own));
  });
  row_sum.sum_cta(sum, 1);
  float most = own;
  if (p.cluster > 1) join_cluster(row_sum, most, sum[0], 2);
  if (!is_row) return;
  const Target target(rows, row, true);
  RowGradient<float> gradient;
  gradient.from = finite_maximum(most);
  gradient.log_sum = logarithm(sum[0]);
  gradient.set(rows, target, *static_cast<const float *>(p.args.grad_scale));
  if (threadIdx.x == 0 && rank == 0) {
    write_results<PLAIN, float>(p.args, row, target, z_target, gradient.from, gradient.log_sum, 0,
                                0, 0);
  }
  T *const out = static_cast<T *>(p.args.grad_logits) + row * p.cols;
  const Logit<PLAIN, float> logit(rows);
  for_each_vector(x, window, [&](auto &values, int column, int) {
    gradient.apply(values, rows, logit, column);
    store_at(out, column, values);
  });
  if (row >= p.release_from) release_row(out, slice);
}

// ---- sum over the rows ----

constexpr int REDUCE_THREADS = 1024;

// Sums of row r: its loss and its weight.
template <typename A>
__device__ inline void add_row(double (&sums)[2], const loss_reduce_args &p, int64_t r) {
  sums[0] += static_cast<const A *>(p.loss)[r];
  if (p.target == nullptr) {
    sums[1] += 1;
  } else if (const int64_t t = p.target[r]; t != p.ignore_index && t >= 0 && t < p.cols) {
    sums[1] += p.weight == nullptr ? A(1) : static_cast<const A *>(p.weight)[t];
  }
}

// CTA i sums LOSS_REDUCED_ROWS rows into partial[2 * i], and their weights into partial[2 * i + 1].
template <typename A>
__global__ void __launch_bounds__(REDUCE_THREADS)
    loss_partial_sums(const __grid_constant__ loss_reduce_args p) {
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * LOSS_REDUCED_ROWS;
  const int64_t end = min(begin + LOSS_REDUCED_ROWS, p.rows);
  double sums[2] = {0, 0};
#pragma unroll 4
  for (int64_t r = begin + threadIdx.x; r < end; r += REDUCE_THREADS) add_row<A>(sums, p, r);
  block_sum<REDUCE_THREADS>(sums);
  if (threadIdx.x < 2) {
    static_cast<double *>(p.partial)[2 * blockIdx.x + threadIdx.x] = sums[threadIdx.x];
  }
}

template <typename A>
__global__ void __launch_bounds__(REDUCE_THREADS)
    loss_total(const __grid_constant__ loss_reduce_args p, int64_t parts) {
  double sums[2] = {0, 0};
  if (parts == 0) {
#pragma unroll 4
    for (int64_t r = threadIdx.x; r < p.rows; r += REDUCE_THREADS) add_row<A>(sums, p, r);
  }
  for (int64_t i = threadIdx.x; i < parts; i += REDUCE_THREADS) {
    sums[0] += static_cast<const double *>(p.partial)[2 * i];
    sums[1] += static_cast<const double *>(p.partial)[2 * i + 1];
  }
  block_sum<REDUCE_THREADS>(sums);
  if (threadIdx.x > 0) return;
  const A total = static_cast<A>(sums[1]);
  *static_cast<A *>(p.total) = total;
  const double out = p.is_mean ? sums[0] / total : sums[0];
  switch (p.out_dtype) {
    case DTYPE_FLOAT64: *static_cast<double *>(p.out) = out; break;
    case DTYPE_FLOAT32: *static_cast<float *>(p.out) = static_cast<float>(out); break;
    case DTYPE_BFLOAT16:
      *static_cast<__nv_bfloat16 *>(p.out) = from_acc<__nv_bfloat16>(static_cast<float>(out));
      break;
    case DTYPE_FLOAT16: *static_cast<__half *>(p.out) = from_acc<__half>(static_cast<float>(out));
  }
}

// ---- launches ----

// Calls f(mode) with the mode as a constant.
template <typename F>
void with_mode(const loss_rows &rows, bool has_entropy, F &&f) {
  if (has_entropy) {
    f(std::integral_constant<Mode, ENTROPY>{});
  } else if (rows.label_smoothing > 0 || rows.softcap > 0) {
    f(std::integral_constant<Mode, GENERAL>{});
  } else {
    f(std::integral_constant<Mode, PLAIN>{});
  }
}

// Threads (x for each row, y rows) of a CTA, so that a thread has at most `vectors` vectors of its
// row, as far as x does not exceed `most`. Fewer threads would wait longer for each row's numbers.
dim3 row_threads(const loss_rows &rows, int vectors, unsigned most) {
  const int64_t wanted = ceil_div(rows.cols, rows.dtype == DTYPE_FLOAT32 ? 4 : 8);
  unsigned x = 4;
  while (x < most && static_cast<int64_t>(x) * vectors < wanted) x *= 2;
  return dim3(x, CTA_THREADS / x);
}

unsigned at_most_ctas(int64_t ctas) {
  return static_cast<unsigned>(std::min<int64_t>(ctas, INT32_MAX));
}

cudaError_t forward_rows(const loss_forward_args &args, cudaStream_t stream) {
  // Rows of several warps have their CTA to themselves: its barriers are for all threads.
  const bool is_narrow = args.rows.cols <= NARROW;
  const dim3 threads =
      is_narrow ? row_threads(args.rows, FORWARD_VECTORS, 32) : dim3(CTA_THREADS, 1);
  const unsigned ctas = at_most_ctas(ceil_div(args.rows.outer, threads.y));
  return with_row_type(args.rows.dtype, [&](auto zero) {
    with_mode(args.rows, args.entropy != nullptr, [&](auto mode) {
      loss_forward_rows<decltype(zero), decltype(mode)::value><<<ctas, threads, 0, stream>>>(args);
    });
    return cudaGetLastError();
  });
}

cudaError_t forward_strips(const loss_forward_args &args, cudaStream_t stream) {
  return with_dtype(args.rows.dtype, [&](auto zero) {
    return with_strips(args.rows.outer, args.rows.inner,
                       [&](unsigned ctas, dim3 threads, int64_t strips) {
                         with_mode(args.rows, args.entropy != nullptr, [&](auto mode) {
                           loss_forward_strips<decltype(zero), decltype(mode)::value>
                               <<<ctas, threads, 0, stream>>>(args, strips);
                         });
                       });
  });
}

cudaError_t backward_rows(const loss_backward_args &args, cudaStream_t stream) {
  const loss_rows &rows = args.rows;
  const dim3 threads = row_threads(rows, TILE_VECTORS, CTA_THREADS);
  return with_row_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vectors = ceil_div(rows.cols, VECTOR<T>);
    const int64_t tiles = threads.y > 1 ? 1 : ceil_div(vectors, TILE_VECTORS * CTA_THREADS);
    const int64_t units = ceil_div(rows.outer, threads.y) * tiles;
    with_mode(rows, args.entropy != nullptr, [&](auto mode) {
      loss_backward_rows<T, decltype(mode)::value>
          <<<at_most_ctas(units), threads, 0, stream>>>(args, tiles, units);
    });
    return cudaGetLastError();
  });
}

cudaError_t backward_strips(const loss_backward_args &args, cudaStream_t stream) {
  return with_dtype(args.rows.dtype, [&](auto zero) {
    return with_strips(args.rows.outer, args.rows.inner,
                       [&](unsigned ctas, dim3 threads, int64_t strips) {
                         with_mode(args.rows, args.entropy != nullptr, [&](auto mode) {
                           loss_backward_strips<decltype(zero), decltype(mode)::value>
                               <<<ctas, threads, 0, stream>>>(args, strips);
                         });
                       });
  });
}

cudaError_t gradient_rows(const loss_forward_args &args, const norms::Plan &plan,
                          cudaStream_t stream) {
  return with_row_type(args.rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    GradientParams p{};
    norms::set_geometry(p, plan, args.rows.outer, args.rows.cols);
    p.args = args;
    p.ahead = plan.ahead;
    return norms::with_variant<2, 3, 4, 8>(plan, [&](auto vectors, auto aligned) {
      constexpr auto kernel =
          loss_gradient_rows<T, decltype(vectors)::value, decltype(aligned)::value>;
      return norms::launch<kernel>(p, plan, stream);
    });
  });
}

}  // namespace losses

extern "C" int loss_forward_cuda(const loss_forward_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const loss_rows &rows = args->rows;
  const bool has_rows = rows.inner == 1 && rows.dtype != DTYPE_FLOAT64;
  norms::Plan plan{};
  if (args->grad_logits != nullptr) {
    const bool is_plain = rows.softcap == 0 && rows.label_smoothing == 0;
    const bool is_congruent = has_rows && is_plain && rows.outer_stride == rows.cols &&
                              is_aligned(rows.logits) && is_aligned(args->grad_logits);
    const cudaError_t error =
        plan_rows(plan, rows.dtype, rows.outer, rows.cols, false, is_congruent);
    if (error != cudaSuccess) return error;
    if (plan.kernel == norms::Kernel::ROW) return gradient_rows(*args, plan, on);
  }
  const cudaError_t error = has_rows ? forward_rows(*args, on) : forward_strips(*args, on);
  if (error != cudaSuccess || args->grad_logits == nullptr) return error;
  loss_backward_args backward{};
  backward.rows = rows;
  backward.lse = args->lse;
  backward.grad_loss = args->grad_scale;
  backward.grad_dtype = rows.dtype == DTYPE_FLOAT64 ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
  backward.grad_logits = args->grad_logits;
  return loss_backward_cuda(&backward, stream);
}

extern "C" int loss_backward_cuda(const loss_backward_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const bool has_rows = args->rows.inner == 1 && args->rows.dtype != DTYPE_FLOAT64;
  return has_rows ? backward_rows(*args, on) : backward_strips(*args, on);
}

extern "C" int loss_reduce_cuda(const loss_reduce_args *args, void *stream) {
  using namespace losses;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto run = [&](auto zero) {
    using A = decltype(zero);
    const int64_t parts =
        args->rows <= LOSS_REDUCED_ROWS ? 0 : ceil_div(args->rows, LOSS_REDUCED_ROWS);
    if (parts > 0) {
      loss_partial_sums<A><<<static_cast<unsigned>(parts), REDUCE_THREADS, 0, on>>>(*args);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
    }
    loss_total<A><<<1, REDUCE_THREADS, 0, on>>>(*args, parts);
    return cudaGetLastError();
  };
  return args->dtype == DTYPE_FLOAT64 ? run(double{}) : run(float{});
}
