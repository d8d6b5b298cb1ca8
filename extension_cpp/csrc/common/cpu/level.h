/* Instruction sets for the CPU kernels. Each <op>_cpu.c is compiled once per level, with
 * CPU_LEVEL_<NAME> defined. CPU_ENTRY, at the end of that file, defines a function whose name ends
 * in the level's name. In the baseline object, CPU_ENTRY also defines the public function, which
 * picks a level at run time.
 *
 *  baseline  SSE2, which every x86-64 processor has. It is the only level on other architectures,
 *            with the compiler's default instructions, and in a debug build (CPU_BASELINE_ONLY),
 *            which therefore compiles in a third of the time.
 *  v3        AVX2, FMA, F16C
 *  v4        AVX-512 F, BW, VL, DQ; for float64 it calls v3, which gives the same bits
 *
 * EXTENSION_CPP_CPU_LEVEL=baseline|v3|v4 selects a lower level than the processor has. The variable
 * is read when the library is loaded. (PyTorch's own variable of this kind is
 * ATEN_CPU_CAPABILITY.) */
#ifndef EXTENSION_CPP_CPU_LEVEL_H
#define EXTENSION_CPP_CPU_LEVEL_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { CPU_BASELINE, CPU_V3, CPU_V4 } cpu_level_t;

cpu_level_t cpu_level(void);
const char *cpu_level_name(cpu_level_t level);

/* Returns whether a kernel that reads and writes this many bytes should bypass the caches with its
 * stores. It should if it touches more bytes than fit into the last-level cache. Smaller results
 * stay in the cache for the op that reads them next. */
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
 * that torch_parallel_for calls. The function calls `static void f##_range(int64_t begin, int64_t
 * end, const args_type *args)` of the same file. CPU_ENTRY_OF is for argument structs in which the
 * dtype is a nested member, such as rows.dtype. */
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
