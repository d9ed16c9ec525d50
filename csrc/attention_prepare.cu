// Launcher of attention_prepare.cuh.
#include "attention_prepare.cuh"

namespace openjev_fast {
namespace {

bool vector_input(const RotaryInput& input) {
  return input.row_stride % kVector == 0 && input.head_stride % kVector == 0 && aligned(input.x) &&
         aligned(input.weight) && aligned(input.cos) && aligned(input.sin) && aligned(input.out);
}

}  // namespace

cudaError_t launch_attention_prepare(const RotaryInput& q, const RotaryInput& k, int dim, int pairs,
                                     float eps, cudaStream_t stream) {
  if (dim > kMaxHead || 2 * pairs > dim) return cudaErrorInvalidValue;
  const bool vectors = dim % kVector == 0 && pairs % kVector == 0 && vector_input(q) && vector_input(k);
  const unsigned total_q = static_cast<unsigned>(q.rows * q.heads);
  const unsigned total = total_q + static_cast<unsigned>(k.rows * k.heads);
  const unsigned blocks = static_cast<unsigned>(ceil_div(total, kRotaryWarps));
  const auto kernel = vectors ? attention_prepare_kernel<WarpTile> : attention_prepare_kernel<ScalarTile>;
  return launch_early(kernel, blocks, kRotaryWarps * kWarp, stream, q, k, total_q, total, dim, pairs, eps);
}

}  // namespace openjev_fast
