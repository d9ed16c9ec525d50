// Launcher of silu_mul.cuh.
#include "launch.h"
#include "silu_mul.cuh"

namespace openjev_fast {

cudaError_t launch_silu_mul(const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t width,
                            cudaStream_t stream) {
  const bool vectors = width % kVector == 0 && row_stride % kVector == 0 && aligned(gate_up) && aligned(out);
  const unsigned tiles =
      static_cast<unsigned>(ceil_div(width, int64_t{kSiluThreads} * (vectors ? kVector : 1)));
  const unsigned blocks = static_cast<unsigned>(rows * tiles);
  const auto kernel = vectors ? silu_mul_kernel<kVector> : silu_mul_kernel<1>;
  return launch_early(kernel, blocks, kSiluThreads, stream, static_cast<const bf16*>(gate_up), row_stride,
                      static_cast<bf16*>(out), width, tiles);
}

}  // namespace openjev_fast
