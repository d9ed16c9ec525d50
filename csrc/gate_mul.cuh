// Computes: out = x * sigmoid(gate), heads laid side by side. Matches the output gate of
//   Qwen3_5Attention.forward (transformers 5.10.2, modeling_qwen3_5).
// Shapes: x, gate [M, HQ, D], row and head strides in elements, D contiguous; out [M, HQ * D] contiguous,
//   written, aliases nothing.
// Dtypes: x, gate, out bfloat16; arithmetic float32.
// Rounding points: sigmoid to bfloat16; the product to bfloat16. sigmoid uses ex2.approx and rcp.approx,
//   bit-equal to the precise formula on every bfloat16 value.
// Limits and launch: any sizes with M * HQ * D < 2^31; 16-byte accesses where D and the strides are
//   multiples of 8 and pointers are aligned, else 2-byte. 32-bit item index, 64-bit addresses; one access a
//   thread; no shared memory; no spills; sm_80; graph-safe.
// Source: the upstream module named above. Twin: gate_mul_ref, tests/gpu/test_ops.py.
#pragma once

#include "common.cuh"

namespace openjev_fast {

constexpr int kGateThreads = 256;

// `accesses` is the number of accesses in one head, `items` in the whole tensor.
template <int kWidth>
__global__ void __launch_bounds__(kGateThreads)
    gate_mul_kernel(HeadView x, HeadView gate, bf16* __restrict__ out, unsigned heads, unsigned accesses,
                    unsigned items) {
  const unsigned item = blockIdx.x * kGateThreads + threadIdx.x;
  if (item >= items) return;
  const unsigned head_index = item / accesses, column = item % accesses * kWidth;
  const unsigned row = head_index / heads, head = head_index % heads;

  const Packed<kWidth> packed_x = load_packed<kWidth>(x.at(row, head, column));
  const Packed<kWidth> packed_gate = load_packed<kWidth>(gate.at(row, head, column));
  float value[kWidth], factor[kWidth];
  unpack(packed_x, value);
  unpack(packed_gate, factor);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) factor[i] = sigmoid(factor[i]);
  round_to_bf16(factor);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) value[i] *= factor[i];
  store(out + int64_t{item} * kWidth, value);
}

}  // namespace openjev_fast
