// Computes: score = dot(x * rsqrt(mean(x^2) + eps) * (1 + norm_weight), head_weight) + bias with x the row
//   (residual + update)[rows[c]]. Matches the final norm of Qwen3_5TextModel (transformers 5.10.2) and
//   Open-Jev's scalar head.
// Shapes: residual [M, H] contiguous; update [M, H], or [S, M, H] with S = 1, 2, 4, contiguous; rows [C] in
//   [0, M), repeats allowed; norm_weight, head_weight [H]; head_bias []; score [C], written, aliases
//   nothing.
// Dtypes: residual, norm_weight bfloat16; update bfloat16, or float32 where it holds partial sums; rows
//   int32; head_weight, head_bias, score and accumulators float32.
// Rounding points: the sum to bfloat16 (partials added in order, then to the residual); the norm to
//   bfloat16; no other. Sums add each thread's values in order, then by butterflies. rsqrtf is the 2-ulp
//   library one.
// Limits and launch: any C and H; 16-byte accesses where H % 8 == 0 and pointers are aligned, else one value
//   at a time. 64-bit index; one block a candidate; 256 bytes of shared memory; no spills; sm_80;
//   graph-safe.
// Source: the upstream modules named above. Twin: head_score_ref, tests/gpu/test_ops.py.
#pragma once

#include "residual.cuh"

namespace openjev_fast {

constexpr int kHeadThreads = 512;

template <int kPartials, int kWidth>
__global__ void __launch_bounds__(kHeadThreads)
    head_score_kernel(const bf16* __restrict__ residual, const void* __restrict__ update,
                      const int32_t* __restrict__ rows, const bf16* __restrict__ norm_weight,
                      const float* __restrict__ head_weight, const float* __restrict__ head_bias,
                      float* __restrict__ score, int64_t slice, int64_t width, float eps) {
  __shared__ float square_scratch[kWarp], dot_scratch[kWarp];
  const int64_t start = rows[blockIdx.x] * width, first = int64_t{threadIdx.x} * kWidth;
  constexpr int64_t kStep = int64_t{kHeadThreads} * kWidth;

  float squares = 0.0f;
  for (int64_t column = first; column < width; column += kStep) {
    float x[kWidth];
    residual_sum<kPartials>(residual, update, start + column, slice, x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += x[i] * x[i];
  }
  const float scale = rsqrtf(block_sum(squares, square_scratch) / width + eps);

  // The few rows are read again rather than kept.
  float dot = 0.0f;
  for (int64_t column = first; column < width; column += kStep) {
    float x[kWidth], gain[kWidth], head[kWidth];
    residual_sum<kPartials>(residual, update, start + column, slice, x);
    load(norm_weight + column, gain);
    load(head_weight + column, head);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = x[i] * scale * (1.0f + gain[i]);
    round_to_bf16(x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) dot += x[i] * head[i];
  }
  dot = block_sum(dot, dot_scratch);
  if (threadIdx.x == 0) score[blockIdx.x] = dot + *head_bias;
}

}  // namespace openjev_fast
