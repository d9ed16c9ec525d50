// Computes, per value head and along every path of a forest: S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, o =
//   scale S^T q, in chunks of 64 rows from a node's first row. Matches chunk_gated_delta_rule (fla-core 0.5.2,
//   fla.ops.gated_delta_rule).
// Shapes: q, k [N, H, 128], v, out [N, HV, 128], g, beta [N, HV], node [K, 8] (first row, rows, slot the state
//   comes from or -1, slot it goes to or -1, first tile, kept slot the state comes from plus 1 or 0, kept slot it also
//   goes to plus 1 or 0, unused), chunk [D, 4] (first row, rows, first tile, unused), all contiguous; value head h
//   uses key head h / (HV / H). work [tiles, HV] of DeltaWork, state [slots, HV, 128, 128] in the order of the
//   registers, flag [slots, HV, 8]; kept [kept slots, HV, 128 of V, 128 of K], null where the node's kept slots are to
//   be ignored. A node starts from one slot of either kind at most; a kept slot that one node goes to is neither
//   another's nor one that a node comes from. out, work, state, flag and the kept slots gone to are written and alias
//   nothing. Rows of no node are neither read nor written.
// Dtypes: q, k, v, out bfloat16; g, beta, state, kept float32; node, chunk, flag int32; every sum float32.
// Rounding points: T = (I + beta k k^T decay)^-1 to bfloat16; v beta, k beta, (k beta) exp(G), u = T (v beta), w = T
//   (k beta exp(G)) to bfloat16; the state where it enters a product; v_new = u - w S and v_new exp(G_last - G) to
//   bfloat16, each from float32; q k^T decay to bfloat16; o. T is solved in float32: 16x16 diagonal tiles by
//   substitution, the rest by products of tf32 pairs, cut off (high high + high low + low high). G is a float32 prefix sum
//   in log2 units, by pairs and then shuffles; exponentials are ex2.approx (2 ulp, denormals to zero).
// Limits and launch: K = V = 128, (nodes + chunks) HV < 2^30; 16-byte aligned pointers. delta_chunk_kernel does what
//   needs no state, a block of 128 threads for a chunk and value head, and clears the flags. Then delta_state_kernel:
//   two blocks of 128 threads for a node and value head, 64 value columns each, 16 columns of the state in a warp's
//   registers. They wait, by flags, for their parent's state, and rely on blocks starting in order of their index,
//   parents first. 56,832 and 66,048 bytes of shared memory; 64-bit addresses; no spills; sm_80; graph-safe.
// Source: Gated Delta Networks (arXiv 2412.06464), chunked as in arXiv 2406.06484, rounding as in the upstream
//   function. Twin: delta_rule_ref, tests/gpu/test_delta_rule.py.
#pragma once

#include "launch.h"
#include "mma.cuh"

