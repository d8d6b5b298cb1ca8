/* Compiles the file named by KERNEL_BODY once per element type, with these macros:
 *  T                    the type in memory (uint16_t for bfloat16 and float16)
 *  ACC                  the accumulation type: double for float64, float for the others
 *  NAME(f)              f with the type's name appended, such as f_float32
 *  LOAD, STORE          the block functions of the type (common/cpu/block.h)
 *  WIDEN, NARROW        convert one element to the accumulation type, and back
 * The kernels are in a header and not in a macro, so a debugger can step through their lines.
 * DISPATCH_DTYPE calls the kernel of a given dtype. At the instruction set v4 (common/cpu/level.h)
 * there are no functions for float64. */
#define NAME_(f, type) f##_##type
#define NAME_EXPANDED(f, type) NAME_(f, type)

#if !defined(CPU_LEVEL_V4)
#define T double
#define ACC double
#define NAME(f) NAME_EXPANDED(f, float64)
#define LOAD load_float64
#define STORE store_float64
#define WIDEN widen_float64
#define NARROW narrow_float64
#include KERNEL_BODY
#undef T
#undef ACC
#undef NAME
#undef LOAD
#undef STORE
#undef WIDEN
#undef NARROW
#define CALL_FLOAT64(f, ...) f##_float64(__VA_ARGS__)
#else
#define CALL_FLOAT64(f, ...) __builtin_trap()
#endif

#define T float
#define ACC float
#define NAME(f) NAME_EXPANDED(f, float32)
#define LOAD load_float32
#define STORE store_float32
#define WIDEN widen_float32
#define NARROW narrow_float32
#include KERNEL_BODY
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef WIDEN
#undef NARROW

#define T uint16_t
#define NAME(f) NAME_EXPANDED(f, bfloat16)
#define LOAD load_bfloat16
#define STORE store_bfloat16
#define WIDEN widen_bfloat16
#define NARROW narrow_bfloat16
#include KERNEL_BODY
#undef NAME
#undef LOAD
#undef STORE
#undef WIDEN
#undef NARROW

#define NAME(f) NAME_EXPANDED(f, float16)
#define LOAD load_float16
#define STORE store_float16
#define WIDEN widen_float16
#define NARROW narrow_float16
#include KERNEL_BODY
#undef T
#undef ACC
#undef NAME
#undef LOAD
#undef STORE
#undef WIDEN
#undef NARROW

#define DISPATCH_DTYPE(dtype, f, ...)                        \
  switch (dtype) {                                           \
    case DTYPE_FLOAT64: CALL_FLOAT64(f, __VA_ARGS__); break; \
    case DTYPE_FLOAT32: f##_float32(__VA_ARGS__); break;     \
    case DTYPE_BFLOAT16: f##_bfloat16(__VA_ARGS__); break;   \
    case DTYPE_FLOAT16: f##_float16(__VA_ARGS__); break;     \
  }
