// Launcher of head_score.cuh.
#include "head_score.cuh"

namespace openjev_fast {

cudaError_t launch_head_score(const void* residual, const void* update, int partials, const int32_t* rows,
                              const void* norm_weight, const float* head_weight, const float* head_bias,
                              float* score, int64_t candidates, int64_t residual_rows, int64_t width,
                              float eps, cudaStream_t stream) {
  const bool vectors = width % kVector == 0 && aligned(residual) && aligned(update) && aligned(norm_weight) &&
                       aligned(head_weight);
  const unsigned blocks = static_cast<unsigned>(candidates);
  const int64_t slice = residual_rows * width;
  const auto run = [&](auto constant) {
    constexpr int kPartials = decltype(constant)::value;
    const auto kernel = vectors ? head_score_kernel<kPartials, kVector> : head_score_kernel<kPartials, 1>;
    kernel<<<blocks, kHeadThreads, 0, stream>>>(static_cast<const bf16*>(residual), update, rows,
                                                static_cast<const bf16*>(norm_weight), head_weight, head_bias,
                                                score, slice, width, eps);
  };
  return with_partials(partials, run) ? cudaGetLastError() : cudaErrorInvalidValue;
}

}  // namespace openjev_fast
