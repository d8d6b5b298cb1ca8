/* Include this header before kernels that apply a long chain of operations to each element, such as
 * exp and a division. It makes gcc interleave the chains of several vectors. Without it gcc emits
 * one chain after the other, and the processor's out-of-order window covers only two or three of
 * them. Norms, sums and losses do not include it, because they gain nothing or get slower. */
/* At the baseline level, gcc would not inline functions into kernels with another option. */
#if !defined(CPU_SMALL)
#pragma GCC optimize "schedule-insns"
#endif
