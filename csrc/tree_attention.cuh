// Computes: out = softmax(scale q k^T) v * sigmoid(gate), heads laid side by side; a query sees the key rows of
//   its path up to its own row. Matches Qwen3_5Attention.forward (transformers 5.10.2, modeling_qwen3_5).
// Shapes: q [M, HQ, D] contiguous; k, v [N, HKV, D] and gate [M, HQ, D], row and head strides in elements, D
//   contiguous; query head h uses key head h / (HQ / HKV). query_row [M]. tile [T, 4], tile_range [R, 4]:
//   AttentionPlan of ops/tree_attention.py. out [M, HQ * D] contiguous, written, aliases nothing.
// Dtypes: q, k, v, gate, out bfloat16; tables int32; dot products, softmax and output sums float32.
// Rounding points: softmax weights, not yet divided by their sum, to bfloat16 before the product with v; their
//   float32 sum is of the unrounded weights; the attention output to bfloat16; the sigmoid to bfloat16; the
//   product to bfloat16. Keys in the plan's order, 32 at a time. Approximate: ex2.approx (weights and
//   sigmoid), __fdividef (sigmoid).
// Limits and launch: D 64, 128 or 256; scale > 0; at most 32 queries a tile; strides multiples of 8, pointers
//   aligned to 16 bytes; 64-bit addresses; one block per tile, key head and up to 128 rows of packed queries
//   and heads, last tile first; 99 KiB of shared memory at D = 256; no spills; sm_80; deterministic;
//   graph-safe, the launch depends on tensor shapes alone. On Hopper tree_attention_sm90.cuh takes D = 256.
// Source: the upstream module named above; online softmax of Milakov and Gimelshein (arXiv 1805.02867) in
//   blocks as in FlashAttention-2 (arXiv 2307.08691). Twin: tree_attention_ref, tests/gpu/test_tree_attention.py.
#pragma once

#include "attention_rows.cuh"
#include "common.cuh"
#include "launch.h"
#include "mma.cuh"

namespace openjev_fast {

constexpr int kAttentionWarps = 8;
constexpr int kAttentionKeys = 32;
constexpr int kAttentionStages = 3;

template <int kDim>
struct AttentionStage {
  bf16 k[kAttentionKeys * kDim];
  bf16 v[kAttentionKeys * kDim];
};

template <int kDim>
struct AttentionShared {
  AttentionStage<kDim> stage[kAttentionStages];
  // Packed row of each key and the tile's queries whose path holds it; no query for a key past the end.
  int2 key[kAttentionStages][kAttentionKeys];
  AttentionRow row[kAttentionWarps * kAttentionRows];
  // What fetching needs of the block; kept here since registers are short.
  int keys;
  int first_range;
  int64_t k_head;
  int64_t v_head;
};

// The lane, read anew at each call: what is computed from it is not kept in registers across the main loop.
__device__ __forceinline__ int fresh_lane() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Offset in elements of 16-byte chunk `chunk` of key row `row`, such that two rows' four chunks lie in different
// banks.
template <int kDim>
__device__ __forceinline__ int key_offset(int row, int chunk) {
  return row * kDim + (chunk ^ ((row & 1) << 2)) * kVector;
}

template <int kDim>
__global__ void __launch_bounds__(kAttentionWarps* kWarp, 1)
    tree_attention_kernel(const __grid_constant__ TreeAttention a, HeadSplit split) {
  dependents_may_start();
  constexpr int kChunks = kDim / kVector;
  constexpr int kRowsPerAccess = kWarp / kChunks;
  constexpr int kKeyTiles = kAttentionKeys / 8;
  static_assert(kWarp % kChunks == 0);
  // The output of every warp fits where the stages were.
  static_assert(kAttentionWarps * kAttentionRows <= 2 * kAttentionKeys * kAttentionStages);
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<AttentionShared<kDim>*>(shared_bytes);

  const AttentionBlock held = attention_block(a, split);
  if (held.queries == 0) return;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;

  // Queries: a lane loads 8 neighbouring dims of a row at a time and spreads them over two products. Which
  // dims meet in a product is free as long as the keys are read alike.
  const int row_in_tile = lane / 4, quad = lane % 4;
  uint4 q[2][kChunks / 4];
  int warp_limit = INT_MAX;
  unsigned warp_bits = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int index = warp * kAttentionRows + half * 8 + row_in_tile;
    const AttentionRow row = attention_row(a, held, index);
    if (quad == 0) shared.row[index] = row;
    warp_limit = min(warp_limit, row.limit);
    warp_bits |= row.bit;
    const bool real = row.query >= 0;
    const bf16* source = static_cast<const bf16*>(a.q) +
                         (int64_t{max(row.query, 0)} * a.query_heads + row.head) * kDim + quad * 8;
#pragma unroll
    for (int i = 0; i < kChunks / 4; ++i) {
      q[half][i] = real ? *reinterpret_cast<const uint4*>(source + i * 32) : make_uint4(0, 0, 0, 0);
    }
  }
  warp_limit = __reduce_min_sync(kFullMask, warp_limit);
  warp_bits = __reduce_or_sync(kFullMask, warp_bits);