namespace openjev_fast {

constexpr int kDeltaDim = 128;
constexpr int kDeltaChunk = 64;
constexpr int kDeltaTile = 16;
constexpr int kDeltaTiles = kDeltaChunk / kDeltaTile;
// 16-column steps of a key or value dim; tiles in a lower triangle of tiles.
constexpr int kDeltaSteps = kDeltaDim / kDeltaTile;
constexpr int kDeltaTriangle = kDeltaTiles * (kDeltaTiles + 1) / 2;
constexpr int kDeltaWarps = 4;
constexpr int kDeltaThreads = kDeltaWarps * kWarp;
// Value columns of a block that holds a state; blocks of a value head.
constexpr int kDeltaWidth = kDeltaWarps * kDeltaTile;
constexpr int kDeltaSlices = kDeltaDim / kDeltaWidth;
// Bytes of a row of 128 bfloat16, of a tile of such rows, and of a 16x16 tile stored for itself.
constexpr unsigned kWideRow = kDeltaDim * sizeof(bf16);
constexpr unsigned kWideTile = kDeltaTile * kWideRow;
constexpr unsigned kSmallRow = kDeltaTile * sizeof(bf16);
constexpr unsigned kSmallTile = kDeltaTile * kSmallRow;
// Floats of a row of the matrix that is inverted: no two lanes of a fragment's rows share a bank.
constexpr int kSolveStride = kDeltaChunk + 4;

// What the first kernel leaves the second of 16 rows and a value head, in the order of mma operands: a lane's four
// registers together. w as b operands of 16 key columns each, u transposed as a operands of 16 value columns each,
// q k^T decay transposed as b operands of 16 rows each, exp(G) and exp(G_last - G).
struct DeltaWork {
  uint4 w[kDeltaSteps][kWarp];
  uint4 u[kDeltaSteps][kWarp];
  uint4 weights[kDeltaTiles][kWarp];
  float since_start[kDeltaTile];
  float to_end[kDeltaTile];
};

// Of one chunk: G in log2 units, exp(G), exp(G_last - G), beta.
struct DeltaGates {
  float sum[kDeltaChunk];
  float since_start[kDeltaChunk];
  float to_end[kDeltaChunk];
  float beta[kDeltaChunk];
};

// 16-byte pieces are swizzled: those of rows 128 wide by the row's number modulo 8, those of 16x16 tiles by its
// third bit.
struct DeltaChunkShared {
  bf16 k[kDeltaChunk * kDeltaDim];
  union {
    bf16 q[kDeltaChunk * kDeltaDim];
    // 16 columns together, in tiles.
    bf16 v[kDeltaSteps][kDeltaChunk * kDeltaTile];
  };
  float solve[kDeltaChunk * kSolveStride];
  // A lower triangle, in tiles.
  bf16 inverse[kDeltaTriangle * kDeltaTile * kDeltaTile];
  // g and beta as they come, each lane of the first warp its two rows.
  float4 raw_gates[kWarp];
  DeltaGates gates;
};

struct DeltaStateShared {
  bf16 k[kDeltaChunk * kDeltaDim];
  bf16 q[kDeltaChunk * kDeltaDim];
  uint4 w[kDeltaTiles][kDeltaSteps][kWarp];
  // Later v_new exp(G_last - G).
  uint4 u[kDeltaTiles][kDeltaWarps][kWarp];
  uint4 weights[kDeltaTiles][kDeltaTiles][kWarp];
  struct {
    float since_start[kDeltaTile];
    float to_end[kDeltaTile];
  } gates[kDeltaTiles];
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// pack_pair, done where it stands: hoisted out of a loop, the pairs of a whole state would spill.
__device__ __forceinline__ unsigned pack_pair_here(float low, float high) {
  unsigned pair;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ int load_acquire(const int32_t* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(int32_t* flag, int value) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ unsigned triangle(int row_tile, int column_tile) {
  return static_cast<unsigned>(row_tile * (row_tile + 1) / 2 + column_tile);
}

// Byte of the 16-byte piece `piece` of a row, in wide rows and in a small tile.
__device__ __forceinline__ unsigned wide_offset(unsigned row, unsigned piece) {
  return row * kWideRow + ((piece ^ (row % 8)) * 16);
}

__device__ __forceinline__ unsigned small_offset(unsigned row, unsigned piece) {
  return row * kSmallRow + ((piece ^ (row / 4 % 2)) * 16);
}

// What the lane passes to ldmatrix for a 16x16 tile: `rows` orders the four 8x8 matrices down the rows first (a
// operand of rows, or b operand through a transposition), `columns` along the columns first (b operand whose
// columns are the rows, or a operand through a transposition).
struct TileOffsets {
  unsigned wide_rows, wide_columns, small_rows, small_columns;

  __device__ __forceinline__ explicit TileOffsets(unsigned lane) {
    const unsigned down = lane % 16, across = lane / 16;
    const unsigned row = lane % 8 + lane / 16 * 8, piece = lane / 8 % 2;
    wide_rows = wide_offset(down, across);
    wide_columns = wide_offset(row, piece);
    small_rows = small_offset(down, across);
    small_columns = small_offset(row, piece);
  }
};

// Address of 16 columns `step` of a wide tile; the swizzle and the columns are bits of their own.
__device__ __forceinline__ unsigned at_step(unsigned tile, unsigned step) { return tile ^ (step * 32); }

__device__ __forceinline__ float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// A pair times one factor each, rounded to bfloat16.
__device__ __forceinline__ unsigned scale_pair(unsigned pair, float2 factor) {
  return pack_pair(low_half(pair) * factor.x, high_half(pair) * factor.y);
}

__device__ __forceinline__ float2 load_two(const float* values) {
  return *reinterpret_cast<const float2*>(values);
}

// x as the sum of two tf32: the high part cut off, the low part exact in float32 and cut off by the product.
__device__ __forceinline__ void split_tf32(float x, unsigned& high, unsigned& low) {
  high = __float_as_uint(x) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// d += a b for 16x16 tiles of float32 in shared memory.
__device__ __forceinline__ void multiply_tiles(float (&d)[2][4], const float* a, const float* b,
                                               unsigned lane) {
  const unsigned group = lane / 4, member = lane % 4;
  float cross[2][2][4] = {};
#pragma unroll
  for (int depth = 0; depth < kDeltaTile; depth += 8) {
    unsigned a_high[4], a_low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      split_tf32(a[(group + i % 2 * 8) * kSolveStride + depth + member + i / 2 * 4], a_high[i], a_low[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned b_high[2], b_low[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        split_tf32(b[(depth + member + i * 4) * kSolveStride + half * 8 + group], b_high[i], b_low[i]);
      }
      mma_16x8x8_tf32(cross[half][0], a_low, b_high[0], b_high[1]);
      mma_16x8x8_tf32(cross[half][1], a_high, b_low[0], b_low[1]);
      mma_16x8x8_tf32(d[half], a_high, b_high[0], b_high[1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[half][i] += cross[half][0][i] + cross[half][1][i];
  }
}

// A tile's accumulators to float32 rows, or to a bfloat16 tile, or as a lane's registers of an operand.
__device__ __forceinline__ void store_solve_tile(float* tile, const float (&d)[2][4], float sign,
                                                 unsigned lane) {
  const unsigned row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(tile + (row + 8 * i) * kSolveStride + 8 * half + column) =
          make_float2(sign * d[half][2 * i], sign * d[half][2 * i + 1]);
    }
  }
}

__device__ __forceinline__ void store_small_tile(bf16* tile, const float (&d)[2][4], float sign,
                                                 unsigned lane) {
  const unsigned row = lane / 4;
  char* bytes = reinterpret_cast<char*>(tile) + lane % 4 * 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<unsigned*>(bytes + small_offset(row + 8 * i, half)) =
          pack_pair(sign * d[half][2 * i], sign * d[half][2 * i + 1]);
    }
  }
}

__device__ __forceinline__ uint4 as_operand(const float (&d)[2][4]) {
  return make_uint4(pack_pair(d[0][0], d[0][1]), pack_pair(d[1][0], d[1][1]), pack_pair(d[0][2], d[0][3]),
                    pack_pair(d[1][2], d[1][3]));
}

// Copies 128 columns of `rows` rows to wide tiles, zeros up to the end of the last tile.
__device__ __forceinline__ void copy_wide(bf16* target, const void* source, int64_t first, int rows,
                                          int heads, int head) {
  constexpr int kPieces = kDeltaDim / kVector;
  const int piece = threadIdx.x % kPieces, padded = (rows + kDeltaTile - 1) / kDeltaTile * kDeltaTile;
  const bf16* from = static_cast<const bf16*>(source) + (first * heads + head) * kDeltaDim + piece * kVector;
  const unsigned to = shared_address(target);
  for (int row = threadIdx.x / kPieces; row < padded; row += kDeltaThreads / kPieces) {
    const bool real = row < rows;
    copy_async(to + wide_offset(row, piece), from + (real ? row : 0) * int64_t{heads} * kDeltaDim, real);
  }
}

// A chunk's work that needs no state. `tiles` 16-row tiles hold its rows.
struct DeltaChunk {
  DeltaChunkShared& shared;
  const DeltaGates& gates;
  // Of the chunk's first tile and this value head.
  DeltaWork* first_work;
  int value_heads;
  unsigned k, q;
  TileOffsets offsets;
  unsigned lane, warp;
  int tiles;

  __device__ __forceinline__ DeltaChunk(DeltaChunkShared& shared, DeltaWork* first_work, int value_heads,
                                        int tiles)
      : shared(shared),
        gates(shared.gates),
        first_work(first_work),
        value_heads(value_heads),
        k(shared_address(shared.k)),
        q(shared_address(shared.q)),
        offsets(threadIdx.x % kWarp),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        tiles(tiles) {}

  __device__ __forceinline__ DeltaWork* work(int tile) const { return first_work + tile * value_heads; }

  __device__ __forceinline__ float* solve_tile(int row_tile, int column_tile) const {
    return shared.solve + (row_tile * kSolveStride + column_tile) * kDeltaTile;
  }

  // k k^T and q k^T of one tile, with decay: the first to be inverted, the second for the second kernel.
  __device__ __forceinline__ void score(int row_tile, int column_tile) const {
    float kk[2][4] = {}, qk[2][4] = {};
    const unsigned k_rows = k + row_tile * kWideTile + offsets.wide_rows;
    const unsigned q_rows = q + row_tile * kWideTile + offsets.wide_rows;
    const unsigned k_columns = k + column_tile * kWideTile + offsets.wide_columns;
#pragma unroll
    for (int step = 0; step < kDeltaSteps; ++step) {
      unsigned a[4], c[4], b[4];
      load_matrices(b, at_step(k_columns, step));
      load_matrices(a, at_step(k_rows, step));
      load_matrices(c, at_step(q_rows, step));
      mma_16x8x16(kk[0], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma_16x8x16(kk[1], a[0], a[1], a[2], a[3], b[2], b[3]);
      mma_16x8x16(qk[0], c[0], c[1], c[2], c[3], b[0], b[1]);
      mma_16x8x16(qk[1], c[0], c[1], c[2], c[3], b[2], b[3]);
    }
    const int row = row_tile * kDeltaTile + lane / 4, column = column_tile * kDeltaTile + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 column_sum = load_two(gates.sum + column + 8 * half);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at_row = row + i / 2 * 8, at_column = column + 8 * half + i % 2;
        const float decay = exp2_approx(gates.sum[at_row] - (i % 2 == 0 ? column_sum.x : column_sum.y));
        kk[half][i] = at_column < at_row ? gates.beta[at_row] * kk[half][i] * decay : 0.0f;
        qk[half][i] = at_column <= at_row ? qk[half][i] * decay : 0.0f;
      }
    }
    store_solve_tile(solve_tile(row_tile, column_tile), kk, 1.0f, lane);
    work(row_tile)->weights[column_tile][lane] = as_operand(qk);
  }

  // The inverse of I + a diagonal tile: a lane solves for one column, and lane + 16 repeats it.
  __device__ __forceinline__ void invert_diagonal(int tile) const {
    float* source = solve_tile(tile, tile);
    const unsigned column = lane % kDeltaTile;
    float x[kDeltaTile];
#pragma unroll
    for (int row = 0; row < kDeltaTile; ++row) {
      x[row] = column == row ? 1.0f : 0.0f;
#pragma unroll
      for (int at = 0; at < row; at += 4) {
        const float4 a = *reinterpret_cast<const float4*>(source + row * kSolveStride + at);
        const float values[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (at + i < row) x[row] -= values[i] * x[at + i];
        }
      }
    }
    __syncwarp();
    char* target = reinterpret_cast<char*>(shared.inverse + triangle(tile, tile) * (kDeltaTile * kDeltaTile));
#pragma unroll
    for (int row = 0; row < kDeltaTile; ++row) {
      if (lane < kDeltaTile) {
        source[row * kSolveStride + column] = x[row];
      } else {
        *reinterpret_cast<bf16*>(target + small_offset(row, column / 8) + column % 8 * sizeof(bf16)) =
            __float2bfloat16_rn(x[row]);
      }
    }
  }

  __device__ __forceinline__ void scores_and_diagonal() const {
    if (warp < tiles) {
      score(warp, warp);
      __syncwarp();
      invert_diagonal(warp);
    }
    // Tiles below the diagonal; the warps without a diagonal tile begin.
    const int below = tiles * (tiles - 1) / 2;
    for (int tile = (warp + 2 * kDeltaWarps - tiles) % kDeltaWarps; tile < below; tile += kDeltaWarps) {
      const int row_tile = tile == 0 ? 1 : tile < 3 ? 2 : 3;
      score(row_tile, tile - row_tile * (row_tile - 1) / 2);
    }
  }

  __device__ __forceinline__ bf16* inverse_tile(int row_tile, int column_tile) const {
    return shared.inverse + triangle(row_tile, column_tile) * (kDeltaTile * kDeltaTile);
  }

  // Off-diagonal tiles of the inverse: within pairs of tiles, then between the two pairs.
  __device__ __forceinline__ void merge() const {
    const int first = 2 * warp;
    if (first + 1 < tiles) {
      float* between = solve_tile(first + 1, first);
      float product[2][4] = {}, merged[2][4] = {};
      multiply_tiles(product, between, solve_tile(first, first), lane);
      __syncwarp();
      store_solve_tile(between, product, 1.0f, lane);
      __syncwarp();
      multiply_tiles(merged, solve_tile(first + 1, first + 1), between, lane);
      __syncwarp();
      store_solve_tile(between, merged, -1.0f, lane);
      store_small_tile(inverse_tile(first + 1, first), merged, -1.0f, lane);
    }
    if (tiles <= 2) return;
    __syncthreads();
    const int row_tile = 2 + warp / 2, column_tile = warp % 2;
    const bool active = row_tile < tiles;
    float product[2][4] = {}, merged[2][4] = {};
    if (active) {
      multiply_tiles(product, solve_tile(row_tile, 1), solve_tile(1, column_tile), lane);
      if (column_tile == 0) multiply_tiles(product, solve_tile(row_tile, 0), solve_tile(0, 0), lane);
    }
    __syncthreads();
    if (active) store_solve_tile(solve_tile(row_tile, column_tile), product, 1.0f, lane);
    __syncthreads();
    if (active) {
      multiply_tiles(merged, solve_tile(row_tile, 2), solve_tile(2, column_tile), lane);
      if (row_tile == 3) multiply_tiles(merged, solve_tile(3, 3), solve_tile(3, column_tile), lane);
      store_small_tile(inverse_tile(row_tile, column_tile), merged, -1.0f, lane);
    }
  }

  // w = T (k beta exp(G)); a warp computes 32 columns, 16 after 16.
  __device__ __forceinline__ void project_keys() const {
    const unsigned inverse = shared_address(shared.inverse) + offsets.small_rows;
#pragma unroll 1
    for (unsigned step = 2 * warp; step < 2 * warp + 2; ++step) {
      unsigned b[kDeltaTiles][4];
#pragma unroll
      for (int tile = 0; tile < kDeltaTiles; ++tile) {
        if (tile >= tiles) break;
        load_matrices_transposed(b[tile], at_step(k + tile * kWideTile + offsets.wide_rows, step));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tile * kDeltaTile + 8 * half + lane % 4 * 2;
          const float2 beta = load_two(gates.beta + row), since_start = load_two(gates.since_start + row);
          b[tile][half] = scale_pair(scale_pair(b[tile][half], beta), since_start);
          b[tile][half + 2] = scale_pair(scale_pair(b[tile][half + 2], beta), since_start);
        }
      }
#pragma unroll
      for (int row_tile = 0; row_tile < kDeltaTiles; ++row_tile) {
        if (row_tile >= tiles) break;
        float w[2][4] = {};
#pragma unroll
        for (int tile = 0; tile <= row_tile; ++tile) {
          unsigned a[4];
          load_matrices(a, inverse + triangle(row_tile, tile) * kSmallTile);
          mma_16x8x16(w[0], a[0], a[1], a[2], a[3], b[tile][0], b[tile][1]);
          mma_16x8x16(w[1], a[0], a[1], a[2], a[3], b[tile][2], b[tile][3]);
        }
        work(row_tile)->w[step][lane] = as_operand(w);
      }
    }
  }

  // u = T (v beta), transposed; a warp computes 32 columns, 16 after 16.
  __device__ __forceinline__ void project_values() const {
    const unsigned inverse = shared_address(shared.inverse) + offsets.small_columns;
#pragma unroll 1
    for (unsigned step = 2 * warp; step < 2 * warp + 2; ++step) {
      const unsigned v = shared_address(shared.v[step]) + offsets.small_columns;
      unsigned a[kDeltaTiles][4];
#pragma unroll
      for (int row_tile = 0; row_tile < kDeltaTiles; ++row_tile) {
        if (row_tile >= tiles) break;
        load_matrices_transposed(a[row_tile], v + row_tile * kSmallTile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 beta = load_two(gates.beta + row_tile * kDeltaTile + 8 * half + lane % 4 * 2);
          a[row_tile][2 * half] = scale_pair(a[row_tile][2 * half], beta);
          a[row_tile][2 * half + 1] = scale_pair(a[row_tile][2 * half + 1], beta);
        }
        float u[2][4] = {};
#pragma unroll
        for (int tile = 0; tile <= row_tile; ++tile) {
          unsigned b[4];
          load_matrices(b, inverse + triangle(row_tile, tile) * kSmallTile);
          mma_16x8x16(u[0], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b[0], b[1]);
          mma_16x8x16(u[1], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b[2], b[3]);
        }
        work(row_tile)->u[step][lane] = make_uint4(pack_pair(u[0][0], u[0][1]), pack_pair(u[0][2], u[0][3]),
                                                   pack_pair(u[1][0], u[1][1]), pack_pair(u[1][2], u[1][3]));
      }
    }
  }
};

// Copies g and beta of a chunk's rows, zeros past its end; the first warp calls it.
__device__ __forceinline__ void copy_gates(const DeltaRule& p, float4* raw, int64_t first, int rows,
                                           int head) {
  const unsigned lane = threadIdx.x % kWarp, to = shared_address(raw + lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    const int64_t source = (first + (row < rows ? row : 0)) * p.value_heads + head;
    copy_async_word(to + 4 * i, p.g + source, row < rows);
    copy_async_word(to + 8 + 4 * i, p.beta + source, row < rows);
  }
}

// A chunk's gates from what copy_gates brought for this thread; the first warp calls it.
__device__ __forceinline__ void store_gates(const float4& raw, DeltaGates& gates) {
  constexpr float kLog2E = 1.4426950408889634f;
  const unsigned lane = threadIdx.x % kWarp;
  const float g = raw.x;
  float sum = raw.x + raw.y;
#pragma unroll
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const float before = __shfl_up_sync(kFullMask, sum, distance);
    if (lane >= distance) sum += before;
  }
  const float before = __shfl_up_sync(kFullMask, sum, 1);
  const float first = ((lane == 0 ? 0.0f : before) + g) * kLog2E, second = sum * kLog2E;
  const float last = __shfl_sync(kFullMask, second, kWarp - 1);
  const auto put = [&](float* target, float x, float y) {
    *reinterpret_cast<float2*>(target + 2 * lane) = make_float2(x, y);
  };
  put(gates.sum, first, second);
  put(gates.since_start, exp2_approx(first), exp2_approx(second));
  put(gates.to_end, exp2_approx(last - first), exp2_approx(last - second));
  put(gates.beta, raw.z, raw.w);
}

// A block computes what one chunk and value head leave for the second kernel: index = chunk HV + head.
__global__ void __launch_bounds__(kDeltaThreads, 4) delta_chunk_kernel(DeltaRule p) {
  extern __shared__ __align__(128) unsigned char delta_shared[];
  auto& shared = *reinterpret_cast<DeltaChunkShared*>(delta_shared);
  const int value_head = blockIdx.x % p.value_heads, key_head = value_head / (p.value_heads / p.key_heads);
  const int4 entry = reinterpret_cast<const int4*>(p.chunk)[blockIdx.x / p.value_heads];
  const int first = entry.x, rows = entry.y, first_tile = entry.z;
  for (int64_t i = int64_t{blockIdx.x} * kDeltaThreads + threadIdx.x; i < p.flags;
       i += int64_t{gridDim.x} * kDeltaThreads) {
    p.flag[i] = 0;
  }
  if (rows <= 0) return;
  const int tiles = (rows + kDeltaTile - 1) / kDeltaTile;
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;

  copy_wide(shared.k, p.k, first, rows, p.key_heads, key_head);
  copy_wide(shared.q, p.q, first, rows, p.key_heads, key_head);
  if (warp == 0) copy_gates(p, shared.raw_gates, first, rows, value_head);
  copy_async_commit();
  DeltaWork* work = static_cast<DeltaWork*>(p.work) + int64_t{first_tile} * p.value_heads + value_head;
  copy_async_wait<0>();
  if (warp == 0) store_gates(shared.raw_gates[lane], shared.gates);
  __syncthreads();

  const DeltaChunk chunk(shared, work, p.value_heads, tiles);
  chunk.scores_and_diagonal();
  __syncthreads();
  // v in q's place.
  const bf16* v = static_cast<const bf16*>(p.v) + (int64_t{first} * p.value_heads + value_head) * kDeltaDim;
  constexpr int kPieces = kDeltaDim / kVector;
  const int piece = threadIdx.x % kPieces;
  for (int row = threadIdx.x / kPieces; row < tiles * kDeltaTile; row += kDeltaThreads / kPieces) {
    const bool real = row < rows;
    const unsigned tile = piece / 2 * kDeltaTiles + row / kDeltaTile;
    copy_async(shared_address(shared.v) + tile * kSmallTile + small_offset(row % kDeltaTile, piece % 2),
               v + (real ? row : 0) * int64_t{p.value_heads} * kDeltaDim + piece * kVector, real);
  }
  copy_async_commit();
  if (threadIdx.x < tiles * kDeltaTile) {
    const int row = threadIdx.x % kDeltaTile;
    DeltaWork* of_tile = chunk.work(threadIdx.x / kDeltaTile);
    of_tile->since_start[row] = shared.gates.since_start[threadIdx.x];
    of_tile->to_end[row] = shared.gates.to_end[threadIdx.x];
  }
  chunk.merge();
  __syncthreads();
  chunk.project_keys();
  copy_async_wait<0>();
  __syncthreads();
  chunk.project_values();
}

// Of one node, value head and slice of the value columns.
struct DeltaState {
  const DeltaRule& p;
  DeltaStateShared& shared;
  TileOffsets offsets;
  unsigned lane, warp;
  int value_head, slice;
  // state[2 s + h]: key columns 16 s + 8 h + 2 (lane % 4) and the next, of value rows lane / 4 and lane / 4 + 8.
  float state[2 * kDeltaSteps][4];

