// Launcher of add_rms_norm.cuh.
#include <algorithm>

#include "add_rms_norm.cuh"

namespace openjev_fast {
namespace {

constexpr int64_t kMaxThreads = 1024;

template <int kPartials>
cudaError_t launch(const bf16* residual, const void* update, const bf16* weight, bf16* hidden, bf16* normed,
                   int64_t rows, int64_t width, float eps, bool vectors, cudaStream_t stream) {
  const int64_t accesses = ceil_div(width, vectors ? kVector : 1);
  const int threads = static_cast<int>(std::min(kMaxThreads, ceil_div(accesses, kWarp) * kWarp));
  const unsigned blocks = static_cast<unsigned>(rows);
  const int64_t slice = rows * width;
  const auto kernel = !vectors                  ? add_rms_norm_kernel<kPartials, 1, false>
                      : accesses <= kMaxThreads ? add_rms_norm_kernel<kPartials, kVector, true>
                                                : add_rms_norm_kernel<kPartials, kVector, false>;
  return launch_early(kernel, blocks, threads, stream, residual, update, weight, hidden, normed, slice, width,
                      eps);
}

}  // namespace

cudaError_t launch_add_rms_norm(const void* residual, const void* update, int partials, const void* weight,
                                void* hidden, void* normed, int64_t rows, int64_t width, float eps,
                                cudaStream_t stream) {
  const bool vectors = width % kVector == 0 && aligned(residual) && aligned(update) && aligned(weight) &&
                       aligned(hidden) && aligned(normed);
  cudaError_t error = cudaErrorInvalidValue;
  const auto run = [&](auto constant) {
    error = launch<decltype(constant)::value>(static_cast<const bf16*>(residual), update,
                                              static_cast<const bf16*>(weight), static_cast<bf16*>(hidden),
                                              static_cast<bf16*>(normed), rows, width, eps, vectors, stream);
  };
  if (partials == kNoUpdate) {
    run(std::integral_constant<int, kNoUpdate>());
  } else {
    with_partials(partials, run);
  }
  return error;
}

}  // namespace openjev_fast
