/* CPU kernel of kernel_template. kernel_template_cpu.c compiles this file once per element type
 * (for_each_dtype.h defines T, ACC, NAME, LOAD and STORE). NAME(column)(k) is the position in
 * memory, within its block, of the element that lane k holds. */

/* Returns the next state of the scan. */
ALWAYS_INLINE double NAME(next)(double decay, double state, ACC x) { return decay * state + x; }

static void NAME(scan_row)(const kernel_template_args *args, int64_t row) {
  const T *x = (const T *)args->x + row * args->steps;
  T *y = (T *)args->y + row * args->steps;
  ACC v[BLOCK], in_order[BLOCK];
  double state = 0;
  for (int64_t done = 0; done < args->steps; done += BLOCK) {
    const int n = args->steps - done < BLOCK ? (int)(args->steps - done) : BLOCK;
    const int64_t start = args->reverse ? args->steps - done - n : done;
    LOAD(v, x + start, n);
    for (int k = 0; k < BLOCK; ++k) in_order[NAME(column)(k)] = v[k];
    for (int i = 0; i < n; ++i) {
      const int k = args->reverse ? n - 1 - i : i;
      state = NAME(next)(args->decay, state, in_order[k]);
      in_order[k] = (ACC)state;
    }
    for (int k = 0; k < BLOCK; ++k) v[k] = in_order[NAME(column)(k)];
    STORE(y + start, v, n, 0);
  }
}