  // Fetching: every warp finds the rows of all keys of a block, one per lane, and copies its share of them.
  if (threadIdx.x == 0) {
    shared.keys = held.keys;
    shared.first_range = held.first_range;
    shared.k_head = held.kv_head * a.k_head_stride;
    shared.v_head = held.kv_head * a.v_head_stride;
  }
  __syncthreads();
  int passed = 0;
  auto fetch = [&](int block, int stage) {
    const int self = fresh_lane(), key = block * kAttentionKeys + self;
    int2 found = make_int2(-1, 0);
    if (key < shared.keys) {
      const int4* range = reinterpret_cast<const int4*>(a.tile_range) + shared.first_range;
      int4 holder = range[passed];
      while (key >= holder.y) holder = range[++passed];
      if (holder.z != 0) found = make_int2(key + holder.x, holder.z);
    }
    if (warp == 0) shared.key[stage][self] = found;
    const int chunk = self % kChunks;
    const bf16* k_head = static_cast<const bf16*>(a.k) + shared.k_head + chunk * kVector;
    const bf16* v_head = static_cast<const bf16*>(a.v) + shared.v_head + chunk * kVector;
#pragma unroll 1
    for (int i = warp * kRowsPerAccess + self / kChunks; i < kAttentionKeys; i += warps * kRowsPerAccess) {
      const int row = __shfl_sync(kFullMask, found.x, i);
      const bool real = row >= 0;
      const int64_t source_row = real ? row : 0;
      copy_async(shared_address(shared.stage[stage].k + key_offset<kDim>(i, chunk)),
                 k_head + source_row * a.k_row_stride, real);
      copy_async(shared_address(shared.stage[stage].v + value_offset<kDim>(i, chunk)),
                 v_head + source_row * a.v_row_stride, real);
    }
  };

  const int blocks = (held.keys + kAttentionKeys - 1) / kAttentionKeys;
#pragma unroll
  for (int block = 0; block < kAttentionStages - 1; ++block) {
    if (block < blocks) fetch(block, block);
    copy_async_commit();
  }

