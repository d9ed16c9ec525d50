// What the kernels of tree_attention share: which packed rows a block holds, and their gate. Holds no kernel.
#pragma once

#include <climits>

#include "common.cuh"
#include "launch.h"

namespace openjev_fast {

// A warp holds 16 packed rows: one query's heads of a key head lie next to each other, then the next query.
constexpr int kAttentionRows = 16;

// Heads of a key head in one block, and blocks per key head.
struct HeadSplit {
  unsigned heads;
  unsigned parts;
};

struct AttentionBlock {
  int first_query;
  int queries;
  int first_range;
  int keys;
  int kv_head;
  int first_head;
  int heads;
};

struct __align__(16) AttentionRow {
  // Last key row it sees, and the bit of its query in the tile.
  int limit;
  unsigned bit;
  // -1 for a row without a query.
  int query;
  int head;
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Tiles from the last to the first, as the last ones see most keys.
__device__ __forceinline__ AttentionBlock attention_block(const TreeAttention& a, HeadSplit split) {
  const unsigned units = a.kv_heads * split.parts, group = a.query_heads / a.kv_heads;
  const int4 tile = reinterpret_cast<const int4*>(a.tile)[(gridDim.x - 1 - blockIdx.x) / units];
  const unsigned unit = blockIdx.x % units, kv_head = unit / split.parts;
  const unsigned skipped = unit % split.parts * split.heads;
  return {tile.x,
          tile.y,
          tile.z,
          tile.w,
          static_cast<int>(kv_head),
          static_cast<int>(kv_head * group + skipped),
          static_cast<int>(min(split.heads, group - skipped))};
}

__device__ __forceinline__ AttentionRow attention_row(const TreeAttention& a, const AttentionBlock& block,
                                                      unsigned row) {
  const int query = row / static_cast<unsigned>(block.heads);
  const int head = block.first_head + static_cast<int>(row % static_cast<unsigned>(block.heads));
  if (query >= block.queries) return {INT_MAX, 0, -1, head};
  return {a.query_row[block.first_query + query], 1u << query, block.first_query + query, head};
}

// Offset in elements of 16-byte chunk `chunk` of row `row`, such that eight rows' chunks lie in different banks.
template <int kDim>
__device__ __forceinline__ int value_offset(int row, int chunk) {
  return row * kDim + (chunk ^ (row & 7)) * kVector;
}

// Writes a warp's 16 rows of attention output, laid out by value_offset, times their gate.
template <int kDim>
__device__ __forceinline__ void gate_rows(const TreeAttention& a, const AttentionRow* rows,
                                          const bf16* attended) {
  constexpr int kChunks = kDim / kVector, kRowsPerAccess = kWarp / kChunks;
  constexpr int kAccesses = kAttentionRows / kRowsPerAccess, kBatch = kAccesses < 8 ? kAccesses : 8;
  const HeadView gate{static_cast<const bf16*>(a.gate), a.gate_row_stride, a.gate_head_stride};
  const int lane = threadIdx.x % kWarp, chunk = lane % kChunks;
#pragma unroll
  for (int first = 0; first < kAccesses; first += kBatch) {
    Packed<kVector> packed[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const AttentionRow& row = rows[(first + i) * kRowsPerAccess + lane / kChunks];
      packed[i] = load_packed<kVector>(gate.at(max(row.query, 0), row.head, chunk * kVector));
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int index = (first + i) * kRowsPerAccess + lane / kChunks;
      const AttentionRow& row = rows[index];
      float value[kVector], factor[kVector];
      unpack(packed[i], factor);
      load(attended + value_offset<kDim>(index, chunk), value);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        factor[j] = __fdividef(1.0f, 1.0f + exp2_approx(-1.44269504f * factor[j]));
      }
      round_to_bf16(factor);
#pragma unroll
      for (int j = 0; j < kVector; ++j) value[j] *= factor[j];
      if (row.query >= 0) {
        store(static_cast<bf16*>(a.out) + (int64_t{row.query} * a.query_heads + row.head) * kDim +
                  chunk * kVector,
              value);
      }
    }
  }
}

// Host side of the launchers.

// Parts of about the same number of heads, each with at most `most_rows` packed rows.
inline HeadSplit split_heads(const TreeAttention& a, int most_rows) {
  const int64_t group = a.query_heads / a.kv_heads;
  const int64_t heads = ceil_div(group, ceil_div(group, most_rows / a.tile_queries));
  return {static_cast<unsigned>(heads), static_cast<unsigned>(ceil_div(group, heads))};
}

}  // namespace openjev_fast