  __device__ __forceinline__ DeltaState(const DeltaRule& p, DeltaStateShared& shared, int value_head,
                                        int slice)
      : p(p),
        shared(shared),
        offsets(threadIdx.x % kWarp),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        value_head(value_head),
        slice(slice) {}

  // The warp's part of a slot: 16 float4 a lane, and one flag.
  __device__ __forceinline__ int64_t part(int slot) const {
    return ((int64_t{slot} * p.value_heads + value_head) * kDeltaSlices + slice) * kDeltaWarps + warp;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state[i][j] = 0.0f;
    }
  }

  __device__ __forceinline__ void await(int slot) {
    if (lane == 0) {
      while (load_acquire(p.flag + part(slot)) == 0) __nanosleep(32);
    }
    __syncwarp();
    const float4* from = reinterpret_cast<const float4*>(p.state) + part(slot) * 2 * kDeltaSteps * kWarp;
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
      const float4 x = __ldcg(from + i * kWarp + lane);
      state[i][0] = x.x;
      state[i][1] = x.y;
      state[i][2] = x.z;
      state[i][3] = x.w;
    }
  }

  // The lane's first element of a kept slot: its value row, two key columns.
  __device__ __forceinline__ float* kept(int slot) const {
    const int64_t row = (int64_t{slot} * p.value_heads + value_head) * kDeltaDim + slice * kDeltaWidth +
                        warp * kDeltaTile + lane / 4;
    return p.kept + row * kDeltaDim + lane % 4 * 2;
  }

