// Replaces csrc/common/cuda/async.cuh on the CPU, where nothing is asynchronous.
#pragma once

#include <cuda_runtime.h>
