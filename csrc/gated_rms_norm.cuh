// Computes: out = x * rsqrt(mean(x^2) + eps) * weight * z * sigmoid(z) per head. Matches FusedRMSNormGated
//   (fla-core 0.5.2, fla.modules.fused_norm_gate), activation silu.
// Shapes: x, z [N, HV, V], row and head strides in elements, V contiguous; weight [V]; out [N, HV * V]
//   contiguous, written, aliases nothing.
// Dtypes: x, z, weight, out bfloat16; arithmetic and the sum of squares float32.
// Rounding points: the result to bfloat16, once. The sum of squares adds each lane's values in order, then
//   by butterflies. rsqrtf is the 2-ulp library one; sigmoid uses ex2.approx and rcp.approx.
// Limits and launch: V <= 256, N * HV < 2^31; 16-byte accesses where V and the strides are multiples of 8
//   and pointers are aligned, else 2-byte. 32-bit head index, 64-bit addresses; half a warp a head (a warp
//   above 128); no shared memory; no spills; sm_80; graph-safe.
// Source: the upstream module named above. Twin: gated_rms_norm_ref, tests/gpu/test_ops.py.
#pragma once

#include "common.cuh"

namespace openjev_fast {

constexpr int kGatedNormThreads = 128;

// `total` is the number of heads in all rows.
template <typename Tile>
__global__ void __launch_bounds__(kGatedNormThreads)
    gated_rms_norm_kernel(HeadView x, HeadView z, const bf16* __restrict__ weight, bf16* __restrict__ out,
                          unsigned heads, unsigned total, int dim, float eps) {
  dependents_may_start();
  constexpr int kWidth = Tile::kWidth, kItems = Tile::kItems;
  const unsigned index = blockIdx.x * (kGatedNormThreads / Tile::kLanes) + threadIdx.x / Tile::kLanes;
  // Lanes past the last head repeat it, so that every lane takes part in the reduction.
  const unsigned head_index = min(index, total - 1);
  const unsigned row = head_index / heads, head = head_index % heads;

  Packed<kWidth> packed_x[kItems] = {}, packed_z[kItems] = {}, packed_weight[kItems] = {};
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = Tile::column(item);
    if (column < dim) {
      packed_x[item] = load_packed<kWidth>(x.at(row, head, column));
      packed_z[item] = load_packed<kWidth>(z.at(row, head, column));
      packed_weight[item] = load_packed<kWidth>(weight + column);
    }
  }

  float squares = 0.0f;
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    float value[kWidth];
    unpack(packed_x[item], value);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) squares += value[i] * value[i];
  }
  const float scale = rsqrtf(group_sum<Tile::kLanes>(squares) / dim + eps);
  if (index >= total) return;

#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = Tile::column(item);
    if (column >= dim) continue;
    float value[kWidth], gate[kWidth], gain[kWidth];
    unpack(packed_x[item], value);
    unpack(packed_z[item], gate);
    unpack(packed_weight[item], gain);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) value[i] = value[i] * scale * gain[i] * gate[i] * sigmoid(gate[i]);
    store(out + int64_t{head_index} * dim + column, value);
  }
}

}  // namespace openjev_fast