  __device__ __forceinline__ void load_kept(int slot) {
    const float* from = kept(slot);
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
      const float2 upper = load_two(from + i * 8), lower = load_two(from + 8 * kDeltaDim + i * 8);
      state[i][0] = upper.x;
      state[i][1] = upper.y;
      state[i][2] = lower.x;
      state[i][3] = lower.y;
    }
  }

  __device__ __forceinline__ void store_kept(int slot) const {
    float* to = kept(slot);
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
      *reinterpret_cast<float2*>(to + i * 8) = make_float2(state[i][0], state[i][1]);
      *reinterpret_cast<float2*>(to + 8 * kDeltaDim + i * 8) = make_float2(state[i][2], state[i][3]);
    }
  }

  __device__ __forceinline__ void leave(int slot) const {
    float4* to = reinterpret_cast<float4*>(p.state) + part(slot) * 2 * kDeltaSteps * kWarp;
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
      to[i * kWarp + lane] = make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) store_release(p.flag + part(slot), 1);
  }

  // Copies what the first kernel left of a chunk.
  __device__ __forceinline__ void copy_work(int first_tile, int tiles) const {
    for (int tile = 0; tile < tiles; ++tile) {
      const DeltaWork& work =
          static_cast<const DeltaWork*>(p.work)[int64_t{first_tile + tile} * p.value_heads + value_head];
#pragma unroll
      for (int i = 0; i < kDeltaSteps; i += kDeltaWarps) {
        copy_async(shared_address(&shared.w[tile][i + warp][lane]), &work.w[i + warp][lane], true);
      }
      copy_async(shared_address(&shared.u[tile][warp][lane]), &work.u[slice * kDeltaWarps + warp][lane],
                 true);
      if (warp <= tile)
        copy_async(shared_address(&shared.weights[tile][warp][lane]), &work.weights[warp][lane], true);
      constexpr int kPieces = sizeof(shared.gates[0]) / 16;
      if (threadIdx.x < kPieces) {
        copy_async(shared_address(&shared.gates[tile]) + threadIdx.x * 16, work.since_start + threadIdx.x * 4,
                   true);
      }
    }
  }

  // v_new and o of kCount tiles from `tile` on, transposed: value columns by chunk rows. v_new as a operands; scaled
  // by exp(G_last - G) it takes the place of u. `out` is of the tile's first row, value head and the lane's columns.
  template <int kCount>
  __device__ __forceinline__ void read(int tile, bool zero_state, unsigned (&v_new)[kDeltaTiles][4], int rows,
                                       bf16* out_rows) const {
    float ws[kCount][2][4] = {}, out[kCount][2][4] = {};
    if (!zero_state) {
      const unsigned q = shared_address(shared.q) + tile * kWideTile + offsets.wide_columns;
#pragma unroll
      for (int step = 0; step < kDeltaSteps; ++step) {
        unsigned a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[4] = state[2 * step + i / 2];
          a[i] = pack_pair_here(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const uint4 b = shared.w[tile + i][step][lane];
          unsigned c[4];
          load_matrices(c, at_step(q + i * kWideTile, step));
          mma_16x8x16(ws[i][0], a[0], a[1], a[2], a[3], b.x, b.y);
          mma_16x8x16(ws[i][1], a[0], a[1], a[2], a[3], b.z, b.w);
          mma_16x8x16(out[i][0], a[0], a[1], a[2], a[3], c[0], c[1]);
          mma_16x8x16(out[i][1], a[0], a[1], a[2], a[3], c[2], c[3]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 u_tile = shared.u[tile + i][warp][lane];
      const unsigned u[4] = {u_tile.x, u_tile.y, u_tile.z, u_tile.w};
      unsigned scaled[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 8 * half + lane % 4 * 2;
        const float2 since_start = load_two(shared.gates[tile + i].since_start + row);
        const float2 to_end = load_two(shared.gates[tile + i].to_end + row);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned pair = u[2 * half + j];
          const float x = low_half(pair) - ws[i][half][2 * j], y = high_half(pair) - ws[i][half][2 * j + 1];
          v_new[tile + i][2 * half + j] = pack_pair(x, y);
          scaled[2 * half + j] = pack_pair(x * to_end.x, y * to_end.y);
          out[i][half][2 * j] *= since_start.x;
          out[i][half][2 * j + 1] *= since_start.y;
        }
      }
      shared.u[tile + i][warp][lane] = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int at = 0; at <= tile + i; ++at) {
        const unsigned (&a)[4] = v_new[at];
        const uint4 b = shared.weights[tile + i][at][lane];
        mma_16x8x16(out[i][0], a[0], a[1], a[2], a[3], b.x, b.y);
        mma_16x8x16(out[i][1], a[0], a[1], a[2], a[3], b.z, b.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (tile + i) * kDeltaTile + 8 * half + lane / 4;
        bf16* to = out_rows + int64_t{row} * p.value_heads * kDeltaDim;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const unsigned pair =
              transpose_matrix(pack_pair(out[i][half][2 * j] * p.scale, out[i][half][2 * j + 1] * p.scale));
          if (row < rows) *reinterpret_cast<unsigned*>(to + 8 * j) = pair;
        }
      }
    }
  }

  // S <- exp(G_last) S + k^T (v_new exp(G_last - G)), `scaled` being the latter.
  __device__ __forceinline__ void write(const uint4 (&scaled)[kDeltaTiles], float decay, int tiles) {
#pragma unroll
    for (int i = 0; i < 2 * kDeltaSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state[i][j] *= decay;
    }
    const unsigned k = shared_address(shared.k) + offsets.wide_rows;
#pragma unroll
    for (int tile = 0; tile < kDeltaTiles; ++tile) {
      if (tile >= tiles) break;
      const uint4 a = scaled[tile];
#pragma unroll
      for (int step = 0; step < kDeltaSteps; ++step) {
        unsigned b[4];
        load_matrices_transposed(b, at_step(k + tile * kWideTile, step));
        mma_16x8x16(state[2 * step], a.x, a.y, a.z, a.w, b[0], b[1]);
        mma_16x8x16(state[2 * step + 1], a.x, a.y, a.z, a.w, b[2], b[3]);
      }
    }
  }
};

