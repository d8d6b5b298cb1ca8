// L2 eviction hints, which say how long the lines that a kernel reads should stay in the L2.
//
// On Hopper, a kernel that reads and writes tensors larger than the L2 runs 3 to 4 % faster if the
// lines that it reads are marked evict_last. The lines that it reads then stay in the L2 longer
// than those that it writes (decision 005, L2 eviction hints). After the kernel, marked lines would
// keep the data of later kernels out of the L2. The kernel therefore marks the last lines that it
// read evict_normal again before it ends.
#ifndef EXTENSION_CPP_CUDA_CACHE_CUH
#define EXTENSION_CPP_CUDA_CACHE_CUH

#include "common/cuda/vector.cuh"

// The policy operand of a load with a hint. The host passes it as a kernel parameter. The
// instruction createpolicy.fractional returns these values on every architecture from sm_80 on.
enum CacheHint : uint64_t {
  NO_HINT = 0x10f0'0000'0000'0000,  // evict_unchanged
  EVICT_FIRST = 0x12f0'0000'0000'0000,
  EVICT_LAST = 0x14f0'0000'0000'0000,  // kept longer than lines without a hint
};

// Loads 16 bytes of global memory. If `is_there` is false, nothing is read and each 32-bit word is
// `fill`. The predicate is part of the load instruction, because with a branch around each load
// nvcc would not issue the loads back to back.
__device__ inline uint4 load_hinted(const void *p, bool is_there, uint64_t hint,
                                    uint32_t fill = 0) {
#if __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %6, 0;\n"
      "mov.b32 %0, %7;\nmov.b32 %1, %7;\nmov.b32 %2, %7;\nmov.b32 %3, %7;\n"
      "@there ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "l"(hint), "r"(static_cast<int>(is_there)), "r"(fill));
  return v;
#else
  return is_there ? *static_cast<const uint4 *>(p) : uint4{fill, fill, fill, fill};
#endif
}

// Marks the cache lines that hold the bytes [begin, end) evict_normal. The lines are divided among
// `threads` threads; `thread` is the index of the calling thread.
__device__ inline void release_lines(const void *begin, const void *end, int64_t thread,
                                     int64_t threads) {
#if __CUDA_ARCH__ >= 800
  constexpr int LINE = 128;  // bytes
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / LINE * LINE;
#pragma unroll 1
  for (uintptr_t line = first + thread * LINE; line < reinterpret_cast<uintptr_t>(end);
       line += threads * LINE) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(line) : "memory");
  }
#endif
}

#endif
