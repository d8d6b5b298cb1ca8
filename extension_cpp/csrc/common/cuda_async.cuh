// Asynchronous copies to shared memory (from sm_80 on; before, they are plain), and the exchange of numbers within a cluster of
// blocks (from sm_90 on).
#ifndef EXTENSION_CPP_CUDA_ASYNC_CUH
#define EXTENSION_CPP_CUDA_ASYNC_CUH

#include <cuda_runtime.h>

#include <cstdint>

#define HAS_CLUSTERS (__CUDA_ARCH__ >= 900)

__device__ inline uint32_t shared_address(const void *p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes, both addresses aligned to 16. The thread that copied must wait before it reads.
__device__ inline void copy_async(uint4 *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
#else
  *shared = *static_cast<const uint4 *>(global);
#endif
}

// Written out, because nvcc takes a vector that is looked at element by element for single bytes.
__device__ inline uint4 load_shared(const uint4 *p) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(p))
               : "memory");
  return v;
}

__device__ inline void store_shared(uint4 *p, const uint4 &v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(p)), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Closes a group of copies; an empty group counts, too.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until at most `pending` (0 to 3) of this thread's last groups are still on their way.
__device__ inline void wait_for_copies(int pending) {
#if __CUDA_ARCH__ >= 800
  switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
  }
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

// Every thread of every block of the cluster.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// mbarriers with one arrival a phase: that of the thread which says how many bytes the phase is to receive.
__device__ inline void init_mbarrier(uint64_t *barrier) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void expect_bytes(uint64_t *barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ inline void wait_phase(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Writes two numbers to where `slot` is in block `rank` of the cluster, and tells `barrier` there.
__device__ inline void send(float2 *slot, uint64_t *barrier, int rank, float2 value) {
  uint32_t to, at;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(shared_address(slot)), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(value.x), "f"(value.y), "r"(at)
               : "memory");
}

#endif

#endif
