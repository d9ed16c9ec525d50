// The residual add that add_rms_norm and head_score share. Holds no kernel.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "launch.h"

namespace openjev_fast {

// kWidth values of residual + update, rounded to bfloat16 where there is an update. `offset` is the position
// in residual and in each partial sum; `slice` is the distance between partial sums. Partials add up in
// order.
template <int kPartials, int kWidth>
__device__ __forceinline__ void residual_sum(const bf16* residual, const void* update, int64_t offset,
                                             int64_t slice, float (&x)[kWidth]) {
  load(residual + offset, x);
  if constexpr (kPartials != kNoUpdate) {
    float added[kWidth];
    if constexpr (kPartials == kModelUpdate) {
      load(static_cast<const bf16*>(update) + offset, added);
    } else {
      const float* partial = static_cast<const float*>(update) + offset;
      load(partial, added);
#pragma unroll
      for (int s = 1; s < kPartials; ++s) {
        float next[kWidth];
        load(partial + s * slice, next);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) added[i] += next[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] += added[i];
    round_to_bf16(x);
  }
}

// Calls `launch` with `partials` as a compile-time constant; false for a number there is no kernel for.
template <typename Launch>
bool with_partials(int partials, Launch&& launch) {
  switch (partials) {
    case kModelUpdate:
      launch(std::integral_constant<int, kModelUpdate>());
      return true;
    case 1:
      launch(std::integral_constant<int, 1>());
      return true;
    case 2:
      launch(std::integral_constant<int, 2>());
      return true;
    case 4:
      launch(std::integral_constant<int, 4>());
      return true;
  }
  return false;
}

}  // namespace openjev_fast
