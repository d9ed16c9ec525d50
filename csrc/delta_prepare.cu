// Launcher of delta_prepare.cuh.
#include "delta_prepare.cuh"

namespace openjev_fast {

cudaError_t launch_delta_prepare(const DeltaPrepare& arguments, cudaStream_t stream) {
  const DeltaPrepare& p = arguments;
  const bool vectors = p.channels % kVector == 0 && p.key_dim % kVector == 0 &&
                       p.qkv_row_stride % kVector == 0 && aligned(p.qkv) && aligned(p.conv_weight) &&
                       aligned(p.q) && aligned(p.k) && aligned(p.v);
  cudaError_t error = cudaErrorInvalidValue;
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    const int64_t units = ceil_div(p.channels, p.key_dim);
    const dim3 blocks(static_cast<unsigned>(ceil_div(p.rows, kPrepareRows)),
                      static_cast<unsigned>(ceil_div(units, kPrepareThreads / Tile::kLanes) + 1));
    error = launch_early(delta_prepare_kernel<Tile>, blocks, kPrepareThreads, stream, p);
  };
  with_head_tile(p.key_dim, vectors, run);
  return error;
}

}  // namespace openjev_fast
