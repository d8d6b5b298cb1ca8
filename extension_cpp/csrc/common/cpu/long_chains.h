/* For files whose kernels take an element through a long chain of operations, such as exp and a
 * division. Included before the kernels, this makes gcc compute several vectors side by side.
 * Otherwise it computes one after the other, and a processor looks ahead to two or three of them.
 * Norms, sums and losses gain nothing or get slower. */
#if !defined(CPU_SMALL) /* there, helpers with other options would not be inlined */
#pragma GCC optimize "schedule-insns"
#endif
