// Computes: out = x w^T for few rows on Hopper, where reading the weight takes longest; with two pieces, silu(gate) *
//   up of the two halves of such a product. Matches nn.Linear, and with two pieces Qwen3_5MLP up to its last product
//   (transformers 5.10.2, modeling_qwen3_5).
// Shapes: x [N, K], row stride in elements; w [O, K] contiguous; out [N, O], or [N, O / 2] of two pieces, contiguous,
//   written, aliases nothing.
// Dtypes: x, w, out bfloat16; accumulators float32.
// Rounding points: the product to bfloat16; of two pieces gate and up to bfloat16, then as silu_mul.cuh. Columns add
//   up 16 at a time, in order; two parts are added last.
// Limits and launch: N <= 64 kGroups; K % (64 kParts) == 0; O % (8 kPieces) == 0; 16-byte aligned pointers, row stride
//   % 8 == 0. kParts blocks, a cluster, per kTile rows of w (of either half), each for its part of the columns. A
//   warpgroup for every 64 rows of x multiplies, one more warp copies. Starts before the kernel launched before it
//   has ended, if that allows it, and fetches the first of the weight: no kernel that may be under way writes it. Up
//   to 227 KiB of shared memory; no spills; sm_90a; deterministic; graph-safe.
// Architecture-specific targets: sm_90a
// Source: the upstream modules named above. Twins: linear_ref and linear_silu_mul_ref, tests/gpu/test_linear.py.
#pragma once

#include "launch.h"
#include "wgmma.cuh"

namespace openjev_fast {

constexpr int kStepColumns = 64;
constexpr int kStepRowBytes = kStepColumns * sizeof(bf16);
constexpr int kLinearGroupRows = 64;
constexpr int kLinearGroupThreads = 128;
constexpr int kLinearMostStages = 12;
// Bytes of the stages and of what parts exchange.
constexpr int kLinearBytes = 225 * 1024;

template <int kGroups, int kTile, int kPieces, int kParts>
struct __align__(1024) LinearShared {
  static_assert(kParts == 1 || kPieces == 1 && kTile % 16 == 0);
  static constexpr int kPieceBytes = kTile * kStepRowBytes;
  static constexpr int kXBytes = kGroups * kLinearGroupRows * kStepRowBytes;
  // A thread's sums of the half of the tile that this block writes, from the other part.
  static constexpr int kOthers = kParts == 2 ? kTile / 4 : 0;
  static constexpr int kOtherBytes = kOthers * kGroups * kLinearGroupThreads * sizeof(float);
  static constexpr int kFit = (kLinearBytes - kOtherBytes) / (kXBytes + kPieces * kPieceBytes);
  static constexpr int kStages = kFit < kLinearMostStages ? kFit : kLinearMostStages;

  unsigned char x[kStages][kXBytes];
  unsigned char w[kStages][kPieces][kPieceBytes];
  float other[kParts == 2 ? kOthers : 1][kGroups * kLinearGroupThreads];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

template <int kGroups, int kTile, int kPieces, int kParts>
__global__ void __launch_bounds__(kGroups* kLinearGroupThreads + kWarp, 1)
    linear_sm90_kernel(const __grid_constant__ Linear a, const __grid_constant__ CUtensorMap x_map,
                       const __grid_constant__ CUtensorMap w_map, int x_rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shared = LinearShared<kGroups, kTile, kPieces, kParts>;
  constexpr int kStages = Shared::kStages;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int features = static_cast<int>(a.features) / kPieces;
  const int first_feature = static_cast<int>(blockIdx.x) / kParts * kTile;
  const int part = static_cast<int>(blockIdx.x) % kParts;
  const int steps = static_cast<int>(a.columns) / kStepColumns / kParts;
  const int first_column = part * steps * kStepColumns;

  dependents_may_start();
  if constexpr (kParts == 2) cluster_arrive();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(shared_address(&shared.full[stage]), 1);
      barrier_init(shared_address(&shared.empty[stage]), kGroups * kLinearGroupThreads / kWarp);
    }
    barrier_init_done();
  }
  __syncthreads();

