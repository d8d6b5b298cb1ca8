// Asynchronous instructions of sm_90 (Hopper) and newer: bulk copies into shared memory, mbarriers,
// and stores to the shared memory of other CTAs of a cluster. Code for older architectures must not
// contain them. Callers exclude them with #if or with `if (HAS_CLUSTERS)`. The latter works only if
// the compiler removes dead code: a build with nvcc -G also needs -dopt=on.
#ifndef EXTENSION_CPP_CUDA_ASYNC_CUH
#define EXTENSION_CPP_CUDA_ASYNC_CUH

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#if __CUDA_ARCH__ >= 900
#define HAS_CLUSTERS 1
#else
#define HAS_CLUSTERS 0
#endif

__device__ inline uint32_t shared_address(const void *p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Loads 16 bytes of shared memory, or zeros if `is_there` is false.
__device__ inline uint4 load_shared(uint32_t address, bool is_there) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@there ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "r"(address), "r"(static_cast<int>(is_there))
      : "memory");
  return v;
}

// Prefetches `bytes` bytes of global memory into the L2, without using registers for the data. One
// thread calls it. The address and the size must be multiples of 16. Before sm_90 it does nothing.
__device__ inline void prefetch_bulk(const void *global, uint32_t bytes, uint64_t hint) {
#if HAS_CLUSTERS
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(global),
               "r"(bytes), "l"(hint)
               : "memory");
#endif
}

// Waits at a named barrier (1 to 15) for `threads` threads of the CTA, a multiple of 32.
__device__ inline void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Returns the rank of this CTA in its cluster, or 0 before sm_90.
__device__ inline int cluster_rank() {
  int rank = 0;
  if (HAS_CLUSTERS) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// arrive_at_cluster() and wait_for_cluster() are the two halves of a barrier of all threads of all
// CTAs of the cluster. The arrival is relaxed. It makes no earlier writes visible to other CTAs,
// except initialisations of mbarriers that are followed by fence_mbarrier_init().
__device__ inline void arrive_at_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ inline void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Waits for all threads of the cluster, and makes their earlier writes visible to each other.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Writes a value to the variable `slot` of CTA `rank` of the cluster.
template <typename T>
__device__ inline void send_to(int rank, void *slot, const T &value) {
  uint32_t to, words[sizeof(T) / 4];
  memcpy(words, &value, sizeof value);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(to)
               : "r"(shared_address(slot)), "r"(rank));
  for (int i = 0; i < sizeof(T) / 4; ++i) {
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to + 4 * i), "r"(words[i]) : "memory");
  }
}

// Initialises an mbarrier. A phase completes when `arrivals` threads have arrived and all the bytes
// that they announced with expect_bytes() have been written.
__device__ inline void init_mbarrier(uint64_t *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives at the mbarrier, and adds `bytes` to the bytes that the current phase waits for.
__device__ inline void expect_bytes(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits for the end of a phase in which other CTAs of the cluster send data.
__device__ inline void wait_cluster_phase(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Waits for the end of a phase of bulk copies that this CTA started.
__device__ inline void wait_phase(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Starts an asynchronous copy from global to shared memory, whose bytes are counted at `barrier`.
// Both addresses and the size must be multiples of 16. A CTA barrier must separate the call from
// all earlier reads of that shared memory.
__device__ inline void copy_bulk(uint32_t shared, const void *global, uint32_t bytes,
                                 uint64_t *barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(hint)
      : "memory");
}

// Writes 8 bytes to the variable `slot` of CTA `rank` in the cluster, and counts the bytes at that
// CTA's `barrier`.
__device__ inline void send(float2 *slot, uint64_t *barrier, int rank, float2 value) {
  uint32_t to, at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(to)
               : "r"(shared_address(slot)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(at)
               : "r"(shared_address(barrier)), "r"(rank));
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          to),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(at)
      : "memory");
}

#endif
