// Computes: as tree_attention.cuh, for heads of 256 on Hopper.
// Shapes: as tree_attention.cuh; k and v as tensor maps of four dimensions: 64 dims, rows, dims / 64, key heads.
// Dtypes: as tree_attention.cuh.
// Rounding points: as tree_attention.cuh; keys 64 at a time.
// Limits and launch: D = 256; otherwise as tree_attention.cuh. One block per tile, key head and up to 64 kGroups
//   rows of packed queries and heads: kGroups warpgroups that multiply and one, which gives them registers, whose
//   first warp copies. A copy takes 8 rows, so rows next to those of a path are read, and must be finite; rows
//   past the end are not. 162 or 195 KiB of shared memory; no spills; sm_90a; deterministic; graph-safe.
// Architecture-specific targets: sm_90a
// Source: as tree_attention.cuh; scores of a block of keys are multiplied while the softmax of the one before it
//   waits for its values, as in FlashAttention-3 (arXiv 2407.08608). Twin: as tree_attention.cuh.
#pragma once

#include "attention_rows.cuh"
#include "launch.h"
#include "wgmma.cuh"

namespace openjev_fast {

constexpr int kHopperDim = 256;
constexpr int kHopperKeys = 64;
constexpr int kHopperStages = 2;
constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
// Rows of one copy: a tile for each 64 columns.
constexpr int kCopyRows = 8;
constexpr int kColumnTile = 64;
constexpr int kTileBytes = kCopyRows * kColumnTile * sizeof(bf16);
constexpr int kCopyBytes = kCopyRows * kHopperDim * sizeof(bf16);
constexpr int kBlockBytes = kHopperKeys * kHopperDim * sizeof(bf16);

template <int kGroups>
struct __align__(1024) HopperShared {
  // Queries, then the attention output.
  unsigned char q[kGroups][kGroupRows * kHopperDim * sizeof(bf16)];
  unsigned char k[kHopperStages][kBlockBytes];
  unsigned char v[kHopperStages][kBlockBytes];
  // Packed row of each key and the tile's queries whose path holds it; no query for a key of none.
  int2 key[kHopperStages][kHopperKeys];
  AttentionRow row[kGroups * kGroupRows];
  uint64_t k_full[kHopperStages];
  uint64_t k_empty[kHopperStages];
  uint64_t v_full[kHopperStages];
  uint64_t v_empty[kHopperStages];
};

// Offset in bytes of 16-byte chunk `chunk` of row `row` in tiles.
__device__ __forceinline__ int tile_offset(int row, int chunk) {
  return row / 8 * kCopyBytes + chunk / 8 * kTileBytes + row % 8 * 128 + ((chunk ^ row) & 7) * 16;
}

template <int kGroups>
__global__ void __launch_bounds__((kGroups + 1) * kGroupThreads, 1)
    tree_attention_sm90_kernel(const __grid_constant__ TreeAttention a, HeadSplit split,
                               const __grid_constant__ CUtensorMap k_map,
                               const __grid_constant__ CUtensorMap v_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  dependents_may_start();
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<HopperShared<kGroups>*>(shared_bytes);
  const AttentionBlock block = attention_block(a, split);
  if (block.queries == 0) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int steps = (block.keys + kHopperKeys - 1) / kHopperKeys;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kHopperStages; ++stage) {
      // Every lane that writes or reads `key` arrives for itself.
      barrier_init(shared_address(&shared.k_full[stage]), kWarp);
      barrier_init(shared_address(&shared.v_full[stage]), 1);
      barrier_init(shared_address(&shared.k_empty[stage]), kGroups * kGroupThreads);
      barrier_init(shared_address(&shared.v_empty[stage]), kGroups * kGroupThreads / kWarp);
    }
    barrier_init_done();
  }
  __syncthreads();

  // The copying warp: a lane finds the rows of two keys, 8 lanes copy 8 rows each.
  if (warp >= kGroups * kGroupThreads / kWarp) {
    if constexpr (kGroups > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
    if (warp > kGroups * kGroupThreads / kWarp) return;
    const int4* range = reinterpret_cast<const int4*>(a.tile_range) + block.first_range;
    int4 holder = *range;
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kHopperStages, lap = step / kHopperStages;
      int row[2] = {-1, -1}, bits[2] = {0, 0};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = step * kHopperKeys + half * kWarp + lane;
        if (key >= block.keys) continue;
        while (key >= holder.y) holder = *++range;
        row[half] = key + holder.x, bits[half] = holder.z;
      }
      // Past the last key any rows will do.
      const int first = __shfl_sync(kFullMask, row[0], 0);
      const int low = __shfl_sync(kFullMask, row[0], lane * kCopyRows % kWarp);
      const int high = __shfl_sync(kFullMask, row[1], lane * kCopyRows % kWarp);
      const int found = lane * kCopyRows < kWarp ? low : high, copied = found < 0 ? first : found;
      const bool copies = lane < kHopperKeys / kCopyRows;

      const unsigned k_full = shared_address(&shared.k_full[stage]);
      barrier_wait(shared_address(&shared.k_empty[stage]), lap % 2 ^ 1);
      shared.key[stage][lane] = make_int2(row[0], bits[0]);
      shared.key[stage][kWarp + lane] = make_int2(row[1], bits[1]);
      if (lane == 0) {
        barrier_arrive_expecting(k_full, kBlockBytes);
      } else {
        barrier_arrive(k_full);
      }
      if (copies) {
        copy_box(shared_address(shared.k[stage] + lane * kCopyBytes), k_map, k_full, 0, copied, 0,
                 block.kv_head);
      }
      const unsigned v_full = shared_address(&shared.v_full[stage]);
      barrier_wait(shared_address(&shared.v_empty[stage]), lap % 2 ^ 1);
      if (lane == 0) barrier_arrive_expecting(v_full, kBlockBytes);
      __syncwarp();
      if (copies) {
        copy_box(shared_address(shared.v[stage] + lane * kCopyBytes), v_map, v_full, 0, copied, 0,
                 block.kv_head);
      }
    }
    return;
  }
  if constexpr (kGroups > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");

  // Queries, to tiles: a warp copies its 16 rows.
  const int group = warp / 4, first_row = warp * kAttentionRows;
  const unsigned q_tiles = shared_address(shared.q[group]);
  AttentionRow* rows = shared.row + first_row;
  if (lane < kAttentionRows) rows[lane] = attention_row(a, block, first_row + lane);
  __syncwarp();
  {
    const AttentionRow mine = rows[lane % kAttentionRows];
#pragma unroll
    for (int i = 0; i < kAttentionRows; ++i) {
      const int query = __shfl_sync(kFullMask, mine.query, i), head = __shfl_sync(kFullMask, mine.head, i);
      const bf16* source = static_cast<const bf16*>(a.q) +
                           (int64_t{max(query, 0)} * a.query_heads + head) * kHopperDim + lane * kVector;
      copy_async(q_tiles + tile_offset(warp % 4 * kAttentionRows + i, lane), source, query >= 0);
    }
  }
  copy_async_commit();
  const AttentionRow low_row = rows[lane / 4], high_row = rows[lane / 4 + 8];
  const unsigned warp_bits = __reduce_or_sync(kFullMask, low_row.bit | high_row.bit);
  const int warp_limit = __reduce_min_sync(kFullMask, min(low_row.limit, high_row.limit));
  copy_async_wait<0>();
  fence_async();
  warpgroup_sync(1 + group);

  float out[kHopperDim / 2] = {}, score[kHopperKeys / 2] = {};
  float sum[2] = {0.0f, 0.0f}, largest[2] = {-INFINITY, -INFINITY};
  unsigned weight[kHopperKeys / 4];

  auto multiply_keys = [&](int stage) {
    const unsigned k_tiles = shared_address(shared.k[stage]);
#pragma unroll
    for (int i = 0; i < kHopperDim / 16; ++i) {
      const unsigned offset = i / 4 * kTileBytes + i % 4 * 32;
      wgmma_tile<kHopperKeys>(score, tile_descriptor(q_tiles + offset, 16, kCopyBytes),
                              tile_descriptor(k_tiles + offset, 16, kCopyBytes), i > 0);
    }
    wgmma_commit();
  };
  auto multiply_values = [&](int stage) {
    const unsigned v_tiles = shared_address(shared.v[stage]);
#pragma unroll
    for (int i = 0; i < kHopperKeys / 16; ++i) {
      wgmma_64x256x16(out, weight[4 * i], weight[4 * i + 1], weight[4 * i + 2], weight[4 * i + 3],
                      tile_descriptor(v_tiles + i * 2 * kCopyBytes, kTileBytes, kCopyBytes));
    }
    wgmma_commit();
  };
  // Scores of a step to weights, still float32, and what has been summed so far brought to the new largest score.
  float factor[2];
  auto soften = [&](int stage) {
    const int2 low_key = shared.key[stage][lane], high_key = shared.key[stage][kWarp + lane];
    const bool whole = __all_sync(kFullMask, (low_key.y & high_key.y & warp_bits) == warp_bits &&
                                                 max(low_key.x, high_key.x) <= warp_limit);
    if (!whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int limit = rows[lane / 4 + half * 8].limit;
        const unsigned bit = rows[lane / 4 + half * 8].bit;
#pragma unroll
        for (int j = 0; j < kHopperKeys / 8; ++j) {
          const int4 pair = *reinterpret_cast<const int4*>(&shared.key[stage][j * 8 + lane % 4 * 2]);
          float (&x)[2] = *reinterpret_cast<float (*)[2]>(&score[4 * j + 2 * half]);
          x[0] = (pair.y & bit) != 0 & pair.x <= limit ? x[0] : -INFINITY;
          x[1] = (pair.w & bit) != 0 & pair.z <= limit ? x[1] : -INFINITY;
        }
      }
    }
    barrier_arrive(shared_address(&shared.k_empty[stage]));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (int j = 0; j < kHopperKeys / 8; ++j) {
        most = fmaxf(most, fmaxf(score[4 * j + 2 * half], score[4 * j + 2 * half + 1]));
      }
      most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 2));
      // A row that has seen no key yet.
      const float shift = most == -INFINITY ? 0.0f : most * a.scale_log2;
      factor[half] = exp2_approx(largest[half] * a.scale_log2 - shift);
      largest[half] = most;
      float added = 0.0f;