  float sum[2] = {0.0f, 0.0f}, largest[2] = {-INFINITY, -INFINITY};
  float out[kDim / 8][4] = {};
  int stage = 0;
  for (int block = 0; block < blocks; ++block) {
    copy_async_wait<kAttentionStages - 2>();
    // Also: every warp is done with the stage that is fetched into next.
    __syncthreads();
    if (block + kAttentionStages - 1 < blocks) {
      fetch(block + kAttentionStages - 1, stage == 0 ? kAttentionStages - 1 : stage - 1);
    }
    copy_async_commit();
    const AttentionStage<kDim>& data = shared.stage[stage];
    const int2* key = shared.key[stage];
    stage = stage == kAttentionStages - 1 ? 0 : stage + 1;

    const int2 mine = key[lane];
    if (!__any_sync(kFullMask, mine.y & warp_bits)) continue;
    const bool whole = __all_sync(kFullMask, (mine.y & warp_bits) == warp_bits && mine.x <= warp_limit);

    // Scores
    float score[kKeyTiles][4] = {};
    const bf16* key_rows = data.k + row_in_tile * kDim;
#pragma unroll
    for (int i = 0; i < kChunks / 4; ++i) {
      const uint4 q0 = q[0][i], q1 = q[1][i];
      const int offset = key_offset<kDim>(row_in_tile, i * 4 + quad) - row_in_tile * kDim;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const uint4 k = *reinterpret_cast<const uint4*>(key_rows + j * 8 * kDim + offset);
        mma_16x8x16(score[j], q0.x, q1.x, q0.y, q1.y, k.x, k.y);
        mma_16x8x16(score[j], q0.z, q1.z, q0.w, q1.w, k.z, k.w);
      }
    }
    if (!whole) {
      const int self = fresh_lane();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const AttentionRow& row = shared.row[warp * kAttentionRows + half * 8 + self / 4];
        const int limit = row.limit;
        const unsigned bit = row.bit;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          const int4 pair = *reinterpret_cast<const int4*>(key + j * 8 + self % 4 * 2);
          score[j][2 * half] = (pair.y & bit) != 0 & pair.x <= limit ? score[j][2 * half] : -INFINITY;
          score[j][2 * half + 1] = (pair.w & bit) != 0 & pair.z <= limit ? score[j][2 * half + 1] : -INFINITY;
        }
      }
    }

    // Softmax: the largest score so far, and what has been summed so far brought to it
    float factor[2], shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
        most = fmaxf(most, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
      most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 2));
      // A row that has seen no key yet.
      shift[half] = most == -INFINITY ? 0.0f : most * a.scale_log2;
      factor[half] = exp2_approx(largest[half] * a.scale_log2 - shift[half]);
      largest[half] = most;
      sum[half] *= factor[half];
    }
    if (__any_sync(kFullMask, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kDim / 8; ++i) {
        out[i][0] *= factor[0], out[i][1] *= factor[0];
        out[i][2] *= factor[1], out[i][3] *= factor[1];
      }
    }
    unsigned weight[kKeyTiles][2];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float low = exp2_approx(score[j][2 * half] * a.scale_log2 - shift[half]);
        const float high = exp2_approx(score[j][2 * half + 1] * a.scale_log2 - shift[half]);
        sum[half] += low + high;
        weight[j][half] = pack_pair(low, high);
      }
    }

    // Weighted values
    const int self = fresh_lane();
    const unsigned values = shared_address(data.v) + value_offset<kDim>(self % 16, self / 16) * sizeof(bf16);
#pragma unroll
    for (int t = 0; t < kAttentionKeys / 16; ++t) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        unsigned v[4];
        // Chunk 2 i + lane / 16 of row 16 t + lane % 16: the swizzle is an exclusive or, so are its parts.
        load_matrices_transposed(v, (values ^ (i % 4 * 32)) + i / 4 * 128 + t * 16 * kDim * sizeof(bf16));
        mma_16x8x16(out[2 * i], weight[2 * t][0], weight[2 * t][1], weight[2 * t + 1][0],
                    weight[2 * t + 1][1], v[0], v[1]);
        mma_16x8x16(out[2 * i + 1], weight[2 * t][0], weight[2 * t][1], weight[2 * t + 1][0],
                    weight[2 * t + 1][1], v[2], v[3]);
      }
    }
  }

  // Attention output, to shared memory in rows
  copy_async_wait<0>();
  __syncthreads();
  bf16* rows = reinterpret_cast<bf16*>(shared_bytes) + warp * kAttentionRows * kDim;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 1);
    sum[half] += __shfl_xor_sync(kFullMask, sum[half], 2);
    const float inverse = 1.0f / sum[half];
#pragma unroll
    for (int i = 0; i < kDim / 8; ++i) {
      *reinterpret_cast<unsigned*>(rows + value_offset<kDim>(half * 8 + row_in_tile, i) + quad * 2) =
          pack_pair(out[i][2 * half] * inverse, out[i][2 * half + 1] * inverse);
    }
  }
  __syncwarp();

  gate_rows<kDim>(a, shared.row + warp * kAttentionRows, rows);
}

}  // namespace openjev_fast
