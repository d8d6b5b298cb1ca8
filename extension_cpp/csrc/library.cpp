// Owns the namespace, which the build names. Every op adds its own fragment; this file is not
// edited for an op.
#include <torch/csrc/stable/library.h>

#include "common/cpu/level.h"

// STABLE_TORCH_LIBRARY does not expand its argument, unlike _FRAGMENT and _IMPL.
#define OWN(name, m) STABLE_TORCH_LIBRARY(name, m)
OWN(TORCH_EXTENSION_NAME, m) { (void)m; }

// Python reads these through ctypes: they describe this build of the library.
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char *extension_cpp_build_info() { return BUILD_INFO; }
EXPORTED const char *extension_cpp_cpu_level() { return cpu_level_name(cpu_level()); }
