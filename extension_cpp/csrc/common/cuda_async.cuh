// Asynchronous copies to shared memory and, from sm_90 on, the exchange of numbers within a cluster of blocks.
#ifndef EXTENSION_CPP_CUDA_ASYNC_CUH
#define EXTENSION_CPP_CUDA_ASYNC_CUH

#include <cuda_runtime.h>

#include <cstdint>

#if __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#else
#define HAS_CLUSTERS 0
#endif

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Written out, because nvcc takes a vector that is looked at element by element for single bytes.
__device__ inline uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ inline void store_shared(uint32_t address, const uint4 &v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// Copies 16 bytes, later; is_there false: zeros, and `global` is not read. Both addresses are multiples of 16. policy: cuda_cache.cuh.
__device__ inline void copy_async(uint32_t shared, const void *global, bool is_there,
                                  uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared),
               "l"(global), "r"(is_there ? 16 : 0), "l"(policy)
               : "memory");
#endif
}

// Ends a group of this thread's copies.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last LEFT groups of this thread have arrived.
template <int LEFT>
__device__ inline void wait_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
}

// Asks for bytes to be brought to the L2, by one thread, which keeps no registers for them; before sm_90 nothing. The address and the
// size are multiples of 16. policy: cuda_cache.cuh.
__device__ inline void prefetch_bulk(const void *global, uint32_t bytes, uint64_t policy) {
#if HAS_CLUSTERS
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
#endif
}

// Over `threads` threads of the block (a multiple of 32) that name the same barrier, 1 to 15.
__device__ inline void sync_group(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

#if HAS_CLUSTERS

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline int cluster_number() {
  int number;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(number));
  return number;
}

// Every thread of every block of the cluster.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The same in two steps, which order nothing but mbarriers that are set up, behind fence_mbarrier_init().
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A phase takes so many arrivals, and the bytes that it is told to expect.
__device__ inline void init_mbarrier(uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, too.
__device__ inline void expect_bytes(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// For numbers that come from the cluster.
__device__ inline void wait_cluster(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// For what comes from the block itself, or from global memory.
__device__ inline void wait_phase(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Both addresses and the size multiples of 16; `barrier` gets the bytes. What threads have read or written there before must be
// behind a barrier (and a proxy fence, if they wrote what is still to be copied over). policy: cuda_cache.cuh.
__device__ inline void copy_bulk(uint4 *shared, const void *global, uint32_t bytes,
                                 uint64_t *barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

// Writes 8 or 16 bytes to where `slot` is in block `rank` of the cluster, and tells `barrier` there.
template <typename V>
__device__ inline void send(V *slot, uint64_t *barrier, int rank, const V &value) {
  static_assert(sizeof(V) == 8 || sizeof(V) == 16);
  uint32_t to, at, words[sizeof(V) / 4];
  memcpy(words, &value, sizeof words);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(to)
               : "r"(shared_address(slot)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(at)
               : "r"(shared_address(barrier)), "r"(rank));
  if constexpr (sizeof(V) == 8) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
            to),
        "r"(words[0]), "r"(words[1]), "r"(at)
        : "memory");
  } else {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(at)
        : "memory");
  }
}

#endif

#endif
