// csrc/common/cuda_async.cuh for the CPU, where nothing is asynchronous.
#pragma once

#include <cuda_runtime.h>