  if (warp == kGroups * kLinearGroupThreads / kWarp) {
    if (lane == 0) {
      auto copy_w = [&](int step) {
        const unsigned full = shared_address(&shared.full[step % kStages]);
        barrier_arrive_expecting(full, kPieces * Shared::kPieceBytes + x_rows * kStepRowBytes);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          copy_once(shared_address(shared.w[step % kStages][piece]), w_map, full,
                    first_column + step * kStepColumns, first_feature + piece * features);
        }
      };
      auto copy_x = [&](int step) {
        copy_box(shared_address(shared.x[step % kStages]), x_map,
                 shared_address(&shared.full[step % kStages]), first_column + step * kStepColumns, 0);
      };
      const int ahead = min(kStages, steps);
      for (int step = 0; step < ahead; ++step) copy_w(step);
      wait_for_earlier_kernels();
      for (int step = 0; step < ahead; ++step) copy_x(step);
      for (int step = ahead; step < steps; ++step) {
        barrier_wait(shared_address(&shared.empty[step % kStages]), step / kStages % 2 ^ 1);
        copy_w(step);
        copy_x(step);
      }
    }
    if constexpr (kParts == 2) {
      cluster_wait();
      cluster_arrive();
      cluster_wait();
    }
    return;
  }

  const int group = warp / 4;
  // Rows of x past the copied ones are zeros. They reach no row of out, but their products take power, and a card at its
  // limit lowers its clock for them.
  const int copied = min(max(x_rows - group * kLinearGroupRows, 0), kLinearGroupRows);
  for (int stage = 0; stage < kStages; ++stage) {
    unsigned char* rows = shared.x[stage] + group * kLinearGroupRows * kStepRowBytes;
    for (int offset = copied * kStepRowBytes + static_cast<int>(threadIdx.x) % kLinearGroupThreads * 16;
         offset < kLinearGroupRows * kStepRowBytes; offset += kLinearGroupThreads * 16) {
      *reinterpret_cast<uint4*>(rows + offset) = uint4{};
    }
  }
  fence_async();
  warpgroup_sync(1 + group);

  float sum[kPieces][kTile / 2];
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kStages;
    barrier_wait(shared_address(&shared.full[stage]), step / kStages % 2);
    const unsigned x_tile = shared_address(shared.x[stage]) + group * kLinearGroupRows * kStepRowBytes;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kStepColumns / 16; ++i) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        const unsigned w_tile = shared_address(shared.w[stage][piece]);
        wgmma_tile<kTile>(sum[piece], tile_descriptor(x_tile + i * 32, 16, 8 * kStepRowBytes),
                          tile_descriptor(w_tile + i * 32, 16, 8 * kStepRowBytes), step > 0 || i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (step > 0 && lane == 0) barrier_arrive(shared_address(&shared.empty[(step - 1) % kStages]));
  }
  wgmma_wait<0>();
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) wgmma_settle(sum[piece]);

  // A part adds the other's sums to its own half of the columns.
  if constexpr (kParts == 2) {
    constexpr int kHalf = kTile / 4;
    const unsigned there = cluster_address(shared_address(&shared.other[0][threadIdx.x]), part ^ 1);
    // The other block has started.
    cluster_wait();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      store_to_cluster(there + i * sizeof(shared.other[0]), part == 0 ? sum[0][kHalf + i] : sum[0][i]);
    }
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float other = shared.other[i][threadIdx.x];
      if (part == 0) sum[0][i] += other;
      if (part == 1) sum[0][kHalf + i] += other;
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp * 16 + half * 8 + lane / 4;
    if (row >= a.rows) continue;
#pragma unroll
    for (int j = 0; j < kTile / 8; ++j) {
      if (kParts == 2 && j / (kTile / 16) != part) continue;
      const int feature = first_feature + 8 * j + lane % 4 * 2;
      if (feature >= features) continue;
      float x[2] = {sum[0][4 * j + 2 * half], sum[0][4 * j + 2 * half + 1]};
      if constexpr (kPieces == 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[i] = round_once(silu(round_once(x[i]))) * round_once(sum[1][4 * j + 2 * half + i]);
        }
      }
      bf16* target = static_cast<bf16*>(a.out) + int64_t{row} * features + feature;
      *reinterpret_cast<unsigned*>(target) = pack_pair(x[0], x[1]);
    }
  }
#endif
}

}  // namespace openjev_fast
