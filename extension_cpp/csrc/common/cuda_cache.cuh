// How long the lines of memory that a kernel reads stay in the L2.
//
// Kernels that read and write tensors larger than the L2 are 3 to 4 % faster where the lines that they read outlast those that they write
// (docs/tuning.md): these are then written back sooner, it is thought, and more of them at a time. Behind such a kernel its lines
// would keep others out, for as long as those are few; so it lets the last ones go again. Of tensors that are not much larger than the
// L2 some kernels are faster where the lines that they read go first: those that they write then stay, also for who reads them next.
#ifndef EXTENSION_CPP_CUDA_CACHE_CUH
#define EXTENSION_CPP_CUDA_CACHE_CUH

#include "common/cuda_vector.cuh"

// What loads and copies take for it, on the host so that a kernel finds it among its parameters: the words that createpolicy.fractional
// makes on every architecture from sm_80 on.
enum CachePolicy : uint64_t {
  USUAL = 0x10f0'0000'0000'0000,       // evict_unchanged: as without
  GOES_FIRST = 0x12f0'0000'0000'0000,  // evict_first
  OUTLASTS = 0x14f0'0000'0000'0000,    // evict_last
  NORMAL = 0x16f0'0000'0000'0000,      // evict_normal: also where it was to outlast others before
};

// 16 bytes, or zeros if they are not there.
__device__ inline uint4 load_cached(const void *p, bool is_there, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  uint4 v;
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %6, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@there ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(p), "l"(policy), "r"(static_cast<int>(is_there)));
  return v;
#else
  return is_there ? *static_cast<const uint4 *>(p) : uint4{};
#endif
}

// Lets the lines with the bytes from `first` to `end` go as any others would, once they have been read; each line by one of `threads`.
__device__ inline void let_lines_go(const void *first, const void *end, int64_t thread,
                                    int64_t threads) {
#if __CUDA_ARCH__ >= 800
  constexpr int LINE = 128;  // bytes
  const uintptr_t begin = reinterpret_cast<uintptr_t>(first) / LINE * LINE;
#pragma unroll 1
  for (uintptr_t line = begin + thread * LINE; line < reinterpret_cast<uintptr_t>(end);
       line += threads * LINE) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(line) : "memory");
  }
#endif
}

#endif
