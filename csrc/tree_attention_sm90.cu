// Launcher of tree_attention_sm90.cuh.
#include "tree_attention_sm90.cuh"

namespace openjev_fast {
namespace {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time so that nothing links to the driver's library.
EncodeTensorMap find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
  return error == cudaSuccess && status == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTensorMap>(found)
             : nullptr;
}

bool make_map(CUtensorMap& map, const void* data, int64_t rows, int64_t row_stride, int64_t heads,
              int64_t head_stride) {
  static const EncodeTensorMap encode = find_encode();
  const cuuint64_t sizes[4] = {kColumnTile, static_cast<cuuint64_t>(rows), kHopperDim / kColumnTile,
                               static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[3] = {row_stride * sizeof(bf16), kColumnTile * sizeof(bf16),
                                 head_stride * sizeof(bf16)};
  const cuuint32_t box[4] = {kColumnTile, kCopyRows, kHopperDim / kColumnTile, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  return encode != nullptr &&
         encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(data), sizes, strides, box,
                steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
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
