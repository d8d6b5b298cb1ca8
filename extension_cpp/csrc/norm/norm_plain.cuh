// What the norms' plain kernels share, norm_plain_forward.cuh and norm_plain_backward.cuh. They take what norm_forward_cuda.cu and
// norm_backward_cuda.cu do not take otherwise: float64, one column in backward, tensors whose rows begin at different distances
// from multiples of 16 bytes, and rows that are too wide for the other clusters.
//
// A block takes a row; wide ones are shared by the blocks of a cluster (from sm_90 on), and of narrow ones a block takes several,
// a warp each. The first pass over a row keeps in shared memory what there is room for beside other blocks, which copy while this
// one waits for its sums; what is not kept is read again, from the cache.
//
// N elements are a vector: 16 bytes, else one element. SHIFTED: what is read begins anywhere, so that a vector of it comes in words.
#ifndef EXTENSION_CPP_NORM_PLAIN_CUH
#define EXTENSION_CPP_NORM_PLAIN_CUH

#include <climits>

#include "norm/norm_launch.cuh"
#include "norm/norm_weights.cuh"

namespace norm_cuda {

// Threads of a block, and blocks of a multiprocessor; or one block of the threads of all.
constexpr int PLAIN_THREADS = 256, PLAIN_BLOCKS = 3,
              MOST_PLAIN_THREADS = PLAIN_THREADS * PLAIN_BLOCKS;
// Elements one by one that a thread asks for at once: for more doubles there are no registers.
template <typename T>
constexpr int SINGLES = sizeof(T) == 8 ? 4 : 8;

// use(i, d, load(i, d)) for all i + d before `end`: i = begin, begin + far, ..., and d the first U multiples of `near`. K at a time
// are asked for before the first is used.
template <int U, int K, typename L, typename F>
__device__ inline void walk(int64_t begin, int64_t end, int near, int far, const L &load,
                            const F &use) {
  for (int64_t i = begin; i < end; i += far) {
    const int left = static_cast<int>(min(end - i, static_cast<int64_t>(INT_MAX)));
    const auto take = [&](const auto &is_inside) {
#pragma unroll
      for (int first = 0; first < U; first += K) {
        decltype(load(i, 0)) raw[K];
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int d = (first + k) * near;
          raw[k] = load(i, is_inside(d) ? d : 0);  // without a branch
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const int d = (first + k) * near;
          if (is_inside(d)) use(i, d, raw[k]);
        }
      }
    };
    if ((U - 1) * near < left) {
      take([](int) { return true; });
    } else {
      take([&](int d) { return d < left; });
    }
  }
}

// The vectors of N elements of the first `size`, by the threads of a block. A warp takes U times its lanes' vectors in a row, so
// that addresses differ by constants; each time the same threads the same ones.
template <int N, int U, int K, typename L, typename F>
__device__ inline void walk_row(int64_t size, const L &load, const F &use) {
  const int begin = (threadIdx.x / 32 * U * 32 + threadIdx.x % 32) * N;
  walk<U, K>(begin, size, 32 * N, blockDim.x * U * N, load, use);
}

// N elements from p on.
template <typename T, int N, bool SHIFTED>
__device__ inline Vector<T, N> load_from(const T *p) {
  if constexpr (SHIFTED) {
    const int half = sizeof(T) == 2 ? reinterpret_cast<uintptr_t>(p) / 2 % 2
                                    : 0;  // of a word, which begins before p
    return load_shifted<T, N>(p - half, half);
  } else {
    return load_vector<T, N>(p);
  }
}

// N weights from column c on; `missing` where there are none.
template <typename W, int N, typename A>
__device__ inline void load_weights(A (&w)[N], const void *weights, A missing, int64_t c) {
  constexpr int M = N * sizeof(W) > 16 ? 16 / sizeof(W) : N;
#pragma unroll
  for (int j = 0; j < N; j += M) {
    Vector<W, M> bits{};
    if (weights != nullptr) bits = load_vector<W, M>(static_cast<const W *>(weights) + c + j);
    unpack<W, M>(reinterpret_cast<A(&)[M]>(w[j]), bits);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) w[j] = weights == nullptr ? missing : w[j];
}

