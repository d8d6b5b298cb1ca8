// The host's side of norm_forward_cuda.cu and norm_backward_cuda.cu: which kernel takes which rows, on how many blocks.
#ifndef EXTENSION_CPP_NORM_LAUNCH_CUH
#define EXTENSION_CPP_NORM_LAUNCH_CUH

#include <algorithm>
#include <iterator>

#include "norm/norm_rows.cuh"

namespace norm_cuda {

// Most partial rows of the weight gradients: as many as blocks, or clusters, run at once on the largest chip; narrow rows have two
// blocks a multiprocessor. Not fewer than 64, for clusters of few blocks also take pieces (norm_shares.cuh); 16 where rows need clusters
// of 14 blocks or more, or the plain kernels.
inline int64_t max_parts(int64_t cols) {
  if (cols <= 1024) return 320;
  if (cols > 163840) return 16;
  return std::clamp<int64_t>(160 * 10240 / cols, 64, 160);
}

// What a launch answers where its kernel is not for these rows, or the chip has no room for it: nothing was launched, and another kernel
// takes them.
constexpr cudaError_t NOT_TAKEN = cudaErrorNotSupported;

// Calls the attempts in turn, until one does not answer NOT_TAKEN; that, if all do.
template <typename... F>
cudaError_t first_to_take(F &&...attempts) {
  cudaError_t error = NOT_TAKEN;
  (void)(((error = attempts()) != NOT_TAKEN) || ...);
  return error;
}

// A launch and its attributes.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Launch(unsigned blocks, dim3 threads, size_t shared, cudaStream_t stream) {
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = attributes;
  }
  // Blocks run in clusters of this size.
  void cluster(int size) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  }
  // May be started before the kernel ahead of it has ended (which it then waits for itself).
  void overlap() {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
};

// Whether what runs of this kernel was compiled for sm_90 or later: an older build that the driver translates for a newer chip
// neither waits for the kernel ahead of it nor knows clusters. Asked once for the device that a thread uses.
template <auto KERNEL>
bool is_for_sm_90(int device) {
  thread_local int known = -1;
  thread_local bool is = false;
  if (device != known) {
    cudaFuncAttributes attributes;
    is = cudaFuncGetAttributes(&attributes, KERNEL) == cudaSuccess && attributes.ptxVersion >= 90;
    known = device;
  }
  return is;
}

// Fills in what the shape fixes; false if it is beyond the fast kernels' indices.
inline bool set_shape(Geometry &g, int64_t rows, int64_t cols) {
  if (cols > 1 << 24) return false;
  g.rows = rows;
  g.cols = static_cast<int>(cols);
  g.per_col = 1 / static_cast<float>(cols);
  g.slice = g.cols;
  g.policy = USUAL;
  g.let_go = rows;
  return true;
}

// A tensor of the kernel's shape, in bytes.
template <typename T>
int64_t bytes_of(const Geometry &g) {
  return g.rows * g.cols * static_cast<int64_t>(sizeof(T));
}

// The bytes of a Hopper's L2, where so many are read that it matters how long lines stay in it; of other chips, where that was not
// measured, 0.
inline cudaError_t hopper_cache(int &cache, int64_t read) {
  cache = 0;
  if (read < 16 << 20) return cudaSuccess;  // nor is the driver asked for each small call
  int device, major;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess || major != 9) return error;
  return cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device);
}

// How long what a kernel reads of its `tensors` stays in an L2 of so many bytes.
template <typename T>
void set_policy(Geometry &g, CachePolicy policy, int tensors, int cache) {
  g.policy = policy;
  // Lines that outlast others take half of it or less (on an H200).
  const int64_t row = g.cols * static_cast<int64_t>(sizeof(T));
  if (policy == OUTLASTS)
    g.let_go = std::max<int64_t>(0, g.rows - ceil_div(cache / 2, tensors * row));
}

