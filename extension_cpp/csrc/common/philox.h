/* Random bits for dropout, shared by C and CUDA. The generator is Philox 4x32-7, a bijection of a
 * counter of four words under a key of two words. Seven rounds pass the BigCrush tests (see the
 * source below). PyTorch uses ten rounds; a dropout mask does not need this safety margin.
 *
 * The bits of an element are the same in every version of this library and on every device. Element
 * i of a contiguous tensor uses word i % 8 / 2 of philox((i / 8, high word of i / 8, 0, 0), (seed,
 * high word of seed)). If i is odd, the two halves of the word are swapped. Any part of a mask can
 * therefore be recomputed from the seed, in any order.
 *
 * Two elements share a word, because computing a word for each element would take longer than
 * reading and writing a half-precision element. Each element is dropped with probability p, rounded
 * to a multiple of 2^-32. The two elements of a word are almost independent: an element's upper 16
 * bits decide whether it is dropped, unless they equal the threshold's. The probability that both
 * are dropped differs from p^2 by less than 2^-16, and is exact for p = 0.5.
 *
 * Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". */
#ifndef EXTENSION_CPP_PHILOX_H
#define EXTENSION_CPP_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define PHILOX_FUNCTION static inline __host__ __device__
#else
#define PHILOX_FUNCTION static inline
#endif

#define PHILOX_ROUNDS 7
#define PHILOX_MULTIPLIER_0 0xD2511F53u
#define PHILOX_MULTIPLIER_1 0xCD9E8D57u
#define PHILOX_WEYL_0 0x9E3779B9u
#define PHILOX_WEYL_1 0xBB67AE85u

typedef struct {
  uint32_t word[4];
} philox_t;

PHILOX_FUNCTION void philox_round(philox_t *counter, uint32_t key_0, uint32_t key_1) {
  uint32_t *c = counter->word;
  const uint64_t product_0 = (uint64_t)PHILOX_MULTIPLIER_0 * c[0],
                 product_1 = (uint64_t)PHILOX_MULTIPLIER_1 * c[2];
  c[0] = (uint32_t)(product_1 >> 32) ^ c[1] ^ key_0;
  c[1] = (uint32_t)product_1;
  c[2] = (uint32_t)(product_0 >> 32) ^ c[3] ^ key_1;
  c[3] = (uint32_t)product_0;
}

static inline philox_t philox(philox_t counter, uint32_t key_0, uint32_t key_1) {
  for (uint32_t round = 0; round < PHILOX_ROUNDS; ++round) {
    philox_round(&counter, key_0 + round * PHILOX_WEYL_0, key_1 + round * PHILOX_WEYL_1);
  }
  return counter;
}

/* Returns the counter that elements [8 * group, 8 * group + 8) share. */
PHILOX_FUNCTION philox_t counter_of(int64_t group) {
  const philox_t counter = {{(uint32_t)group, (uint32_t)((uint64_t)group >> 32), 0, 0}};
  return counter;
}

static inline philox_t philox_of(int64_t seed, int64_t group) {
  return philox(counter_of(group), (uint32_t)seed, (uint32_t)((uint64_t)seed >> 32));
}

/* Returns the 32 random bits of an element, given the word that it shares with a neighbour. */
PHILOX_FUNCTION uint32_t bits_of(uint32_t word, int is_odd) {
  return is_odd ? word << 16 | word >> 16 : word;
}

/* The dropout argument of a kernel. An element is kept and scaled if its random bits exceed
 * last_dropped. Otherwise it becomes 0. */
typedef struct {
  const int64_t *seed; /* shape (1), in the device's memory; NULL means no dropout */
  double scale;        /* 1 / (1 - p), or 0 if p is 1 */
  /* `scale` for all types but float64, because nvcc would convert `scale` for every element. */
  float scale_float;
  uint32_t last_dropped; /* round(p * 2^32) - 1, at least 0 */
} dropout_t;

/* Makes the argument for a dropout probability 0 < p <= 1. `seed` is a pointer to device memory. */
static inline dropout_t dropout_of(double p, const int64_t *seed) {
  const double dropped = p * 0x1p32 + 0.5;
  const uint64_t count = dropped < 1 ? 1 : (uint64_t)dropped;
  const double scale = p < 1 ? 1 / (1 - p) : 0; /* a factor, which must be finite */
  const dropout_t dropout = {seed, scale, (float)scale, (uint32_t)(count - 1)};
  return dropout;
}

#endif
