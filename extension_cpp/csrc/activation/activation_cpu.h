/* What activation_cpu_math.h needs. That file is compiled once per element type, this one once. */
#ifndef EXTENSION_CPP_ACTIVATION_CPU_H
#define EXTENSION_CPP_ACTIVATION_CPU_H

#include "activation/activation.h"
#include "activation/activation_constants.h"
#include "common/cpu_block.h"
#include "common/cpu_level.h"
#include "common/cpu_math.h"

/* For x above this, exp(-x) is taken as 0. In float, x * exp(-x) rounds to 0 there; in double,
 * exp(-x) itself does. */
#define ACTIVATION_ZERO(x) _Generic((x), float : 110.0f, double : 750.0)
/* At this |x|, x^2 / 2 is above ACTIVATION_ZERO. */
#define GELU_ZERO(x) _Generic((x), float : 15.0f, double : 39.0)

/* Calls f(kind, ...) with a constant kind, for functions that are inlined. */
#define DISPATCH_ACTIVATION(kind, f, ...)             \
  switch (kind) {                                     \
    case SILU: f(SILU, __VA_ARGS__); break;           \
    case GELU: f(GELU, __VA_ARGS__); break;           \
    case GELU_TANH: f(GELU_TANH, __VA_ARGS__); break; \
  }

#endif
