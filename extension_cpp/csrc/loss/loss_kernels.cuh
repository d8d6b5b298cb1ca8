// The kernels of the losses that do not hold a row in registers: forward over rows with a running
// maximum, backward element by element, and kernels over strips (rows/strips.cuh) for other
// dimensions and float64. loss_cuda.cu lists them.
#ifndef EXTENSION_CPP_LOSS_KERNELS_CUH
#define EXTENSION_CPP_LOSS_KERNELS_CUH

#include "loss/loss_math.cuh"

namespace losses {

constexpr int NARROW = 1024;  // widest row, in vectors, that forward processes with one warp
constexpr int CTA_THREADS = 256;
// The number of vectors that a thread loads at once. TILE_VECTORS is the number of vectors per
// thread of a wide row in backward.
constexpr int FORWARD_VECTORS = 4, BACKWARD_VECTORS = 2, TILE_VECTORS = 8;
constexpr int BACKWARD_CTAS = 5;  // CTAs per SM; with so many, a thread may have 48 registers

// Range number `part` of indices, if `count` indices are divided into `parts` equal ranges.
struct Cut {
  int64_t begin, end;

  __device__ Cut(int64_t count, int64_t parts, int64_t part) {
    const int64_t width = (count + parts - 1) / parts;
    begin = min(part * width, count);
    end = min(begin + width, count);
  }
};

// ---- loops over a row in memory, of any alignment ----

template <typename T>
struct RowSpan {
  static constexpr int N = VECTOR<T>;
  int64_t head, vectors;  // number of columns before the first whole vector, and of whole vectors

  __device__ RowSpan(const T *row, int64_t cols) {
    const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    head = min(static_cast<int64_t>((N - misaligned) % N), cols);
    vectors = (cols - head) / N;
  }
};

// Calls f(values, column) for this thread's vectors in [begin, end). If has_edges is true, walk()
// also calls f for the columns before and after the whole vectors.
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
  // Loads UNROLL vectors at once. At the end of the row there may be fewer (is_whole is false).
  const auto batch = [&](int64_t v, auto is_whole) {
    Vector<T, N> bits[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (decltype(is_whole)::value || v + u * step < end) {
        bits[u] = load_vector<T, N>(from + (v + u * step) * N);
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (!decltype(is_whole)::value && v + u * step >= end) break;
      float values[N];
      unpack<T, N>(values, bits[u]);
      f(values, span.head + (v + u * step) * N);
    }
  };
  int64_t v = begin + threadIdx.x;
  for (; v + (UNROLL - 1) * step < end; v += UNROLL * step) batch(v, std::true_type{});
  if (v < end) batch(v, std::false_type{});
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

// The sums that forward computes for one row of a strip. smooth = sum(w_c * (z_c - origin)).
template <Mode MODE, typename A>
struct LossSum : ExpSum<A, MODE == ENTROPY> {
  static constexpr A smooth = 0;
};
template <typename A>
struct LossSum<GENERAL, A> : ExpSum<A, false> {
  A smooth = 0;

  __device__ void join(const LossSum &other) {
    ExpSum<A, false>::join(other);
    smooth += other.smooth;
  }
};

template <typename T, Mode MODE, int N>
__global__ void __launch_bounds__(STRIP_THREADS, STRIP_CTAS)
    loss_forward_strips(const __grid_constant__ StripParams<loss_forward_args> p) {
  using A = acc_t<T>;
  using Sum = LossSum<MODE, A>;
  using Join = StripJoin<Sum, N>;
  __shared__ typename Join::Shared shared;
  const Join strip_join(shared, p.shape.cluster);
  const loss_rows &rows = p.rows;
  const Logit<MODE, A> logit(rows);
  for (int64_t s = blockIdx.x / p.shape.cluster; s < rows.outer * p.shape.strips;
       s += gridDim.x / p.shape.cluster) {
    const Strip strip(s, p.shape, rows.cols, rows.inner, N);
    const T *const x =
        static_cast<const T *>(rows.logits) + strip.outer * rows.outer_stride + strip.i;
    Sum sums[N];
    A origin[N]{};
    if (MODE == GENERAL && strip.is_there) {
      for (int j = 0; j < N; ++j) origin[j] = smoothing_origin(logit.z(to_acc(x[j])));
    }
    strip.for_columns([&](int64_t c) {
      A values[STRIP_COLUMNS][N];
      load_columns(values, x, strip, c, rows.inner, A(0));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        A z[STRIP_COLUMNS];
#pragma unroll
        for (int u = 0; u < STRIP_COLUMNS; ++u) {
          const bool has_column = strip.has(c, u);
          z[u] = has_column ? logit.z(values[u][j]) : A(-INFINITY);
          if constexpr (MODE == GENERAL) {
            if (has_column) {
              sums[j].smooth += class_weight<A>(rows, c + u * blockDim.y) * (z[u] - origin[j]);
            }
          }
        }
        sums[j].add(z);
      }
    });
    strip_join.join(sums);
    if (!strip.is_there || strip.begin > 0) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (j % blockDim.y != threadIdx.y) continue;
      const int64_t r = strip.outer * rows.inner + strip.i + j;
      const Target target(rows, r, MODE != ENTROPY);
      const A z = target.is_class ? logit.z(to_acc(x[target.c * rows.inner + j])) : A(0);
      const Sum &sum = sums[j];
      write_results<MODE, A>(p, r, target, z, finite_maximum(sum.max), logarithm(sum.sum),
                             sum.moment / sum.sum, sum.smooth, origin[j]);
    }
  }
}

