// Launcher of tree_attention.cuh.
#include "tree_attention.cuh"

namespace openjev_fast {
namespace {

template <int kDim>
cudaError_t launch(const TreeAttention& a, cudaStream_t stream) {
  constexpr int kMaxRows = kAttentionWarps * kAttentionRows;
  const int group = a.query_heads / a.kv_heads;
  // Parts of about the same number of heads, each small enough for one block.
  const int64_t parts = ceil_div(group, kMaxRows / a.tile_queries);
  const int64_t heads = ceil_div(group, parts);
  const int64_t warps = ceil_div(heads * a.tile_queries, kAttentionRows);
  const HeadSplit split{static_cast<unsigned>(heads), static_cast<unsigned>(ceil_div(group, heads))};
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
