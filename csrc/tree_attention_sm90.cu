// Launcher of tree_attention_sm90.cuh.
#include "tensor_map.h"
#include "tree_attention_sm90.cuh"

namespace openjev_fast {
namespace {

bool make_map(CUtensorMap& map, const void* data, int64_t rows, int64_t row_stride, int64_t heads,
              int64_t head_stride) {
  return make_tensor_map<4>(map, data, {kColumnTile, rows, kHopperDim / kColumnTile, heads},
                            {row_stride, kColumnTile, head_stride},
                            {kColumnTile, kCopyRows, kHopperDim / kColumnTile, 1});
}

template <int kGroups>
cudaError_t launch(const TreeAttention& a, HeadSplit split, cudaStream_t stream) {
  CUtensorMap k_map, v_map;
  if (!make_map(k_map, a.k, a.rows, a.k_row_stride, a.kv_heads, a.k_head_stride) ||
      !make_map(v_map, a.v, a.rows, a.v_row_stride, a.kv_heads, a.v_head_stride)) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = tree_attention_sm90_kernel<kGroups>;
  constexpr int kBytes = sizeof(HopperShared<kGroups>);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(a.tiles) * a.kv_heads * split.parts;
  kernel<<<blocks, (kGroups + 1) * kGroupThreads, kBytes, stream>>>(a, split, k_map, v_map);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_tree_attention_sm90(const TreeAttention& arguments, cudaStream_t stream) {
  const HeadSplit split = split_heads(arguments, 2 * kGroupRows);
  const bool one_group = split.heads * arguments.tile_queries <= kGroupRows;
  return one_group ? launch<1>(arguments, split, stream) : launch<2>(arguments, split, stream);
}

}  // namespace openjev_fast
