// h[k] = a[k] * h[k - 1] + b[k] in simple C, as one writes it first. The lines are shared among
// OpenMP's threads. The state is a float.
#include <stdint.h>
#include <string.h>

typedef uint16_t bfloat16;

static inline float from_float(float x) { return x; }
static inline float to_float(float x) { return x; }

static inline float from_bfloat16(bfloat16 x) {
  const uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

static inline bfloat16 to_bfloat16(float x) {  // to nearest even; the data have no NaN
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bfloat16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// In rows_T the steps of a line are neighbours in memory. In columns_T the lines are neighbours in
// memory, and the inner loop is over lines.
#define LOOPS(T)                                                                      \
  void rows_##T(const T *a, const T *b, T *h, int64_t lines, int64_t steps) {         \
    _Pragma("omp parallel for") for (int64_t l = 0; l < lines; ++l) {                 \
      float state = 0;                                                                \
      for (int64_t i = l * steps; i < (l + 1) * steps; ++i) {                         \
        state = from_##T(a[i]) * state + from_##T(b[i]);                              \
        h[i] = to_##T(state);                                                         \
      }                                                                               \
    }                                                                                 \
  }                                                                                   \
  void columns_##T(const T *a, const T *b, T *h, int64_t lines, int64_t steps) {      \
    _Pragma("omp parallel for") for (int64_t first = 0; first < lines; first += 64) { \
      const int64_t count = lines - first < 64 ? lines - first : 64;                  \
      float state[64] = {0};                                                          \
      for (int64_t k = 0; k < steps; ++k) {                                           \
        for (int64_t l = 0; l < count; ++l) {                                         \
          const int64_t i = k * lines + first + l;                                    \
          state[l] = from_##T(a[i]) * state[l] + from_##T(b[i]);                      \
          h[i] = to_##T(state[l]);                                                    \
        }                                                                             \
      }                                                                               \
    }                                                                                 \
  }

LOOPS(float)
LOOPS(bfloat16)
