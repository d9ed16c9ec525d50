// Launcher of gate_mul.cuh.
#include "gate_mul.cuh"
#include "launch.h"

namespace openjev_fast {

cudaError_t launch_gate_mul(const void* x, int64_t x_row_stride, int64_t x_head_stride, const void* gate,
                            int64_t gate_row_stride, int64_t gate_head_stride, void* out, int64_t rows,
                            int64_t heads, int64_t dim, cudaStream_t stream) {
  const bool vectors = dim % kVector == 0 && x_row_stride % kVector == 0 && x_head_stride % kVector == 0 &&
                       gate_row_stride % kVector == 0 && gate_head_stride % kVector == 0 && aligned(x) &&
                       aligned(gate) && aligned(out);
  const unsigned accesses = static_cast<unsigned>(dim / (vectors ? kVector : 1));
  const unsigned items = static_cast<unsigned>(rows * heads) * accesses;
  const unsigned blocks = static_cast<unsigned>(ceil_div(items, kGateThreads));
  const auto kernel = vectors ? gate_mul_kernel<kVector> : gate_mul_kernel<1>;
  kernel<<<blocks, kGateThreads, 0, stream>>>(
      HeadView{static_cast<const bf16*>(x), x_row_stride, x_head_stride},
      HeadView{static_cast<const bf16*>(gate), gate_row_stride, gate_head_stride}, static_cast<bf16*>(out),
      static_cast<unsigned>(heads), accesses, items);
  return cudaGetLastError();
}

}  // namespace openjev_fast
