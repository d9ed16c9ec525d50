// Launcher of tree_attention.cuh.
#include "tree_attention.cuh"

namespace openjev_fast {
namespace {

template <int kDim>
cudaError_t launch(const TreeAttention& a, cudaStream_t stream) {
  const HeadSplit split = split_heads(a, kAttentionWarps * kAttentionRows);
  const int64_t warps = ceil_div(split.heads * a.tile_queries, kAttentionRows);
  const unsigned blocks = static_cast<unsigned>(a.tiles) * a.kv_heads * split.parts;
  const auto kernel = tree_attention_kernel<kDim>;
  constexpr int kBytes = sizeof(AttentionShared<kDim>);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, static_cast<unsigned>(warps * kWarp), kBytes, stream>>>(a, split);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_tree_attention(const TreeAttention& arguments, cudaStream_t stream) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  if (major == 9 && arguments.dim == 256) return launch_tree_attention_sm90(arguments, stream);
  switch (arguments.dim) {
    case 64:
      return launch<64>(arguments, stream);
    case 128:
      return launch<128>(arguments, stream);
    case 256:
      return launch<256>(arguments, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace openjev_fast