inline bool is_aligned(const void *data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// Whether rows `stride` elements apart begin between multiples of 16 bytes as those of contiguous tensors do.
template <typename T>
bool is_in_step(const Geometry &g, const void *data, int64_t stride) {
  constexpr int N = 16 / sizeof(T);
  return data == nullptr || (is_aligned(data) && (g.rows == 1 || (stride - g.cols) % N == 0));
}

// A kernel's shape: threads a row, elements a thread, the widest row it is for, and threads a block.
template <int TEAM_, int ELEMENTS_, int WIDEST_ = TEAM_ *ELEMENTS_, int BLOCK_ = THREADS<TEAM_>>
struct Shape {
  static constexpr int TEAM = TEAM_, ELEMENTS = ELEMENTS_, WIDEST = WIDEST_, BLOCK = BLOCK_;
};
template <typename...>
struct Shapes {};

// first_to_take() of f(shape), of those of the shapes that have room for a row's vectors.
template <int N, typename F, typename... S>
cudaError_t with_shape(int cols, Shapes<S...>, F &&f) {
  return first_to_take([&] { return cols / N * N <= S::WIDEST ? f(S{}) : NOT_TAKEN; }...);
}

// How many clusters of each size run at once: 0 is not one.
template <auto KERNEL>
cudaError_t count_clusters(int (&clusters)[MAX_CLUSTER + 1], int threads, int shared,
                           cudaStream_t stream) {
  std::fill(std::begin(clusters), std::end(clusters), 0);
  cudaError_t error =
      cudaFuncSetAttribute(KERNEL, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  for (int size = 2; size <= MAX_CLUSTER && error == cudaSuccess; ++size) {
    Launch launch(size, threads, shared, stream);
    launch.cluster(size);
    error = cudaOccupancyMaxActiveClusters(&clusters[size], KERNEL, &launch.config);
    if (error == cudaErrorInvalidClusterSize) {  // wider than this chip's
      clusters[size] = 0;
      cudaGetLastError();
      return cudaSuccess;
    }
  }
  return error;
}

// Launches a kernel whose clusters take a number of rows each and end, and are as small as a row allows; `shared`: bytes a block.
// NOT_TAKEN where a chip does not run such clusters.
template <auto KERNEL, int TEAM, int K, int N, typename P>
cudaError_t launch_clusters(P &p, int64_t clusters, int shared, cudaStream_t stream) {
  thread_local int known = -1, at_once[MAX_CLUSTER + 1];
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (!is_for_sm_90<KERNEL>(device)) return NOT_TAKEN;
  if (device != known) {
    cudaFuncAttributes attributes;
    error = cudaFuncGetAttributes(&attributes, KERNEL);
    if (error != cudaSuccess) return error;
    int most;
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (error != cudaSuccess) return error;
    std::fill(std::begin(at_once), std::end(at_once), 0);
    if (static_cast<int>(attributes.sharedSizeBytes) + shared <= most) {
      error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (error == cudaSuccess) error = count_clusters<KERNEL>(at_once, TEAM, shared, stream);
      if (error != cudaSuccess) return error;
    }
    known = device;
  }
  const int vectors = p.cols / N;
  p.cluster = std::max(2, static_cast<int>(ceil_div(vectors, TEAM * K)));
  if (p.cluster > MAX_CLUSTER || at_once[p.cluster] == 0 || clusters * p.cluster > INT32_MAX)
    return NOT_TAKEN;
  // Multiples of a warp's vectors, so that no block begins within a line of memory where its row does not.
  p.slice = static_cast<int>(ceil_div(vectors, p.cluster * 32)) * 32 * N;
  Launch launch(static_cast<unsigned>(clusters * p.cluster), TEAM, shared, stream);
  launch.cluster(p.cluster);
  return cudaLaunchKernelEx(&launch.config, KERNEL, p);
}

// Multiprocessors come in groups of 16, or a few more, and a cluster has to fit into one: how much of a group clusters of as many blocks of
// `columns` columns as a row takes fill, `blocks` a multiprocessor, in 32nds. 0: a row takes more than MAX_CLUSTER.
inline int places_taken(int cols, int columns, int blocks) {
  const int size = std::max(2, static_cast<int>(ceil_div(cols, columns)));
  return size > MAX_CLUSTER ? 0 : 16 * blocks / size * size * 2 / blocks;
}

// A multiple of `step`, so that the rows of a thread begin alike, near `at_once` (which run at once) or a multiple of that, so
// that few of them idle in the last round.
inline int64_t alike(int64_t at_once, int64_t step, int64_t most) {
  int64_t best = 0;
  double best_share = 0;
  for (int64_t rounds = 1; rounds <= 8 && rounds * at_once <= most; ++rounds) {
    const int64_t chunks = rounds * at_once / step * step;
    const double share =
        static_cast<double>(chunks) / static_cast<double>(rounds * at_once) - 0.01 * rounds;
    if (share > best_share) best = chunks, best_share = share;
  }
  return best;
}

// What launch_ring asks the driver about a kernel and its device.
struct Facts {
  int device = -1;
  int processors;
  int room;  // shared memory for a block's ring
  bool for_sm_90;
  int clusters[MAX_CLUSTER + 1];  // that run at once, by their size
};

// Asks, once for the device that a thread uses, and lets the kernel have that room.
template <auto KERNEL, int BLOCK, int BLOCKS, bool CLUSTER>
cudaError_t ask_driver(Facts &facts, cudaStream_t stream) {
  int device, room, room_a_block;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || device == facts.device) return error;
  facts.device = -1;
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, KERNEL);
  const auto get = [&](int &value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(facts.processors, cudaDevAttrMultiProcessorCount);
  get(room, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(room_a_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (error != cudaSuccess) return error;
  const int own = static_cast<int>(ceil_div(attributes.sharedSizeBytes, 128)) * 128;
  facts.room = std::min(room / BLOCKS - 1024, room_a_block) - own;
  facts.for_sm_90 = attributes.ptxVersion >= 90;
  error = cudaFuncSetAttribute(KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, facts.room);
  if (CLUSTER && facts.for_sm_90 && error == cudaSuccess) {
    error = count_clusters<KERNEL>(facts.clusters, BLOCK, facts.room, stream);
  }
  if (error == cudaSuccess) facts.device = device;
  return error;
}

// The size of clusters, from `smallest` to `largest`, with the most rows a time: a thread's work is its vectors, and for each row about as
// much as two more. 0: the chip runs none of them.
inline int best_cluster(const Facts &facts, int smallest, int largest, int vectors, int team) {
  double best = 0;
  int found = 0;
  for (int size = smallest; size <= std::min(largest, MAX_CLUSTER); ++size) {
    const double rate = facts.clusters[size] / (static_cast<double>(vectors) / (size * team) + 2);
    if (rate > best) best = rate, found = size;
  }
  return found;
}

// Launches a kernel on as many blocks (or clusters) as run at once. NOT_TAKEN where the chip has no room for `least` rows of a team, or
// threads would have fewer than FULL vectors. The ring gets the rows that ring_bytes have room for, `most` at most.
template <auto KERNEL, int TENSORS, int TEAM, int K, int N, bool CLUSTER, int BLOCKS, bool ODD,
          int FULL, typename P>
cudaError_t launch_ring(P &p, int ring_bytes, int least, int most, int64_t max_blocks,
                        cudaStream_t stream) {
  constexpr int threads = THREADS<TEAM>, teams = threads / TEAM;
  static_assert(!CLUSTER || teams == 1);  // whose barriers and exchange are the block's
  thread_local Facts facts;
  const cudaError_t error = ask_driver<KERNEL, threads, BLOCKS, CLUSTER>(facts, stream);
  if (error != cudaSuccess) return error;
  if (CLUSTER && !facts.for_sm_90) return NOT_TAKEN;
  p.chunks = std::min<int64_t>(ceil_div(p.rows, teams), facts.processors * BLOCKS);
  const int vectors = p.cols / N;
  p.cluster = 1;
  if (CLUSTER) {
    const int smallest = std::max<int>(2, ceil_div(vectors, TEAM * K));
    p.cluster = best_cluster(facts, smallest, FULL > 0 ? smallest : MAX_CLUSTER, vectors, TEAM);
    if (p.cluster == 0) return NOT_TAKEN;
    p.chunks = std::min<int64_t>(p.rows, facts.clusters[p.cluster]);
  }
  p.slot = static_cast<int>(ceil_div(vectors, p.cluster));
  p.slice = p.slot * N;
  // The last block has the fewest; of an odd row one more may lie half in another row.
  if (FULL > 0 && vectors - ODD - (p.cluster - 1) * p.slot < FULL * TEAM) return NOT_TAKEN;
  if (ODD)
    p.slot = static_cast<int>(ceil_div(p.slot + 2 + 7, 8)) *
             8;  // the vectors at the ends, and what Ring shifts
  const int stage = teams * TENSORS * p.slot * 16;
  p.stages = facts.for_sm_90
                 ? std::min({most, std::max(least, ring_bytes / stage), facts.room / stage})
                 : 0;
  // The blocks' sums, a float a column and team, go through the same place.
  const int sums = teams > 1 ? teams * p.cols : ODD ? p.slot * N : 0;
  const int bytes = std::max(p.stages * stage, sums * static_cast<int>(sizeof(float)));
  if ((facts.for_sm_90 && p.stages < least) || bytes > facts.room) return NOT_TAKEN;
  p.chunks = std::min(p.chunks, max_blocks);
  if (ODD && CLUSTER) {
    const int64_t at_once = std::min(p.chunks, max_blocks - MAX_PERIOD);
    p.chunks = make_shares(p.shares, p.rows, p.cols, N, at_once, max_blocks);
  } else if (ODD && p.rows > p.chunks * teams) {
    // No more than there are rows for: the scratch has no partial rows for others.
    p.chunks = alike(p.chunks, std::max(1, N / teams), std::min(max_blocks, p.rows / teams));
  }
  if (p.chunks == 0) return NOT_TAKEN;
  p.apart = static_cast<int>(p.chunks * teams * p.x_stride / N % 8);
  Launch launch(static_cast<unsigned>(p.chunks * p.cluster), threads, bytes, stream);
  if (CLUSTER) launch.cluster(p.cluster);
  return cudaLaunchKernelEx(&launch.config, KERNEL, p);
}

// The C++ type of a dtype but float64.
template <typename F>
cudaError_t with_half_or_float(dtype_t dtype, F &&f) {
  switch (dtype) {
    case DTYPE_FLOAT32: return f(float{});
    case DTYPE_BFLOAT16: return f(__nv_bfloat16{});
    case DTYPE_FLOAT16: return f(__half{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace norm_cuda

#endif
