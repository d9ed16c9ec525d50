// Launcher of delta_rule.cuh.
#include "delta_rule.cuh"
#include "launch.h"

namespace openjev_fast {
namespace {

template <int kStages>
cudaError_t launch(const DeltaRule& arguments, cudaStream_t stream) {
  const auto kernel = delta_rule_kernel<kStages>;
  constexpr int kBytes = sizeof(DeltaShared<kStages>);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(arguments.nodes) * arguments.value_heads * kDeltaSlices;
  kernel<<<blocks, kDeltaThreads, kBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

int64_t delta_rule_flags(int64_t node_slots, int64_t value_heads) {
  return node_slots * value_heads * kDeltaSlices * kDeltaWarps;
}

cudaError_t launch_delta_rule(const DeltaRule& arguments, cudaStream_t stream) {
  int device = 0, processors = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess && arguments.node_slots > 0) {
    const int64_t flags = delta_rule_flags(arguments.node_slots, arguments.value_heads);
    error = cudaMemsetAsync(arguments.flag, 0, flags * sizeof(int32_t), stream);
  }
  if (error != cudaSuccess) return error;
  // Prefetched chunks where they keep no block waiting for shared memory.
  const int64_t blocks = int64_t{arguments.nodes} * arguments.value_heads * kDeltaSlices;
  const bool prefetch = blocks <= 2 * processors && shared_bytes >= int{sizeof(DeltaShared<2>)};
  return prefetch ? launch<2>(arguments, stream) : launch<1>(arguments, stream);
}

}  // namespace openjev_fast
