// Computes: y = x * rsqrt(mean(x^2) + eps) * (1 + weight) per head, then for i < R: out[i] = y[i] cos[i] -
//   y[i + R] sin[i], out[i + R] = y[i + R] cos[i] + y[i] sin[i]; dims from 2 R on pass. For queries and for
//   keys. Matches Qwen3_5Attention.forward with apply_rotary_pos_emb (transformers 5.10.2,
//   modeling_qwen3_5).
// Shapes: x [M, HQ, D] or [N, HKV, D], row and head strides in elements, D contiguous; weight [D]; cos, sin
//   [rows, R] contiguous; out as x, contiguous, written, aliases nothing.
// Dtypes: all bfloat16; arithmetic and the sum of squares float32.
// Rounding points: the norm to bfloat16; each product to bfloat16; their sum to bfloat16. The sum of squares
//   adds each lane's values in order, then by butterflies. rsqrtf is the 2-ulp library one.
// Limits and launch: D <= 256, 2 R <= D, fewer than 2^31 heads in all rows; 16-byte accesses where D, R and
//   the strides are multiples of 8 and pointers are aligned, else 2-byte. 32-bit head index, 64-bit
//   addresses; one warp a head, 8 heads a block, queries first; 4 KiB of shared memory; no spills; sm_80;
//   graph-safe. May start early (launch_early); waits before its first access.
// Source: the upstream modules named above. Twin: attention_prepare_ref, tests/gpu/test_ops.py.
#pragma once

#include "common.cuh"
#include "launch.h"

namespace openjev_fast {

constexpr int kRotaryWarps = 8;

// `total_q` and `total` are the numbers of heads in all rows, of queries and of both.
template <typename Tile>
__global__ void __launch_bounds__(kRotaryWarps* kWarp)
    attention_prepare_kernel(const __grid_constant__ RotaryInput q, const __grid_constant__ RotaryInput k,
                             unsigned total_q, unsigned total, int dim, int pairs, float eps) {
  constexpr int kWidth = Tile::kWidth, kItems = Tile::kItems;
  static_assert(Tile::kLanes == kWarp);
  dependents_may_start();
  wait_for_earlier_kernels();
  // Normed values of each warp's head, for the lanes that need the other half of a pair.
  __shared__ __align__(16) bf16 exchange[kRotaryWarps][kMaxHead];

  const unsigned warp = threadIdx.x / kWarp, index = blockIdx.x * kRotaryWarps + warp;
  if (index >= total) return;
  const bool is_q = index < total_q;
  const RotaryInput& input = is_q ? q : k;
  const unsigned head_index = is_q ? index : index - total_q, heads = input.heads;
  const unsigned row = head_index / heads, head = head_index % heads;
  const HeadView x{static_cast<const bf16*>(input.x), input.row_stride, input.head_stride};
  const bf16* weight = static_cast<const bf16*>(input.weight);
  const bf16* cos = static_cast<const bf16*>(input.cos) + int64_t{row} * pairs;
  const bf16* sin = static_cast<const bf16*>(input.sin) + int64_t{row} * pairs;
  bf16* out = static_cast<bf16*>(input.out) + int64_t{head_index} * dim;

  // Loads, rotary tables included
  Packed<kWidth> gain[kItems] = {}, packed_cos[kItems] = {}, packed_sin[kItems] = {};
  float value[kItems][kWidth] = {};
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = Tile::column(item);
    if (column >= dim) continue;
    load(x.at(row, head, column), value[item]);
    gain[item] = load_packed<kWidth>(weight + column);
    if (column >= 2 * pairs) continue;
    const int pair = column < pairs ? column : column - pairs;
    packed_cos[item] = load_packed<kWidth>(cos + pair);
    packed_sin[item] = load_packed<kWidth>(sin + pair);
  }

  // Norm
  float squares = 0.0f;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += value[item][i] * value[item][i];
  }
  const float scale = rsqrtf(group_sum<kWarp>(squares) / dim + eps);
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    float w[kWidth];
    unpack(gain[item], w);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[item][i] = value[item][i] * scale * (1.0f + w[i]);
    round_to_bf16(value[item]);
    const int column = Tile::column(item);
    if (column < 2 * pairs) store(exchange[warp] + column, value[item]);
  }
  __syncwarp();

  // Rotation
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = Tile::column(item);
    if (column < 2 * pairs) {
      const bool low = column < pairs;
      float other[kWidth], c[kWidth], s[kWidth];
      load(static_cast<const bf16*>(exchange[warp]) + (low ? column + pairs : column - pairs), other);
      unpack(packed_cos[item], c);
      unpack(packed_sin[item], s);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        c[i] *= value[item][i];
        s[i] *= other[i];
      }
      round_to_bf16(c);
      round_to_bf16(s);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[item][i] = low ? c[i] - s[i] : c[i] + s[i];
    }
    if (column < dim) store(out + column, value[item]);
  }
}

}  // namespace openjev_fast
