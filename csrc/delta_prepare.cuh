// Computes: c = silu(sum_t conv_weight[:, 3 - t] * qkv[row t steps back on the path]); q, k = c / sqrt(sum
//   c^2 + 1e-6) per head, v = c; g = -exp(a_log) softplus(a + dt_bias); beta = sigmoid(b). Matches
//   Qwen3_5GatedDeltaNet.forward (transformers 5.10.2) with causal_conv1d's rounding.
// Shapes: qkv [N, C], b, a [N, HV], rows strided in elements; predecessor [N, 3], entries in [-1, N);
//   conv_weight [C, 4]; a_log, dt_bias [HV]; q, k [N, H, K], v [N, C - 2 H K], g, beta [N, HV] contiguous,
//   written, alias nothing.
// Dtypes: qkv, b, a, conv_weight, a_log, dt_bias, q, k, v bfloat16; predecessor int32; g, beta and sums
//   float32.
// Rounding points: c to bfloat16 after SiLU; q and k to bfloat16 after their norm; beta to bfloat16. Taps
//   add from the row itself backwards, product and sum rounded apart. SiLU uses ex2.approx and rcp.approx; q
//   and k are multiplied by rsqrtf, the 2-ulp library one. The gates use the precise expf, log1pf and
//   division.
// Limits and launch: K <= 256; 16-byte accesses where C, K and qkv's row stride are multiples of 8 and
//   pointers are aligned, else 2-byte. 64-bit addresses; 2 rows by one key-head width of channels for half a
//   warp (a warp above 128); a last column of blocks computes the gates; no shared memory; no spills; sm_80;
//   graph-safe. May start early (launch_early); waits before its first access.
// Source: the upstream modules named above. Twin: delta_prepare_ref, tests/gpu/test_ops.py.
#pragma once

#include "common.cuh"
#include "launch.h"

namespace openjev_fast {

constexpr int kPrepareThreads = 128;
// Rows one thread computes with the taps it holds in registers.
constexpr int kPrepareRows = 2;
constexpr int kTaps = 4;
constexpr float kL2Eps = 1e-6f;
// Above it softplus(x) is x, as in PyTorch.
constexpr float kSoftplusThreshold = 20.0f;

__device__ __forceinline__ void delta_gates(const DeltaPrepare& p, int64_t first_row) {
  const bf16* a_log = static_cast<const bf16*>(p.a_log);
  const bf16* dt_bias = static_cast<const bf16*>(p.dt_bias);
  for (int index = threadIdx.x; index < kPrepareRows * p.value_heads; index += kPrepareThreads) {
    const int64_t row = first_row + index / p.value_heads;
    const int head = index % p.value_heads;
    if (row >= p.rows) return;
    const float write = static_cast<const bf16*>(p.b)[row * p.b_row_stride + head];
    const float a = static_cast<const bf16*>(p.a)[row * p.a_row_stride + head];
    const float x = a + static_cast<float>(dt_bias[head]);
    const float softplus = x > kSoftplusThreshold ? x : log1pf(expf(x));
    float beta[1] = {1.0f / (1.0f + expf(-write))};
    round_to_bf16(beta);
    p.g[row * p.value_heads + head] = -expf(static_cast<float>(a_log[head])) * softplus;
    p.beta[row * p.value_heads + head] = beta[0];
  }
}

// The channels are cut into units of key_dim: H of q, H of k, then v's.
template <typename Tile>
__global__ void __launch_bounds__(kPrepareThreads)
    delta_prepare_kernel(const __grid_constant__ DeltaPrepare p) {
  dependents_may_start();
  wait_for_earlier_kernels();
  constexpr int kWidth = Tile::kWidth, kItems = Tile::kItems;
  const int64_t first_row = int64_t{blockIdx.x} * kPrepareRows;
  if (blockIdx.y == gridDim.y - 1) {
    delta_gates(p, first_row);
    return;
  }
  const int unit = blockIdx.y * (kPrepareThreads / Tile::kLanes) + threadIdx.x / Tile::kLanes;
  const int unit_start = unit * p.key_dim;
  const bf16* conv_weight = static_cast<const bf16*>(p.conv_weight);
  const bf16* qkv = static_cast<const bf16*>(p.qkv);

  // Taps of this thread's channels: kTaps consecutive values a channel.
  Packed<kWidth> taps[kItems][kTaps] = {};
  bool inside[kItems];
#pragma unroll
  for (int item = 0; item < kItems; ++item) {
    const int column = Tile::column(item);
    inside[item] = column < p.key_dim && unit_start + column < p.channels;
    if (!inside[item]) continue;
    const bf16* source = conv_weight + int64_t{unit_start + column} * kTaps;
#pragma unroll
    for (int part = 0; part < kTaps; ++part) taps[item][part] = load_packed<kWidth>(source + part * kWidth);
  }

  // Where this unit's channels go.
  const int key_width = p.key_heads * p.key_dim;
  // The same for every lane of a warp: a warp holds one unit, or two from an even one on.
  const bool is_key = unit < 2 * p.key_heads;
  bf16* target;
  int64_t target_stride;
  if (is_key) {
    target = static_cast<bf16*>(unit < p.key_heads ? p.q : p.k) + unit_start % key_width;
    target_stride = key_width;
  } else {
    target = static_cast<bf16*>(p.v) + unit_start - 2 * key_width;
    target_stride = p.channels - 2 * key_width;
  }

#pragma unroll
  for (int r = 0; r < kPrepareRows; ++r) {
    // Rows past the end repeat the last one and are not stored, so that loads need no branch.
    const int64_t row = min(first_row + r, p.rows - 1);
    int64_t source[kTaps];
    bool taken[kTaps];
    source[0] = row;
    taken[0] = true;
#pragma unroll
    for (int back = 1; back < kTaps; ++back) {
      const int previous = p.predecessor[row * 3 + back - 1];
      taken[back] = previous >= 0;
      source[back] = max(previous, 0);
    }

    float value[kItems][kWidth];
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      float weights[kTaps * kWidth];
#pragma unroll
      for (int part = 0; part < kTaps; ++part) {
        float unpacked[kWidth];
        unpack(taps[item][part], unpacked);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) weights[part * kWidth + i] = unpacked[i];
      }
      Packed<kWidth> packed[kTaps] = {};
#pragma unroll
      for (int back = 0; back < kTaps; ++back) {
        if (inside[item] && taken[back]) {
          const int column = unit_start + Tile::column(item);
          packed[back] = load_packed<kWidth>(qkv + source[back] * p.qkv_row_stride + column);
        }
      }
#pragma unroll
      for (int back = 0; back < kTaps; ++back) {
        float x[kWidth];
        unpack(packed[back], x);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const float product = __fmul_rn(x[i], weights[i * kTaps + kTaps - 1 - back]);
          value[item][i] = back == 0 ? product : __fadd_rn(value[item][i], product);
        }
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) value[item][i] = silu(value[item][i]);
    }

    if (is_key) {
      float squares = 0.0f;
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        round_to_bf16(value[item]);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) squares += value[item][i] * value[item][i];
      }
      const float scale = rsqrtf(group_sum<Tile::kLanes>(squares) + kL2Eps);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) value[item][i] *= scale;
      }
    }
    if (first_row + r >= p.rows) continue;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      if (inside[item]) store(target + row * target_stride + Tile::column(item), value[item]);
    }
  }
}

}  // namespace openjev_fast