// A block computes kDeltaWidth value columns of one node and value head: index = (node HV + head) slices + slice.
// kKept: there are kept states.
template <bool kKept>
__global__ void __launch_bounds__(kDeltaThreads, 3) delta_state_kernel(DeltaRule p) {
  extern __shared__ __align__(128) unsigned char delta_shared[];
  auto& shared = *reinterpret_cast<DeltaStateShared*>(delta_shared);
  const int slice = blockIdx.x % kDeltaSlices, value_head = blockIdx.x / kDeltaSlices % p.value_heads;
  const int key_head = value_head / (p.value_heads / p.key_heads);
  const int4* entry = reinterpret_cast<const int4*>(p.node) + blockIdx.x / kDeltaSlices / p.value_heads * 2;
  const int4 node = entry[0];
  const int4 more_of_node = entry[1];
  const int first_tile = more_of_node.x, length = node.y, source = node.z, target = node.w;
  const int kept_source = kKept ? more_of_node.y : 0, kept_target = kKept ? more_of_node.z : 0;
  if (length <= 0) return;

  DeltaState state(p, shared, value_head, slice);
  const auto copy = [&](int start) {
    const int rows = min(length - start, kDeltaChunk);
    state.copy_work(first_tile + start / kDeltaTile, (rows + kDeltaTile - 1) / kDeltaTile);
    copy_wide(shared.q, p.q, int64_t{node.x} + start, rows, p.key_heads, key_head);
    copy_async_commit();
  };
  const auto copy_keys = [&](int start) {
    const int rows = min(length - start, kDeltaChunk);
    copy_wide(shared.k, p.k, int64_t{node.x} + start, rows, p.key_heads, key_head);
    copy_async_commit();
  };
  copy(0);
  copy_keys(0);
  if (source >= 0) {
    state.await(source);
  } else if (kKept && kept_source > 0) {
    state.load_kept(kept_source - 1);
  } else {
    state.clear();
  }

  for (int start = 0; start < length; start += kDeltaChunk) {
    const int rows = min(length - start, kDeltaChunk), tiles = (rows + kDeltaTile - 1) / kDeltaTile;
    const bool zero_state = start == 0 && source < 0 && kept_source == 0;
    copy_async_wait<1>();
    __syncthreads();

    unsigned v_new[kDeltaTiles][4];
    const int64_t row = int64_t{node.x} + start;
    bf16* out = static_cast<bf16*>(p.out) + (row * p.value_heads + value_head) * kDeltaDim +
                slice * kDeltaWidth + state.warp * kDeltaTile + state.lane % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < kDeltaTiles; tile += 2) {
      if (tile + 1 < tiles) {
        state.read<2>(tile, zero_state, v_new, rows, out);
      } else if (tile < tiles) {
        state.read<1>(tile, zero_state, v_new, rows, out);
      }
    }

    // The state after the chunk, where somebody reads it; what the next chunk needs comes meanwhile.
    const bool more = start + kDeltaChunk < length;
    if (!more && target < 0 && kept_target == 0) return;
    const float decay = shared.gates[tiles - 1].since_start[kDeltaTile - 1];
    uint4 scaled[kDeltaTiles];
#pragma unroll
    for (int tile = 0; tile < kDeltaTiles; ++tile) scaled[tile] = shared.u[tile][state.warp][state.lane];
    copy_async_wait<0>();
    __syncthreads();
    if (more) copy(start + kDeltaChunk);
    state.write(scaled, decay, tiles);
    if (more) {
      __syncthreads();
      copy_keys(start + kDeltaChunk);
    }
  }
  if (!kKept || target >= 0) state.leave(target);
  if (kKept && kept_target > 0) state.store_kept(kept_target - 1);
}

}  // namespace openjev_fast
