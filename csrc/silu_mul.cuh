// Computes: out = silu(gate) * up, with gate and up the two halves of a row. Matches Qwen3_5MLP
//   (transformers 5.10.2, modeling_qwen3_5).
// Shapes: gate_up [N, 2 I], row stride in elements, columns contiguous; out [N, I] contiguous, written,
//   aliases nothing.
// Dtypes: gate_up, out bfloat16; arithmetic float32.
// Rounding points: silu to bfloat16; the product to bfloat16. silu uses ex2.approx and rcp.approx, bit-equal
//   to the precise formula on every bfloat16 value.
// Limits and launch: any N and I, at most 2^31 blocks; 16-byte accesses where I and the row stride are
//   multiples of 8 and pointers are aligned, else 2-byte. 64-bit index; one access a thread; no shared
//   memory; no spills; sm_80; graph-safe. May start early (launch_early); waits before its
//   first access.
// Source: the upstream module named above. Twin: silu_mul_ref, tests/gpu/test_ops.py.
#pragma once

#include "common.cuh"

namespace openjev_fast {

constexpr int kSiluThreads = 128;

// `tiles` blocks cover one row.
template <int kWidth>
__global__ void __launch_bounds__(kSiluThreads)
    silu_mul_kernel(const bf16* __restrict__ gate_up, int64_t row_stride, bf16* __restrict__ out,
                    int64_t width, unsigned tiles) {
  dependents_may_start();
  wait_for_earlier_kernels();
  const unsigned row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t column = (int64_t{tile} * kSiluThreads + threadIdx.x) * kWidth;
  if (column >= width) return;

  const bf16* source = gate_up + row * row_stride + column;
  float gate[kWidth], up[kWidth];
  const Packed<kWidth> packed_gate = load_packed<kWidth>(source);
  const Packed<kWidth> packed_up = load_packed<kWidth>(source + width);
  unpack(packed_gate, gate);
  unpack(packed_up, up);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gate[i] = silu(gate[i]);
  round_to_bf16(gate);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gate[i] *= up[i];
  store(out + row * width + column, gate);
}

}  // namespace openjev_fast
