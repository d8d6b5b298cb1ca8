// Queries the properties of the current device that a plan depends on (rows/plan.h).
#include "rows/launch.cuh"

namespace rows {

// This kernel is never launched. ask_device() asks how many clusters of it run at once.
__global__ void cluster_probe_kernel() {}

static cudaError_t ask_device(Device &device, int number) {
  device = {};
  int major = 0, l2_bytes = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaFuncGetAttributes(&attributes, cluster_probe_kernel);
  const auto ask = [&](int &value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, number);
  };
  ask(device.sms, cudaDevAttrMultiProcessorCount);
  ask(major, cudaDevAttrComputeCapabilityMajor);
  ask(l2_bytes, cudaDevAttrL2CacheSize);
  device.l2_bytes = major == 9 ? l2_bytes : 0;
  device.has_sm_90_code = attributes.ptxVersion >= 90;
  if (error != cudaSuccess || !device.has_sm_90_code) return error;
  // bytes of shared memory; with so much, only one CTA fits on an SM
  constexpr int SHARED = 160 << 10;
  const auto probe = reinterpret_cast<const void *>(cluster_probe_kernel);
  for (int log = 1; log < 5; ++log) {
    LaunchConfig config(1 << log, dim3(512), nullptr);
    int &clusters = device.clusters[log];
    error = config.set_cluster(probe, SHARED, 1 << log);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, probe, &config);
    // The device has no clusters of this size, or too little shared memory.
    if (error == cudaErrorInvalidClusterSize || error == cudaErrorInvalidValue) {
      cudaGetLastError();
      clusters = 0;
    } else if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

// Returns the current device's properties. Each thread caches those of the device that it used
// last.
cudaError_t current_device(Device &device) {
  thread_local int known = -1;
  thread_local Device facts;
  int number;
  cudaError_t error = cudaGetDevice(&number);
  if (error == cudaSuccess && number != known) {
    error = ask_device(facts, number);
    known = error == cudaSuccess ? number : -1;
  }
  device = facts;
  device.shapes = allowed_shapes;
  return error;
}

}  // namespace rows