// Drops what dropout drops of the elements from number `first` on.
template <int N, typename A>
__device__ inline void drop_from(A (&v)[N], const dropout_t &dropout, int64_t first) {
  if (dropout.seed == nullptr) return;
  uint32_t masks[1];
  keep<N>(masks, dropout, *dropout.seed, {first});
  drop(v, dropout, masks[0]);
}

// A vector to shared memory.
template <typename T, int N>
__device__ inline void keep_vector(T *slot, const Vector<T, N> &bits) {
  if constexpr (N == 1) {
    memcpy(slot, &bits, sizeof bits);
  } else {
    store_shared(shared_address(slot), bits);
  }
}

// How rows are shared out; a block has blockDim.y of them, with blockDim.x threads each.
struct PlainShape {
  int cluster;    // blocks that share a row
  int64_t slice;  // columns of a block
  int64_t kept;  // the first of them, which stay in shared memory: all, or a multiple of PLAIN_UNIT
};
constexpr int PLAIN_UNIT = 1024;  // a multiple of what a warp takes

// The threads of a row.
template <typename A>
struct PlainTeam {
  // Two numbers of each warp, and of each block of a cluster. By turns, for some may still read the last ones.
  struct alignas(2 * sizeof(A)) Pair {
    A v[2];
  };
  struct Slots {
    Pair warps[2][32], blocks[2][MAX_CLUSTER];
    uint64_t arrived[2];
  };
  Slots &slots;
  const int cluster;
  int rank = 0, turn = 0;

  __device__ PlainTeam(Slots &slots, int cluster) : slots(slots), cluster(cluster) {
#if HAS_CLUSTERS
    if (cluster == 1) return;
    rank = cluster_rank();
    if (threadIdx.x == 0) {
      for (uint64_t &barrier : slots.arrived) init_mbarrier(&barrier, 1);
      fence_mbarrier_init();
    }
    arrive_at_cluster();
#endif
  }

  __device__ int64_t first_row() const {
    return static_cast<int64_t>(blockIdx.x / cluster) * blockDim.y + threadIdx.y;
  }
  __device__ int64_t next_row(int64_t row) const {
    return row + static_cast<int64_t>(gridDim.x / cluster) * blockDim.y;
  }

  // The sums of the first numbers of so many pairs and of the second ones.
  __device__ static void sum(A (&v)[2], const Pair *pairs, int count) {
    const int lane = threadIdx.x % 32;
    v[0] = lane < count ? pairs[lane].v[0] : A(0);
    v[1] = lane < count ? pairs[lane].v[1] : A(0);
    group_sum(v);
  }

  // Over the row; the same in all its threads.
  __device__ void sum(A (&v)[2]) {
    const int warps = blockDim.x / 32, now = turn % 2;
    group_sum(v);
    if (warps == 1) return;  // a narrow row's
    if (threadIdx.x % 32 == 0) slots.warps[now][threadIdx.x / 32] = {v[0], v[1]};
    __syncthreads();
    sum(v, slots.warps[now], warps);
#if HAS_CLUSTERS
    if (cluster > 1) {
      if (turn == 0) wait_for_cluster();  // until all blocks are there
      if (threadIdx.x == 0) expect_bytes(&slots.arrived[now], cluster * sizeof(Pair));
      const int to = threadIdx.x;
      if (to < cluster) send(&slots.blocks[now][rank], &slots.arrived[now], to, Pair{v[0], v[1]});
      wait_cluster(&slots.arrived[now], turn / 2 % 2);
      sum(v, slots.blocks[now], cluster);
    }
#endif
    ++turn;
  }
};

// Whether rows `stride` elements apart begin at multiples of 16 bytes.
template <typename T>
bool are_aligned(const void *data, int64_t rows, int64_t stride) {
  return is_aligned(data) && (data == nullptr || rows == 1 || stride % VECTOR<T> == 0);
}

