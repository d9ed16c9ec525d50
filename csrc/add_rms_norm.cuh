// Computes: hidden = residual + update; normed = hidden * rsqrt(mean(hidden^2) + eps) * (1 + weight).
//   Matches the residual add of Qwen3_5DecoderLayer and Qwen3_5RMSNorm (transformers 5.10.2,
//   modeling_qwen3_5).
// Shapes: residual, hidden, normed [N, H] contiguous; update null, or [N, H], or [S, N, H] with S = 1, 2, 4,
//   contiguous; weight [H]. hidden and normed are written and alias nothing.
// Dtypes: residual, weight, hidden, normed bfloat16; update bfloat16, or float32 where it holds partial
//   sums; accumulators float32.
// Rounding points: the sum to bfloat16 (partials added in order, then to the residual); normed to bfloat16
//   once. The sum of squares adds each thread's values in order, then by butterflies. rsqrtf is the 2-ulp
//   library one.
// Limits and launch: any N and H; 16-byte accesses where H % 8 == 0 and pointers are aligned, else 2-byte.
//   64-bit index; one block a row, at most 1,024 threads; 128 bytes of shared memory; no spills; sm_80;
//   graph-safe. May start early (launch_early); waits before its first access.
// Source: the upstream modules named above. Twin: add_rms_norm_ref, tests/gpu/test_ops.py.
#pragma once

#include "residual.cuh"

namespace openjev_fast {

// kOnePass: a thread owns one vector and keeps it in registers. Otherwise threads walk the row twice, and
// read in the second pass what they wrote in the first.
template <int kPartials, int kWidth, bool kOnePass>
__global__ void __launch_bounds__(1024, 1)
    add_rms_norm_kernel(const bf16* __restrict__ residual, const void* __restrict__ update,
                        const bf16* __restrict__ weight, bf16* hidden, bf16* __restrict__ normed,
                        int64_t slice, int64_t width, float eps) {
  dependents_may_start();
  wait_for_earlier_kernels();
  __shared__ float scratch[kWarp];
  const int64_t start = blockIdx.x * width, first = int64_t{threadIdx.x} * kWidth;
  const int64_t step = int64_t{blockDim.x} * kWidth;

  if constexpr (kOnePass) {
    const bool inside = first < width;
    float x[kWidth] = {}, squares = 0.0f;
    Packed<kWidth> gain{};
    if (inside) {
      gain = load_packed<kWidth>(weight + first);
      residual_sum<kPartials>(residual, update, start + first, slice, x);
      store(hidden + start + first, x);
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
    if (inside) {
      float w[kWidth];
      unpack(gain, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = x[i] * scale * (1.0f + w[i]);
      store(normed + start + first, x);
    }
  } else {
    float squares = 0.0f;
    for (int64_t column = first; column < width; column += step) {
      float x[kWidth];
      residual_sum<kPartials>(residual, update, start + column, slice, x);
      store(hidden + start + column, x);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
    }
    const float scale = rsqrtf(block_sum(squares, scratch) / width + eps);
    for (int64_t column = first; column < width; column += step) {
      float x[kWidth], w[kWidth];
      load(static_cast<const bf16*>(hidden) + start + column, x);
      load(weight + column, w);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = x[i] * scale * (1.0f + w[i]);
      store(normed + start + column, x);
    }
  }
}

}  // namespace openjev_fast
