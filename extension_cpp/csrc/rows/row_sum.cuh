// Sums over the threads of a row: those of part of a warp, of a CTA, or of a cluster of CTAs.
#ifndef EXTENSION_CPP_ROWS_ROW_SUM_CUH
#define EXTENSION_CPP_ROWS_ROW_SUM_CUH

#include "common/cuda/async.cuh"
#include "common/cuda/reduce.cuh"

namespace rows {

constexpr int MAX_CLUSTER = 16;  // CTAs per cluster

// Sums over the threads of a row. The shape of the kernel fixes the order of the additions. `turn`
// counts the sums and picks one of SLOTS slots of shared memory, so up to SLOTS sums may be in
// progress at once. SEVERAL says that a CTA may have several rows of more than one warp each. Each
// row then uses its own named barrier. Because the number of the barrier is computed at run time,
// nvcc reserves all 16 barriers of the CTA, and an SM has barriers for only four such CTAs.
template <typename A, int SLOTS, bool SEVERAL = false>
class RowSum {
 public:
  static constexpr int MAX_WARPS = 16;  // maximum number of warps in a CTA that share a row
  struct Shared {
    alignas(2 * sizeof(A)) A warps[SLOTS][MAX_WARPS][2];
    float2 ctas[SLOTS][MAX_CLUSTER];
    uint64_t arrived[SLOTS];
  };
  const int cluster, rank;

  __device__ RowSum(Shared &shared, int cluster, int rank)
      : cluster(cluster), rank(rank), shared(shared) {
    if (!HAS_CLUSTERS || cluster == 1) return;
    if (threadIdx.x == 0) {
      for (uint64_t &barrier : shared.arrived) init_mbarrier(&barrier, 1);
      fence_mbarrier_init();
    }
    arrive_at_cluster();
  }

  // Waits until the other CTAs have initialised their mbarriers. Call it before the first exchange.
  __device__ void wait_for_others() const {
    if (HAS_CLUSTERS && cluster > 1) wait_for_cluster();
  }

  // Replaces v by its sum over the CTA's threads of the row. `turn` counts the sums: 0, 1, ...
  template <int COUNT>
  __device__ void sum_cta(A (&v)[COUNT], int turn) const {
    if (blockDim.x <= 32) {
      group_sum(v, blockDim.x);
    } else {
      post_warp(v, turn);
      read_warps(v, turn);
    }
  }

  // Returns the maximum over the CTA's threads of the row. Ignores NaN, as fmaxf does. Like a sum,
  // it needs a value of `turn` of its own.
  __device__ A max_cta(A v, int turn) const {
    v = group_max(v, min(blockDim.x, 32));
    if (blockDim.x <= 32) return v;
    const int count = blockDim.x / 32, part = threadIdx.x % MAX_WARPS;
    if (threadIdx.x % 32 == 0) warps(turn)[threadIdx.x / 32][0] = v;
    sync();
    return group_max(part < count ? warps(turn)[part][0] : -INFINITY, MAX_WARPS);
  }

  // Sends `mine` to all CTAs of the cluster. Like a sum, it needs a value of `turn` of its own.
  __device__ void send_to_all(float2 mine, int turn) const {
    if (!HAS_CLUSTERS) return;
    const int slot = turn % SLOTS;
    if (threadIdx.x == 0) expect_bytes(&shared.arrived[slot], cluster * sizeof(float2));
    if (threadIdx.x < cluster) {  // thread i sends to CTA i
      send(&shared.ctas[slot][rank], &shared.arrived[slot], threadIdx.x, mine);
    }
  }

  // Returns to lane i what CTA i % 16 sent in this turn, or zeros if there is no such CTA.
  __device__ float2 receive(int turn) const {
    float2 part{0, 0};
    if (!HAS_CLUSTERS) return part;
    const int slot = turn % SLOTS, cta = threadIdx.x % MAX_CLUSTER;
    wait_cluster_phase(&shared.arrived[slot], turn / SLOTS % 2);
    if (cta < cluster) part = shared.ctas[slot][cta];
    return part;
  }

  // post() and collect() are the two halves of a sum over the cluster. A kernel can do other work
  // between the two calls. post() contains a barrier of all threads of the CTA.
  template <int COUNT>
  __device__ void post(A (&v)[COUNT], int turn) const {
    post_warp(v, turn);
    if (threadIdx.x >= 32) return;
    read_warps(v, turn);
    send_to_all({v[0], COUNT == 2 ? v[COUNT - 1] : 0}, turn);
  }

  template <int COUNT>
  __device__ void collect(A (&v)[COUNT], int turn) const {
    const float2 part = receive(turn);
    v[0] = part.x;
    if (COUNT == 2) v[COUNT - 1] = part.y;
    group_sum(v, MAX_CLUSTER);
  }

 private:
  Shared &shared;

  __device__ auto *warps(int turn) const {
    return shared.warps[turn % SLOTS] + (SEVERAL ? threadIdx.y * (blockDim.x / 32) : 0);
  }

  // Waits for the other warps of the row.
  __device__ void sync() const {
    if (SEVERAL && blockDim.y > 1) {
      sync_threads(1 + threadIdx.y, blockDim.x);
    } else {
      __syncthreads();
    }
  }

  // Writes the sums of this warp to shared memory. If there are two sums, each half of the warp
  // adds up one of them.
  template <int COUNT>
  __device__ void post_warp(A (&v)[COUNT], int turn) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    A sum[1] = {v[0]};
    if constexpr (COUNT == 2) {
      const bool is_upper = lane & 16;
      sum[0] = is_upper ? v[1] : v[0];
      sum[0] += __shfl_xor_sync(0xffffffffu, is_upper ? v[0] : v[1], 16);
      group_sum(sum, 16);
      if (lane % 16 == 0) warps(turn)[warp][lane / 16] = sum[0];
    } else {
      group_sum(sum);
      if (lane == 0) warps(turn)[warp][0] = sum[0];
    }
    sync();
  }

  template <int COUNT>
  __device__ void read_warps(A (&v)[COUNT], int turn) const {
    const int count = blockDim.x / 32, lane = threadIdx.x % 32, part = lane % MAX_WARPS;
    const int which = COUNT == 2 ? lane / 16 : 0;
    A sum[1] = {part < count ? warps(turn)[part][which] : A(0)};
    group_sum(sum, MAX_WARPS);
    v[0] = sum[0];
    if constexpr (COUNT == 2) {
      const A other = __shfl_xor_sync(0xffffffffu, sum[0], 16);
      v[0] = which == 0 ? sum[0] : other;
      v[1] = which == 0 ? other : sum[0];
    }
  }
};

}  // namespace rows

#endif
