// How rows come to the kernels that stay for many, and how the warps that share a row exchange their sums.
//
// The ring. Persistent blocks read ahead: one thread of a team asks for a row several turns before its time, by one bulk copy
// into shared memory (from sm_90 on; before, a row is read when its turn comes). Too many bytes on their way are slower than
// too few: reads then crowd out the writes (docs/tuning.md). ODD rows lie in shared memory as they do in lines of 128 bytes of
// memory: copies that have to shift are slow.
//
// Clusters. A row wider than a block's registers is shared by the blocks of a cluster, a slice each. The row's sums go to all
// of them with st.async, and the sums of row i + 1 are sent before row i is finished, so that nobody waits for them (but in
// norm_forward_cluster.cuh, where a cluster ends with its row).
#ifndef EXTENSION_CPP_NORM_RING_CUH
#define EXTENSION_CPP_NORM_RING_CUH

#include "norm/norm_rows.cuh"

namespace norm_cuda {

// Where the warps of a team leave their numbers for each other, for up to four rows at a time. Within a block a barrier a row
// follows; in a cluster every warp sends its numbers to every block.
template <int TEAM, bool CLUSTER, typename V = float2>
struct Exchange {
  static constexpr int WARPS = TEAM > 32 ? TEAM / 32 : 1;
  V slots[4][CLUSTER ? MAX_CLUSTER * WARPS : WARPS];
  uint64_t arrived[4];
  uint64_t filled[MAX_STAGES];                 // of the ring
  uint64_t emptied[CLUSTER ? MAX_STAGES : 1];  // likewise, where its rows are read twice

  __device__ void open(int lane) {
#if HAS_CLUSTERS
    if (lane == 0) {
      for (uint64_t &barrier : arrived) init_mbarrier(&barrier, 1);
      for (uint64_t &barrier : filled) init_mbarrier(&barrier, 1);
      for (uint64_t &barrier : emptied) init_mbarrier(&barrier, WARPS);
      fence_mbarrier_init();
    }
    if constexpr (CLUSTER) sync_cluster();
#endif
    __syncthreads();
  }

  // Gives the warp's numbers for row number i, the same in all its lanes, to the other warps of the team.
  __device__ void post(int i, const V &value, int rank, int cluster) {
    const int warp = threadIdx.x % TEAM / 32, lane = threadIdx.x % 32;
    if constexpr (CLUSTER) {
#if HAS_CLUSTERS
      if (threadIdx.x == 0) expect_bytes(&arrived[i % 4], cluster * WARPS * sizeof(V));
      if (lane < cluster) send(&slots[i % 4][rank * WARPS + warp], &arrived[i % 4], lane, value);
#endif
    } else if constexpr (TEAM > 32) {
      if (lane == 0) slots[i % 4][warp] = value;
    }
  }

  // Waits for the numbers of row i; they are then at the address returned, one a warp of the team.
  __device__ const V *collect(int i) {
    if constexpr (CLUSTER) {
#if HAS_CLUSTERS
      wait_cluster(&arrived[i % 4], i / 4 % 2);
#endif
      return slots[i % 4];
    } else {
      sync_team<TEAM>();
      return slots[i % 4];
    }
  }
};

// A place in the ring, and how often the ring has gone round.
struct Place {
  int slot = 0;
  uint32_t parity = 0;
  __device__ void advance(int stages) {
    if (++slot == stages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The rows of TENSORS tensors on their way to one team. TWICE: each is read twice, and the warps leave() it.
template <typename T, int TENSORS, int TEAM, int K, int N, bool CLUSTER, bool ODD,
          bool TWICE = false, typename V = float2>
struct Ring {
  using Mine = Columns<TEAM, K, N, ODD>;
  uint4 *slots;  // of this team
  Exchange<TEAM, CLUSTER, V> &exchange;
  int stages;
  int size;                // of one tensor's slot
  Place next, now, again;  // of the next row to ask for, to read, and to read again
  // ODD: vectors from a slot to the part of the team's first row in it, and how many more for each further one, modulo 8. Those of the
  // first tensor, for all: one that lies otherwise in memory is copied more slowly.
  int first_shift, shift_step;

  // The team's first row, and the vectors from there to its next, modulo 8.
  __device__ void line_up(const T *row, int step, const Mine &columns) {
    first_shift = static_cast<int>(reinterpret_cast<uintptr_t>(row + columns.begin) / 16 % 8);
    shift_step = step;
  }
  // The place of the team's row number i.
  __device__ uint4 *slot(const Place &place, int i) const {
    return slots + place.slot * TENSORS * size + (ODD ? (first_shift + i * shift_step) & 7 : 0);
  }

  // By one thread of the team, for its row number i, when nobody reads the place any more, or all warps will leave() it. A tensor may
  // be NULL. is_last: of the tensors, behind which nothing is read.
  __device__ void fetch(int i, const T *const (&rows)[TENSORS], const Mine &columns, bool is_last,
                        uint64_t policy) {
#if HAS_CLUSTERS
    uint64_t *const filled = &exchange.filled[next.slot];
    if (TWICE) wait_phase(&exchange.emptied[next.slot], next.parity ^ 1);
    uint4 *const slot = this->slot(next, i);
    const int elements = max(columns.end - columns.begin, 0);
    int vectors = (elements + N - 1) / N, sum = 0;
    if constexpr (ODD) {
      if (is_last) {
        vectors = elements / N;
        for (int e = max(vectors * N, -columns.begin); e < elements; ++e) {
          for (int t = 0; t < TENSORS; ++t) {
            if (rows[t] != nullptr)
              reinterpret_cast<T *>(slot + t * size)[e] = rows[t][columns.begin + e];
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) sum += rows[t] == nullptr ? 0 : vectors;
    expect_bytes(filled, sum * 16);
#pragma unroll
    for (int t = 0; t < TENSORS; ++t) {
      if (rows[t] == nullptr || vectors == 0) continue;
      copy_bulk(slot + t * size, rows[t] + columns.begin, vectors * 16, filled, policy);
    }
    next.advance(stages);
#endif
  }

  __device__ void wait() const {
#if HAS_CLUSTERS
    wait_phase(&exchange.filled[now.slot], now.parity);
#endif
  }

  // By each warp, when it has read the row at `again` for the second time.
  __device__ void leave() {
#if HAS_CLUSTERS
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&exchange.emptied[again.slot]);
    again.advance(stages);
#endif
  }

  // This thread's part of tensor t at `place`, of the team's row number i, which begins at `row`.
  __device__ void load(Part<T, TEAM, K, N, ODD> &part, int t, int i, const T *row,
                       const Mine &columns, const Place &place) const {
#if HAS_CLUSTERS
    part.load_slot(slot(place, i) + t * size, columns);
#else
    part.load(row, columns);
#endif
  }
};

}  // namespace norm_cuda

#endif