// ---- backward ----

// Returns element i of an array whose dtype is known only at run time.
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

template <Mode MODE, typename A>
__device__ inline RowGradient<A> row_gradient(const loss_backward_args &p, int64_t r) {
  RowGradient<A> gradient;
  const A *const lse = static_cast<const A *>(p.lse) + 2 * r;
  gradient.from = lse[0];
  gradient.log_sum = lse[1];
  A g = number<A>(p.grad_loss, p.grad_dtype, r * p.grad_stride);
  if (p.total != nullptr) g /= *static_cast<const A *>(p.total);
  const Target target(p.rows, r, MODE != ENTROPY);
  if constexpr (MODE == ENTROPY) {
    gradient.set_entropy(p.rows, target, static_cast<const A *>(p.entropy)[r], g,
                         number<A>(p.grad_entropy, p.grad_dtype, r));
  } else {
    gradient.set(p.rows, target, g);
  }
  return gradient;
}

template <typename T, Mode MODE>
__global__ void __launch_bounds__(CTA_THREADS, BACKWARD_CTAS)
    loss_backward_rows(const __grid_constant__ loss_backward_args p, int64_t tiles, int64_t units) {
  const loss_rows &rows = p.rows;
  const Logit<MODE, float> logit(rows);
  for (int64_t unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int64_t row = unit / tiles * blockDim.y + threadIdx.y, tile = unit % tiles;
    if (row >= rows.outer) continue;
    const T *const x = static_cast<const T *>(rows.logits) + row * rows.outer_stride;
    T *const out = static_cast<T *>(p.grad_logits) + row * rows.cols;
    const RowGradient<float> gradient = row_gradient<MODE, float>(p, row);
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
    // Here x and out differ in alignment, so that no vector is aligned in both. Elements are loaded
    // one by one.
    const Cut mine(rows.cols, tiles, tile);
    for (int64_t c = mine.begin + threadIdx.x; c < mine.end; c += blockDim.x) {
      float value[1] = {to_acc(x[c])};
      apply(value, c);
    }
  }
}

template <typename T, Mode MODE, int N>
__global__ void __launch_bounds__(STRIP_THREADS, STRIP_BACKWARD_CTAS)
    loss_backward_strips(const __grid_constant__ StripParams<loss_backward_args> p) {
  using A = acc_t<T>;
  const loss_rows &rows = p.rows;
  const Logit<MODE, A> logit(rows);
  for (int64_t s = blockIdx.x / p.shape.cluster; s < rows.outer * p.shape.strips;
       s += gridDim.x / p.shape.cluster) {
    const Strip strip(s, p.shape, rows.cols, rows.inner, N);
    if (!strip.is_there) continue;
    const T *const x =
        static_cast<const T *>(rows.logits) + strip.outer * rows.outer_stride + strip.i;
    T *const out = static_cast<T *>(p.grad_logits) + strip.outer * rows.cols * rows.inner + strip.i;
    RowGradient<A> gradients[N];
    for (int j = 0; j < N; ++j) {
      gradients[j] = row_gradient<MODE, A>(p, strip.outer * rows.inner + strip.i + j);
    }
    strip.for_columns([&](int64_t c) {
      A values[STRIP_COLUMNS][N];
      load_columns(values, x, strip, c, rows.inner, A(0));
#pragma unroll
      for (int u = 0; u < STRIP_COLUMNS; ++u) {
        if (!strip.has(c, u)) break;
        const int64_t column = c + u * blockDim.y;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          A value[1] = {values[u][j]};
          gradients[j].apply(value, rows, logit, column);
          values[u][j] = value[0];
        }
        store<T, N>(out + column * rows.inner, values[u]);
      }
    });
  }
}

// ---- sum over the rows ----

constexpr int REDUCE_THREADS = 1024;

// Adds the loss and the weight of row r to the sums.
template <typename A>
__device__ inline void add_row(double (&sums)[2], const loss_reduce_args &p, int64_t r) {
  sums[0] += static_cast<const A *>(p.loss)[r];
  if (p.target == nullptr) {
    sums[1] += 1;
  } else if (const int64_t t = p.target[r]; t != p.ignore_index && t >= 0 && t < p.cols) {
    sums[1] += p.weight == nullptr ? A(1) : static_cast<const A *>(p.weight)[t];
  }
}

// CTA i sums the losses of LOSS_REDUCED_ROWS rows into partial[2 * i], and their weights into
// partial[2 * i + 1].
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

}  // namespace losses

#endif
