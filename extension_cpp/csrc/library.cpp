// Owns the operators' namespace, whose name the build defines. Every op adds its own fragment, so
// this file is not edited for an op.
#include <torch/csrc/stable/library.h>

#include "common/cpu/level.h"

// Unlike the macros ..._FRAGMENT and ..._IMPL, STABLE_TORCH_LIBRARY does not expand a macro given
// as its argument. OWN expands it first.
#define OWN(name, m) STABLE_TORCH_LIBRARY(name, m)
OWN(TORCH_EXTENSION_NAME, m) { (void)m; }

// Python calls these functions through ctypes. They describe how the library was built, and name
// the CPU instruction set in use.
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char *extension_cpp_build_info() { return BUILD_INFO; }
EXPORTED const char *extension_cpp_cpu_level() { return cpu_level_name(cpu_level()); }
