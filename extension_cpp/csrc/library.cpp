// Owns the namespace; every op adds its own fragment. Not edited for an op.
#include <torch/csrc/stable/library.h>

#include "common/cpu_level.h"

STABLE_TORCH_LIBRARY(extension_cpp, m) { (void)m; }

// Read through ctypes: they say of this file what no Python file could know.
#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED const char *extension_cpp_build_info() { return BUILD_INFO; }
EXPORTED const char *extension_cpp_cpu_level() { return cpu_level_name(cpu_level()); }
