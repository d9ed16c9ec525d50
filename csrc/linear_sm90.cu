// Launcher of linear_sm90.cuh.
#include "linear_sm90.cuh"
#include "tensor_map.h"

namespace openjev_fast {
namespace {

template <int kGroups, int kTile, int kPieces, int kParts>
cudaError_t launch(const Linear& a, cudaStream_t stream) {
  using Shared = LinearShared<kGroups, kTile, kPieces, kParts>;
  // Whole groups of 8 rows, as they are swizzled.
  const int x_rows = static_cast<int>(ceil_div(a.rows, 8) * 8);
  CUtensorMap x_map, w_map;
  if (!make_tensor_map<2>(x_map, a.x, {a.columns, a.rows}, {a.x_row_stride}, {kStepColumns, x_rows}) ||
      !make_tensor_map<2>(w_map, a.w, {a.columns, a.features}, {a.columns}, {kStepColumns, kTile})) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = linear_sm90_kernel<kGroups, kTile, kPieces, kParts>;
  constexpr int kBytes = sizeof(Shared);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {kParts, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ceil_div(a.features / kPieces, kTile)) * kParts);
  config.blockDim = dim3(kGroups * kLinearGroupThreads + kWarp);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, a, x_map, w_map, x_rows);
}

template <int kTile, int kPieces, int kParts>
cudaError_t launch_for_rows(const Linear& a, cudaStream_t stream) {
  if (a.rows > 2 * kLinearGroupRows) return cudaErrorInvalidValue;
  return a.rows <= kLinearGroupRows ? launch<1, kTile, kPieces, kParts>(a, stream)
                                    : launch<2, kTile, kPieces, kParts>(a, stream);
}

}  // namespace

// The same tiles are in openjev_fast_plugin/ops/linear.py.
cudaError_t launch_linear_sm90(const Linear& a, cudaStream_t stream) {
  if (a.silu && a.parts == 1) {
    switch (a.tile) {
      case 48:
        return launch_for_rows<48, 2, 1>(a, stream);
      case 96:
        return launch_for_rows<96, 2, 1>(a, stream);
      case 136:
        return launch_for_rows<136, 2, 1>(a, stream);
    }
  } else if (a.parts == 1) {
    switch (a.tile) {
      case 40:
        return launch_for_rows<40, 1, 1>(a, stream);
      case 64:
        return launch_for_rows<64, 1, 1>(a, stream);
      case 80:
        return launch_for_rows<80, 1, 1>(a, stream);
      case 112:
        return launch_for_rows<112, 1, 1>(a, stream);
      case 136:
        return launch_for_rows<136, 1, 1>(a, stream);
    }
  } else if (!a.silu && a.parts == 2) {
    switch (a.tile) {
      case 64:
        return launch_for_rows<64, 1, 2>(a, stream);
      case 80:
        return launch_for_rows<80, 1, 2>(a, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace openjev_fast