// Calls f(n, shifted) with the vectors' length, where what is not only read is `whole`, in aligned vectors, and what is read `aligned`.
template <typename T, typename F>
cudaError_t with_vectors(bool whole, bool aligned, F &&f) {
  if (!whole) return f(std::integral_constant<int, 1>{}, std::false_type{});
  constexpr std::integral_constant<int, VECTOR<T>> n;
  return aligned ? f(n, std::false_type{}) : f(n, std::true_type{});
}

// Calls f(weight) with a zero of the weights' type.
template <typename T, typename F>
cudaError_t with_weight(dtype_t weight_dtype, F &&f) {
  if constexpr (sizeof(T) == 2) {
    if (weight_dtype == DTYPE_FLOAT32) return f(float{});
  }
  return f(T{});
}

// What launch_plain asks the driver about a kernel and its device: once for the device that a thread uses.
struct PlainFacts {
  int device = -1, processors, cache, shared, own;
  int clusters[2][MAX_CLUSTER +
                  1];  // that run at once, by their size, of small blocks and of large ones

  int room(int blocks) const { return shared / blocks - 1024 - own; }  // for what a block keeps
};

template <auto KERNEL>
cudaError_t ask(PlainFacts &facts, int device, cudaStream_t stream) {
  cudaFuncAttributes attributes;
  facts = {};
  cudaError_t error = cudaFuncGetAttributes(&attributes, KERNEL);
  const auto get = [&](int &value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(facts.processors, cudaDevAttrMultiProcessorCount);
  get(facts.cache, cudaDevAttrL2CacheSize);
  get(facts.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  if (error != cudaSuccess) return error;
  facts.own = static_cast<int>(ceil_div(attributes.sharedSizeBytes, 128)) * 128;
  error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.room(1));
  if (error == cudaSuccess && attributes.ptxVersion >= 90) {
    error =
        count_clusters<KERNEL>(facts.clusters[0], PLAIN_THREADS, facts.room(PLAIN_BLOCKS), stream);
    if (error == cudaSuccess) {
      error = count_clusters<KERNEL>(facts.clusters[1], MOST_PLAIN_THREADS, facts.room(1), stream);
    }
  }
  if (error == cudaSuccess) facts.device = device;
  return error;
}

// Launches a kernel that keeps `bytes` of shared memory a column.
template <auto KERNEL, int N, typename P>
cudaError_t launch_plain(const P &args, int bytes, cudaStream_t stream) {
  thread_local PlainFacts facts;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != facts.device) error = ask<KERNEL>(facts, device, stream);
  if (error != cudaSuccess) return error;
  // A few vectors a thread, as far as there are threads.
  const int64_t vectors = ceil_div(args.cols, N);
  int threads = 32;
  while (threads < PLAIN_THREADS && threads * (N == 1 ? 8 : 4) < vectors) threads *= 2;
  const int rows = threads == 32 ? 4 : 1;
  PlainShape shape;
  for (int blocks : {PLAIN_BLOCKS, 1}) {
    // As many blocks a row as keep it. If what they do not keep is too much for half of the cache, one block a multiprocessor.
    const int64_t most = facts.room(blocks) / (rows * bytes);
    shape.cluster = 1;
    while (ceil_div(vectors, shape.cluster) * N > most && shape.cluster < MAX_CLUSTER &&
           facts.clusters[blocks == 1][2 * shape.cluster] > 0) {
      shape.cluster *= 2;
    }
    shape.slice = ceil_div(vectors, shape.cluster) * N;
    shape.kept = shape.slice <= most ? shape.slice : most / PLAIN_UNIT * PLAIN_UNIT;
    if (blocks == 1) threads = MOST_PLAIN_THREADS;
    if ((shape.slice - shape.kept) * bytes * blocks * facts.processors <= facts.cache / 2) break;
  }
  const int64_t clusters = std::min<int64_t>(ceil_div(args.rows, rows), INT_MAX / MAX_CLUSTER);
  Launch launch(static_cast<unsigned>(clusters * shape.cluster), dim3(threads, rows),
                rows * shape.kept * bytes, stream);
  if (shape.cluster > 1) launch.cluster(shape.cluster);
  return cudaLaunchKernelEx(&launch.config, KERNEL, args, shape);
}

}  // namespace norm_cuda

#endif
