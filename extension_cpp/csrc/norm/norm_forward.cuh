// What the forward kernels of layer_norm and rms_norm share: their parameters, the residual, the moments of a part of a row, and what
// is written.
#ifndef EXTENSION_CPP_NORM_FORWARD_CUH
#define EXTENSION_CPP_NORM_FORWARD_CUH

#include "norm/norm_weights.cuh"

namespace norm_cuda {

template <typename T>
struct ForwardTensors : Geometry {
  const T *x;
  int64_t x_stride;
  Weights weight;
  Weights bias;
  T *y;
  float *mean;  // of layer_norm; NULL as rstd
  float *rstd;  // may be NULL
  const T *residual;
  int64_t residual_stride;
  T *sum;
  dropout_t dropout;  // ADDED: of x, perhaps none; DROPPED: of y

  // Whether weight, and of layer_norm bias, are there.
  template <bool CENTERED>
  __host__ __device__ bool has_weights() const {
    return weight.data != nullptr && (!CENTERED || bias.data != nullptr);
  }
};

template <typename T>
struct Forward : ForwardTensors<T>, Sharing {};

// In place of the weights' type: any, or they are not there.
struct Any {};

// x becomes residual + dropout(x), which is also written.
template <typename T, int TEAM, int K, int N, bool ODD>
__device__ inline void add_residual(Part<T, TEAM, K, N, ODD> &part,
                                    const Part<T, TEAM, K, N, ODD> &residual, const Forward<T> &p,
                                    int64_t row, const Mask<TEAM, K, N, ODD> &mask,
                                    const Columns<TEAM, K, N, ODD> &columns) {
  const auto add = [&](auto &x, const auto &r, uint32_t kept, int64_t i) {
    if (p.dropout.seed != nullptr) drop(x, p.dropout, kept);
#pragma unroll
    for (int j = 0; j < static_cast<int>(sizeof x / sizeof x[0]); ++j) x[j] += r[j];
    store(p.sum + i, x);
  };
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
    float x[N], r[N];
    unpack<T, N>(x, part.bits[k]);
    unpack<T, N>(r, residual.bits[k]);
    add(x, r, mask.of(k), row * p.cols + columns.column(k));
    part.bits[k] = pack<T, N>(x);
  }
  if (!columns.has_edge()) return;
  float x[1] = {to_acc(part.edge)}, r[1] = {to_acc(residual.edge)};
  add(x, r, mask.edge, row * p.cols + columns.edge);
  part.edge = from_acc<T>(x[0]);
}

// Mean and squared deviations of a part of a row, and how many columns that are; rms_norm: 0, the sum of squares, any number.
struct alignas(16) Moments {
  float mean;
  float squares;
  float count;
};

__device__ inline float rstd_of(const Moments &moments, float per_col, float eps) {
  return rsqrtf(fmaf(moments.squares, per_col, eps));
}

// Of numbers whose distances from some number add up to v.x and their squares to v.y. The difference may be a rounding error below 0,
// of which rstd would be NaN; NaN itself passes. v.x may be so large that its square is beyond float, though v.y is not.
__device__ inline float squares_around_mean(float2 v, float per_count) {
  const float squares = isinf(v.y) ? v.y : v.y - v.x * (v.x * per_count);
  return squares < 0 ? 0 : squares;
}

// Of the columns of a warp (TEAM < 32: of a team), of which there are `count`. Half types take one pass, around an element: were
// that far away from all others, 10 of 24 bits would be lost. float takes two, with the correction for the rounding of the mean.
// FILLS, half types alone: vectors behind the row are given that element's value, in place of a branch around each.
template <typename T, bool CENTERED, bool FILLS, int TEAM, int K, int N, bool ODD>
__device__ inline Moments moments_of(const Part<T, TEAM, K, N, ODD> &part,
                                     const Columns<TEAM, K, N, ODD> &columns, float count) {
  constexpr int GROUP = TEAM < 32 ? TEAM : 32;
  float x[K][N], sum[1] = {}, edge = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) unpack<T, N>(x[k], part.bits[k]);
  if (ODD) edge = to_acc(part.edge);
  if (!CENTERED || sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        sum[0] = CENTERED ? sum[0] + x[k][j] : fmaf(x[k][j], x[k][j], sum[0]);
    }
    if (ODD) sum[0] = CENTERED ? sum[0] + edge : fmaf(edge, edge, sum[0]);
    group_sum(sum, GROUP);
  }
  if (!CENTERED) return {0, sum[0], count};
  const float per_count = __fdividef(1, fmaxf(count, 1));
  const float center =
      sizeof(T) == 4 ? sum[0] * per_count : __shfl_sync(0xffffffffu, x[0][0], 0, GROUP);
  Vector<T, N> fill;
  if constexpr (FILLS) {
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = center;
    fill = pack<T, N>(v);
  }
  float2 v = {};
  const auto add = [&](float d) {
    v.x += d;
    v.y = fmaf(d, d, v.y);
  };
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if constexpr (FILLS) {
      Vector<T, N> bits = part.bits[k];
      if (!columns.has(k)) bits = fill;
      unpack<T, N>(x[k], bits);
    } else if (!columns.has(k)) {
      continue;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) add(x[k][j] - center);
  }
  if (columns.has_edge()) add(edge - center);
  if constexpr (GROUP == 32) {
    v = warp_sum<true>(v);
  } else {
    float both[2] = {v.x, v.y};
    group_sum(both, GROUP);
    v = {both[0], both[1]};
  }
  return {center + v.x * per_count, squares_around_mean(v, per_count), count};
}

