// Launcher of delta_rule.cuh.
#include "delta_rule.cuh"
#include "launch.h"

namespace openjev_fast {
namespace {

template <typename Shared>
cudaError_t launch(void (*kernel)(DeltaRule), int64_t blocks, const DeltaRule& arguments,
                   cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), kDeltaThreads, kBytes, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace

int64_t delta_rule_work(int64_t tiles, int64_t value_heads) {
  return tiles * value_heads * int64_t{sizeof(DeltaWork)};
}

int64_t delta_rule_flags(int64_t slots, int64_t value_heads) {
  return slots * value_heads * kDeltaSlices * kDeltaWarps;
}

cudaError_t launch_delta_rule(const DeltaRule& arguments, cudaStream_t stream) {
  const int64_t heads = arguments.value_heads;
  const cudaError_t error =
      launch<DeltaChunkShared>(delta_chunk_kernel, arguments.chunks * heads, arguments, stream);
  if (error != cudaSuccess) return error;
  const auto state_kernel = arguments.kept ? delta_state_kernel<true> : delta_state_kernel<false>;
  return launch<DeltaStateShared>(state_kernel, arguments.nodes * heads * kDeltaSlices, arguments, stream);
}

}  // namespace openjev_fast
