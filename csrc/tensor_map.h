// Tensor maps of bfloat16 tensors for bulk copies, encoded by the driver. Host code.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace openjev_fast {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time so that nothing links to the driver's library; null where there is none.
inline EncodeTensorMap find_tensor_map_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
  return error == cudaSuccess && status == cudaDriverEntryPointSuccess
             ? reinterpret_cast<EncodeTensorMap>(found)
             : nullptr;
}

// Sizes and box in elements, innermost dimension first and contiguous; strides in elements, of the other dimensions.
// 128-byte swizzle; zeros outside the tensor. False where the driver refuses.
template <int kRank>
bool make_tensor_map(CUtensorMap& map, const void* data, const int64_t (&sizes)[kRank],
                     const int64_t (&strides)[kRank - 1], const int (&box)[kRank]) {
  static const EncodeTensorMap encode = find_tensor_map_encode();
  if (encode == nullptr) return false;
  cuuint64_t size[kRank], stride[kRank - 1];
  cuuint32_t box_size[kRank], step[kRank];
  for (int i = 0; i < kRank; ++i) {
    size[i] = static_cast<cuuint64_t>(sizes[i]);
    if (i > 0) stride[i - 1] = static_cast<cuuint64_t>(strides[i - 1]) * 2;
    box_size[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = 1;
  }
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), size, stride,
                box_size, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace openjev_fast