// Of a whole row, from those of its `size` parts, MOST at most: the mean is that of the parts' means, and each part's distance from
// it counts as often as the part has columns. LANES neighbouring threads join them together.
template <bool CENTERED, int LANES, int MOST>
__device__ inline Moments join(const Moments *parts, int size, float per_col) {
  const float center = CENTERED ? parts[0].mean : 0;
  float v[2] = {};
#pragma unroll
  for (int j = 0; j < MOST; j += LANES) {
    const int at = j + threadIdx.x % LANES;
    if (at >= size) continue;
    const Moments part = parts[at];
    const float d = part.mean - center, along = part.count * d;
    v[0] += along;
    v[1] += CENTERED ? fmaf(along, d, part.squares) : part.squares;
  }
  if constexpr (!CENTERED) {
    group_sum(reinterpret_cast<float(&)[1]>(v[1]), LANES);
    return {0, v[1]};
  } else if constexpr (LANES == 32) {
    const float2 both = warp_sum<true>({v[0], v[1]});
    v[0] = both.x, v[1] = both.y;
  } else {
    group_sum(v, LANES);
  }
  return {fmaf(v[0], per_col, center), squares_around_mean({v[0], v[1]}, per_col)};
}

// Of ROWS whole rows of a team, from those of its warps.
template <bool CENTERED, int TEAM, int BLOCK = THREADS<TEAM>, int ROWS>
__device__ inline void join_team(Moments (&moments)[ROWS], float per_col) {
  if constexpr (TEAM > 32) {
    constexpr int WARPS = TEAM / 32;
    __shared__ Moments shared[BLOCK / TEAM][ROWS][WARPS];
    Moments(&of_warps)[ROWS][WARPS] = shared[threadIdx.x / TEAM];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (threadIdx.x % 32 == 0) of_warps[i][threadIdx.x % TEAM / 32] = moments[i];
    }
    sync_team<TEAM, BLOCK>();
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      moments[i] = join<CENTERED, LANES<TEAM>, WARPS>(of_warps[i], WARPS, per_col);
  }
}

// Of layer_norm's whole row of a team, the mean first. x becomes each element's distance from it as it was first, and of float `shift`
// how far that is off; half types cannot hold a mean so large that it would show.
template <typename T, int TEAM, int BLOCK, int K, int N>
__device__ inline Moments moments_twice(float (&x)[K][N], float &shift,
                                        const Part<T, TEAM, K, N, false> &part,
                                        const Columns<TEAM, K, N, false> &columns,
                                        const Geometry &g) {
  constexpr int COUNT = sizeof(T) == 4 ? 2 : 1;
  __shared__ float sums[BLOCK / 32][1], squares[BLOCK / 32][COUNT];
  float sum[1] = {}, v[COUNT] = {};
#pragma unroll
  for (int k = 0; k < K; ++k) {
    unpack<T, N>(x[k], part.bits[k]);
#pragma unroll
    for (int j = 0; j < N; ++j) sum[0] += x[k][j];
  }
  team_sum<TEAM>(sum, sums);
  const float mean = sum[0] * g.per_col;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (!columns.has(k)) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      x[k][j] -= mean;
      v[0] = fmaf(x[k][j], x[k][j], v[0]);
      if (COUNT == 2) v[COUNT - 1] += x[k][j];
    }
  }
  team_sum<TEAM>(v, squares);
  if (COUNT == 1) return {mean, v[0]};
  shift = v[COUNT - 1] * g.per_col;
  const float around = isinf(v[0]) ? v[0] : v[0] - shift * shift * g.cols;
  return {mean + shift, around < 0 ? 0 : around};
}

// x[j] becomes its norm; w and b are of its columns.
template <bool CENTERED, int N>
__device__ inline void normalize(float (&x)[N], float mean, float rstd, const float (&w)[N],
                                 const float (&b)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float xhat = (CENTERED ? x[j] - mean : x[j]) * rstd;
    x[j] = CENTERED ? fmaf(xhat, w[j], b[j]) : xhat * w[j];
  }
}

// The same, where x[j] is its distance from the mean but for `shift`, as moments_twice() leaves it.
template <typename T, int N>
__device__ inline void normalize_distance(float (&x)[N], float shift, float rstd,
                                          const float (&w)[N], const float (&b)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float xhat = sizeof(T) == 4 ? fmaf(x[j], rstd, -shift * rstd) : x[j] * rstd;
    x[j] = fmaf(xhat, w[j], b[j]);
  }
}

// By one thread of those that share the row.
template <bool CENTERED, typename T>
__device__ inline void write_statistics(const Forward<T> &p, int64_t row, float mean, float rstd) {
  if (p.rstd == nullptr) return;
  if (CENTERED) p.mean[row] = mean;
  p.rstd[row] = rstd;
}

}  // namespace norm_cuda

#endif
