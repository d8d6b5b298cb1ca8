// csrc/common/cuda/async.cuh for the CPU, where nothing is asynchronous.
#pragma once

#include <cuda_runtime.h>