#pragma unroll
      for (int j = 0; j < kHopperKeys / 8; ++j) {
        float& low = score[4 * j + 2 * half];
        float& high = score[4 * j + 2 * half + 1];
        low = exp2_approx(low * a.scale_log2 - shift);
        high = exp2_approx(high * a.scale_log2 - shift);
        added += low + high;
      }
      sum[half] = sum[half] * factor[half] + added;
    }
  };
  auto round_weights = [&]() {
#pragma unroll
    for (int i = 0; i < kHopperKeys / 4; ++i) weight[i] = pack_pair(score[2 * i], score[2 * i + 1]);
  };

  // First step
  barrier_wait(shared_address(&shared.k_full[0]), 0);
  wgmma_begin();
  multiply_keys(0);
  wgmma_wait<0>();
  wgmma_settle(score);
  soften(0);
  round_weights();

  // A step's scores and the values of the step before it
  for (int step = 1; step < steps; ++step) {
    const int stage = step % kHopperStages, before = (step - 1) % kHopperStages;
    barrier_wait(shared_address(&shared.k_full[stage]), step / kHopperStages % 2);
    wgmma_settle(score);
    wgmma_settle(out);
    wgmma_begin();
    multiply_keys(stage);
    barrier_wait(shared_address(&shared.v_full[before]), (step - 1) / kHopperStages % 2);
    wgmma_begin();
    multiply_values(before);
    wgmma_wait<1>();
    wgmma_settle(score);
    soften(stage);
    wgmma_wait<0>();
    wgmma_settle(out);
    if (lane == 0) barrier_arrive(shared_address(&shared.v_empty[before]));
    if (__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kHopperDim / 8; ++i) {
        out[4 * i] *= factor[0], out[4 * i + 1] *= factor[0];
        out[4 * i + 2] *= factor[1], out[4 * i + 3] *= factor[1];
      }
    }
    round_weights();
  }

  // Last values
  const int last = (steps - 1) % kHopperStages;
  barrier_wait(shared_address(&shared.v_full[last]), (steps - 1) / kHopperStages % 2);
  wgmma_settle(out);
  wgmma_begin();
  multiply_values(last);
  wgmma_wait<0>();
  wgmma_settle(out);

  // Attention output, to shared memory in rows, once no warp of the group multiplies queries
  warpgroup_sync(1 + group);
  bf16* attended = reinterpret_cast<bf16*>(shared.q[group]) + warp % 4 * kAttentionRows * kHopperDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 1);
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 2);
    const float inverse = 1.0f / sum[half];
#pragma unroll
    for (int i = 0; i < kHopperDim / 8; ++i) {
      *reinterpret_cast<unsigned*>(attended + value_offset<kHopperDim>(half * 8 + lane / 4, i) +
                                   lane % 4 * 2) =
          pack_pair(out[4 * i + 2 * half] * inverse, out[4 * i + 2 * half + 1] * inverse);
    }
  }
  __syncwarp();
  gate_rows<kHopperDim>(a, rows, attended);
#endif
}

}  // namespace openjev_fast
