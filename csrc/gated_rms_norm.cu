// Launcher of gated_rms_norm.cuh.
#include "gated_rms_norm.cuh"
#include "launch.h"

namespace openjev_fast {

cudaError_t launch_gated_rms_norm(const void* x, int64_t x_row_stride, int64_t x_head_stride, const void* z,
                                  int64_t z_row_stride, int64_t z_head_stride, const void* weight, void* out,
                                  int64_t rows, int64_t heads, int64_t dim, float eps, cudaStream_t stream) {
  const bool vectors = dim % kVector == 0 && x_row_stride % kVector == 0 && x_head_stride % kVector == 0 &&
                       z_row_stride % kVector == 0 && z_head_stride % kVector == 0 && aligned(x) &&
                       aligned(z) && aligned(weight) && aligned(out);
  const HeadView x_view{static_cast<const bf16*>(x), x_row_stride, x_head_stride};
  const HeadView z_view{static_cast<const bf16*>(z), z_row_stride, z_head_stride};
  const unsigned total = static_cast<unsigned>(rows * heads);
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    const unsigned blocks = static_cast<unsigned>(ceil_div(total, kGatedNormThreads / Tile::kLanes));
    gated_rms_norm_kernel<Tile><<<blocks, kGatedNormThreads, 0, stream>>>(
        x_view, z_view, static_cast<const bf16*>(weight), static_cast<bf16*>(out),
        static_cast<unsigned>(heads), total, static_cast<int>(dim), eps);
  };
  return with_head_tile(dim, vectors, run) ? cudaGetLastError() : cudaErrorInvalidValue;
}

}  // namespace openjev_fast
