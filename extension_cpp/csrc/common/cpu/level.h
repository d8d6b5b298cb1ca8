/* Instruction sets. Each <op>_cpu.c is compiled once per level, with CPU_LEVEL_<NAME> defined.
 * CPU_ENTRY at the end of the file gives each level's object a symbol of its own, and the baseline
 * object also the public symbol, which picks a level at run time.
 *
 *   baseline  SSE2, which every x86-64 has. Elsewhere the only level, the compiler's default; so it
 *             is in a debug build (CPU_BASELINE_ONLY), which compiles in a third of the time
 *   v3        AVX2, FMA, F16C
 *   v4        AVX-512 F, BW, VL, DQ; for float64 it calls v3, which gives the same bits
 *
 * EXTENSION_CPP_CPU_LEVEL=baseline|v3|v4 lowers the choice. It is read when the library is loaded.
 * (PyTorch's own variable of this kind is ATEN_CPU_CAPABILITY.) */
#ifndef EXTENSION_CPP_CPU_LEVEL_H
#define EXTENSION_CPP_CPU_LEVEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CPU_BASELINE, CPU_V3, CPU_V4 } cpu_level_t;

cpu_level_t cpu_level(void);
const char *cpu_level_name(cpu_level_t level);

/* Whether a kernel that touches this many bytes should stream its stores past the caches. Only if
 * they exceed the last-level cache of a core: else the next reader of the output would miss. */
int cpu_should_stream(int64_t bytes);

#ifdef __cplusplus
}
#endif

#if defined(CPU_LEVEL_V4)
#define CPU_NAME(name) name##_v4
#elif defined(CPU_LEVEL_V3)
#define CPU_NAME(name) name##_v3
#else
#define CPU_NAME(name) name##_baseline
#endif

/* CPU_ENTRY(f, args_type) exports `void f(int64_t begin, int64_t end, void *args)`, the signature
 * that torch_parallel_for calls. It calls this file's `static void f##_range(int64_t begin, int64_t
 * end, const args_type *args)`. CPU_ENTRY_OF is for arguments whose `dtype` is not a member of
 * their own, such as rows.dtype. */
#define CPU_ENTRY_LEVEL(name, args_type)                        \
  void CPU_NAME(name)(int64_t begin, int64_t end, void *args);  \
  void CPU_NAME(name)(int64_t begin, int64_t end, void *args) { \
    name##_range(begin, end, (const args_type *)args);          \
  }
#if defined(CPU_LEVEL_V4)
#define CPU_ENTRY_OF(name, args_type, dtype)               \
  void name##_v3(int64_t begin, int64_t end, void *args);  \
  void name##_v4(int64_t begin, int64_t end, void *args);  \
  void name##_v4(int64_t begin, int64_t end, void *args) { \
    if (((const args_type *)args)->dtype == DTYPE_FLOAT64) \
      name##_v3(begin, end, args);                         \
    else                                                   \
      name##_range(begin, end, (const args_type *)args);   \
  }
#elif defined(CPU_LEVEL_V3)
#define CPU_ENTRY_OF(name, args_type, dtype) CPU_ENTRY_LEVEL(name, args_type)
#elif defined(__x86_64__) && !defined(CPU_BASELINE_ONLY)
#define CPU_ENTRY_OF(name, args_type, dtype)                        \
  CPU_ENTRY_LEVEL(name, args_type)                                  \
  void name##_v3(int64_t begin, int64_t end, void *args);           \
  void name##_v4(int64_t begin, int64_t end, void *args);           \
  void name(int64_t begin, int64_t end, void *args) {               \
    switch (cpu_level()) {                                          \
      case CPU_V4: name##_v4(begin, end, args); return;             \
      case CPU_V3: name##_v3(begin, end, args); return;             \
      case CPU_BASELINE: name##_baseline(begin, end, args); return; \
    }                                                               \
  }
#else
#define CPU_ENTRY_OF(name, args_type, dtype) \
  CPU_ENTRY_LEVEL(name, args_type)           \
  void name(int64_t begin, int64_t end, void *args) { name##_baseline(begin, end, args); }
#endif
#define CPU_ENTRY(name, args_type) CPU_ENTRY_OF(name, args_type, dtype)

#endif
