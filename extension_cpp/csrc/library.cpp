// Owns the operators' namespace, whose name the build defines. Every op adds its own fragment, so
// this file is not edited for an op.
#include <torch/csrc/stable/library.h>

#include "common/cpu/level.h"

// STABLE_TORCH_LIBRARY does not expand its argument, unlike _FRAGMENT and _IMPL.
#define OWN(name, m) STABLE_TORCH_LIBRARY(name, m)
OWN(TORCH_EXTENSION_NAME, m) { (void)m; }

// Python reads this description of the library's build through ctypes.
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char *extension_cpp_build_info() { return BUILD_INFO; }
EXPORTED const char *extension_cpp_cpu_level() { return cpu_level_name(cpu_level()); }
