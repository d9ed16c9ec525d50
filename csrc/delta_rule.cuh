// Computes, per value head and along every path of a forest: S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, o =
//   scale S^T q, in chunks of 64 rows from a node's first row. Matches chunk_gated_delta_rule (fla-core 0.5.2,
//   fla.ops.gated_delta_rule).
// Shapes: q, k [N, H, 128], v, out [N, HV, 128], g, beta [N, HV], node [K, 4] (first row, rows, slot the state
//   comes from or -1, slot it goes to or -1), all contiguous; value head h uses key head h / (HV / H). state
//   [slots, HV, 128, 128] in the order of the registers, flag [slots, HV, 8] zeros; out, state and flag are written
//   and alias nothing. Rows of no node are neither read nor written.
// Dtypes: q, k, v, out bfloat16; g, beta, state float32; node, flag int32; every sum float32.
// Rounding points: T = (I + beta k k^T decay)^-1 to bfloat16; v beta, k beta, (k beta) exp(G), u = T (v beta), w = T
//   (k beta exp(G)) to bfloat16; the state where it enters a product; v_new = u - w S and v_new exp(G_last - G) to
//   bfloat16, each from float32; q k^T decay to bfloat16; o. T is solved in float32: 16x16 diagonal tiles by
//   substitution, the rest by products of tf32 pairs (high high + high low + low high). G is a float32 prefix sum
//   in log2 units, by pairs and then shuffles; exponentials are ex2.approx (2 ulp, denormals to zero).
// Limits and launch: K = V = 128, K HV < 2^30; 16-byte aligned pointers. Two blocks of 128 threads for a node and
//   value head, 64 value columns each; a warp owns 16 columns of the state in registers. Blocks wait, by flags, for
//   their parent's state, and rely on blocks starting in order of their index, parents first. 71,168 bytes of
//   shared memory, 112,128 with prefetched chunks; 64-bit addresses; no spills; sm_80; graph-safe.
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
// Depth steps of a product over the key dim, tiles in a lower triangle of tiles.
constexpr int kDeltaSteps = kDeltaDim / kDeltaTile;
constexpr int kDeltaTriangle = kDeltaTiles * (kDeltaTiles + 1) / 2;
constexpr int kDeltaWarps = 4;
constexpr int kDeltaThreads = kDeltaWarps * kWarp;
// Value columns of a block; blocks of a value head.
constexpr int kDeltaWidth = kDeltaWarps * kDeltaTile;
constexpr int kDeltaSlices = kDeltaDim / kDeltaWidth;
// Bytes of a row of 128 bfloat16, of a tile of such rows, and of a 16x16 tile stored for itself.
constexpr unsigned kWideRow = kDeltaDim * sizeof(bf16);
constexpr unsigned kWideTile = kDeltaTile * kWideRow;
constexpr unsigned kSmallRow = kDeltaTile * sizeof(bf16);
constexpr unsigned kSmallTile = kDeltaTile * kSmallRow;
// Floats of a row of the matrix that is inverted: no two lanes of a fragment's rows share a bank.
constexpr int kSolveStride = kDeltaChunk + 4;

// Of one chunk: G in log2 units, exp(G), exp(G_last - G), beta.
struct DeltaGates {
  float sum[kDeltaChunk];
  float since_start[kDeltaChunk];
  float to_end[kDeltaChunk];
  float beta[kDeltaChunk];
};

// 16-byte pieces are swizzled: those of rows 128 wide by the row's number modulo 8, those of 16x16 tiles by its
// third bit.
template <int kStages>
struct DeltaShared {
  bf16 k[kStages][kDeltaChunk * kDeltaDim];
  bf16 q[kStages][kDeltaChunk * kDeltaDim];
  // A warp's 16 columns together, in tiles; later its v_new exp(G_last - G), in fragments.
  bf16 v[kStages][kDeltaWarps][kDeltaChunk * kDeltaTile];
  union {
    float solve[kDeltaChunk * kSolveStride];
    bf16 w[kDeltaChunk * kDeltaDim];
  };
  // Lower triangles, in tiles.
  bf16 inverse[kDeltaTriangle * kDeltaTile * kDeltaTile];
  bf16 weights[kDeltaTriangle * kDeltaTile * kDeltaTile];
  // g and beta as they come, each lane of the first warp its two rows.
  float4 raw_gates[kWarp];
  DeltaGates gates[2];
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

// d += a b for 16x16 tiles of float32 in shared memory, operands as pairs of tf32.
__device__ __forceinline__ void multiply_tiles(float (&d)[2][4], const float* a, const float* b,
                                               unsigned lane) {
  const unsigned group = lane / 4, member = lane % 4;
#pragma unroll
  for (int depth = 0; depth < kDeltaTile; depth += 8) {
    unsigned a_high[4], a_low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = a[(group + i % 2 * 8) * kSolveStride + depth + member + i / 2 * 4];
      a_high[i] = to_tf32(x);
      a_low[i] = to_tf32(x - __uint_as_float(a_high[i]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned b_high[2], b_low[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = b[(depth + member + i * 4) * kSolveStride + half * 8 + group];
        b_high[i] = to_tf32(x);
        b_low[i] = to_tf32(x - __uint_as_float(b_high[i]));
      }
      mma_16x8x8_tf32(d[half], a_low, b_high[0], b_high[1]);
      mma_16x8x8_tf32(d[half], a_high, b_low[0], b_low[1]);
      mma_16x8x8_tf32(d[half], a_high, b_high[0], b_high[1]);
    }
  }
}

// A tile's accumulators to float32 rows, or to a bfloat16 tile.
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

// One chunk's work of all warps before the state is needed. `tiles` 16-row tiles hold the chunk's rows.
template <int kStages>
struct DeltaChunk {
  DeltaShared<kStages>& shared;
  const DeltaGates& gates;
  unsigned k, q, v;
  TileOffsets offsets;
  unsigned lane, warp;
  int tiles;

  __device__ __forceinline__ DeltaChunk(DeltaShared<kStages>& shared, int stage, int parity, int tiles)
      : shared(shared),
        gates(shared.gates[parity]),
        k(shared_address(shared.k[stage])),
        q(shared_address(shared.q[stage])),
        v(shared_address(shared.v[stage][threadIdx.x / kWarp])),
        offsets(threadIdx.x % kWarp),
        lane(threadIdx.x % kWarp),
        warp(threadIdx.x / kWarp),
        tiles(tiles) {}

  __device__ __forceinline__ float* solve_tile(int row_tile, int column_tile) const {
    return shared.solve + (row_tile * kSolveStride + column_tile) * kDeltaTile;
  }

  // k k^T and q k^T of one tile, with decay: the first to `solve`, the second to `weights`.
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
    store_small_tile(shared.weights + triangle(row_tile, column_tile) * (kDeltaTile * kDeltaTile), qk, 1.0f,
                     lane);
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

  // w = T (k beta exp(G)); a warp computes 32 columns, 16 after 16 for want of registers.
  __device__ __forceinline__ void project_keys() const {
    const unsigned inverse = shared_address(shared.inverse) + offsets.small_rows;
    char* target = reinterpret_cast<char*>(shared.w) + lane % 4 * 4;
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const unsigned row = row_tile * kDeltaTile + lane / 4 + i % 2 * 8, piece = 2 * step + i / 2;
          *reinterpret_cast<unsigned*>(target + wide_offset(row, piece)) =
              pack_pair(w[i / 2][i % 2 * 2], w[i / 2][i % 2 * 2 + 1]);
        }
      }
    }
  }

  // u = T (v beta), transposed, of the warp's 16 columns, as a operands 16 rows deep.
  __device__ __forceinline__ void project_values(unsigned (&u)[kDeltaTiles][4]) const {
    const unsigned inverse = shared_address(shared.inverse) + offsets.small_columns;
    unsigned a[kDeltaTiles][4];
#pragma unroll
    for (int row_tile = 0; row_tile < kDeltaTiles; ++row_tile) {
      if (row_tile >= tiles) break;
      load_matrices_transposed(a[row_tile], v + row_tile * kSmallTile + offsets.small_columns);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 beta = load_two(gates.beta + row_tile * kDeltaTile + 8 * half + lane % 4 * 2);
        a[row_tile][2 * half] = scale_pair(a[row_tile][2 * half], beta);
        a[row_tile][2 * half + 1] = scale_pair(a[row_tile][2 * half + 1], beta);
      }
      float sum[2][4] = {};
#pragma unroll
      for (int tile = 0; tile <= row_tile; ++tile) {
        unsigned b[4];
        load_matrices(b, inverse + triangle(row_tile, tile) * kSmallTile);
        mma_16x8x16(sum[0], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b[0], b[1]);
        mma_16x8x16(sum[1], a[tile][0], a[tile][1], a[tile][2], a[tile][3], b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i)
        u[row_tile][i] = pack_pair(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
    }
  }
};

// Copies a chunk's rows and gates to shared memory, zeros up to the end of its last tile.
template <int kStages>
__device__ __forceinline__ void copy_chunk(const DeltaRule& p, DeltaShared<kStages>& shared, int stage,
                                           int64_t first, int rows, int value_head, int slice) {
  const int key_head = value_head / (p.value_heads / p.key_heads);
  const int padded = (rows + kDeltaTile - 1) / kDeltaTile * kDeltaTile;
  const bf16* k = static_cast<const bf16*>(p.k) + (first * p.key_heads + key_head) * kDeltaDim;
  const bf16* q = static_cast<const bf16*>(p.q) + (first * p.key_heads + key_head) * kDeltaDim;
  const bf16* v =
      static_cast<const bf16*>(p.v) + (first * p.value_heads + value_head) * kDeltaDim + slice * kDeltaWidth;
  const unsigned to_k = shared_address(shared.k[stage]), to_q = shared_address(shared.q[stage]);
  const unsigned to_v = shared_address(shared.v[stage]);

  constexpr int kPieces = kDeltaDim / kVector, kValuePieces = kDeltaWidth / kVector;
  const int piece = threadIdx.x % kPieces;
  for (int row = threadIdx.x / kPieces; row < padded; row += kDeltaThreads / kPieces) {
    const bool real = row < rows;
    const int64_t source = (real ? row : 0) * int64_t{p.key_heads} * kDeltaDim + piece * kVector;
    copy_async(to_k + wide_offset(row, piece), k + source, real);
    copy_async(to_q + wide_offset(row, piece), q + source, real);
  }
  const int value_piece = threadIdx.x % kValuePieces;
  for (int row = threadIdx.x / kValuePieces; row < padded; row += kDeltaThreads / kValuePieces) {
    const bool real = row < rows;
    const int64_t source = (real ? row : 0) * int64_t{p.value_heads} * kDeltaDim + value_piece * kVector;
    const unsigned tile = value_piece / 2 * kDeltaTiles + row / kDeltaTile;
    copy_async(to_v + tile * kSmallTile + small_offset(row % kDeltaTile, value_piece % 2), v + source, real);
  }
  if (threadIdx.x < kWarp) {
    const unsigned to_gates = shared_address(shared.raw_gates + threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * threadIdx.x + i;
      const int64_t source = (first + (row < rows ? row : 0)) * p.value_heads + value_head;
      copy_async_word(to_gates + 4 * i, p.g + source, row < rows);
      copy_async_word(to_gates + 8 + 4 * i, p.beta + source, row < rows);
    }
  }
  copy_async_commit();
}

// A chunk's gates from what copy_chunk brought for this thread; the first warp calls it.
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

// A block computes kDeltaWidth value columns of one node and value head: index = (node HV + head) slices + slice.
// Three blocks fit a multiprocessor's registers, two its shared memory where chunks are prefetched.
template <int kStages>
__global__ void __launch_bounds__(kDeltaThreads, kStages == 1 ? 3 : 2) delta_rule_kernel(DeltaRule p) {
  extern __shared__ __align__(128) unsigned char delta_shared[];
  auto& shared = *reinterpret_cast<DeltaShared<kStages>*>(delta_shared);
  const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int slice = blockIdx.x % kDeltaSlices, value_head = blockIdx.x / kDeltaSlices % p.value_heads;
  const int4 node = reinterpret_cast<const int4*>(p.node)[blockIdx.x / kDeltaSlices / p.value_heads];
  const int length = node.y, source = node.z, target = node.w;
  if (length <= 0) return;
  // The warp's part of a slot: 16 float4 a lane, and one flag.
  const auto part = [&](int slot) {
    return ((int64_t{slot} * p.value_heads + value_head) * kDeltaSlices + slice) * kDeltaWarps + warp;
  };

  copy_chunk(p, shared, 0, node.x, min(length, kDeltaChunk), value_head, slice);

  // state[2 s + h]: key columns 16 s + 8 h + 2 (lane % 4) and the next, of value rows lane / 4 and lane / 4 + 8.
  float state[2 * kDeltaSteps][4];
#pragma unroll
  for (int i = 0; i < 2 * kDeltaSteps; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) state[i][j] = 0.0f;
  }

  for (int start = 0; start < length; start += kDeltaChunk) {
    const int rows = min(length - start, kDeltaChunk), tiles = (rows + kDeltaTile - 1) / kDeltaTile;
    const int parity = start / kDeltaChunk % 2, stage = kStages == 2 ? parity : 0;
    const int next = start + kDeltaChunk, next_rows = min(length - next, kDeltaChunk);
    copy_async_wait<0>();
    if (warp == 0) store_gates(shared.raw_gates[lane], shared.gates[parity]);
    __syncthreads();
    if (kStages == 2 && next_rows > 0) {
      copy_chunk(p, shared, 1 - stage, int64_t{node.x} + next, next_rows, value_head, slice);
    }

    // Work that needs no state.
    const DeltaChunk<kStages> chunk(shared, stage, parity, tiles);
    const DeltaGates& gates = chunk.gates;
    chunk.scores_and_diagonal();
    __syncthreads();
    chunk.merge();
    __syncthreads();
    chunk.project_keys();
    // u, then v_new in its place.
    unsigned v_new[kDeltaTiles][4];
    chunk.project_values(v_new);
    __syncthreads();

    // The parent's state.
    if (start == 0 && source >= 0) {
      const int32_t* flag = p.flag + part(source);
      if (lane == 0) {
        while (load_acquire(flag) == 0) __nanosleep(32);
      }
      __syncwarp();
      const float4* from = reinterpret_cast<const float4*>(p.state) + part(source) * 2 * kDeltaSteps * kWarp;
#pragma unroll
      for (int i = 0; i < 2 * kDeltaSteps; ++i) {
        const float4 x = __ldcg(from + i * kWarp + lane);
        state[i][0] = x.x;
        state[i][1] = x.y;
        state[i][2] = x.z;
        state[i][3] = x.w;
      }
    }
    const bool zero_state = start == 0 && source < 0;

    // v_new and o, transposed: value columns by chunk rows, a tile of rows after the other.
    const unsigned w = shared_address(shared.w) + chunk.offsets.wide_columns;
    const unsigned q = chunk.q + chunk.offsets.wide_columns;
    const unsigned weights = shared_address(shared.weights) + chunk.offsets.small_columns;
    uint4* scaled = reinterpret_cast<uint4*>(shared.v[stage][warp]) + lane;
    __syncwarp();
#pragma unroll
    for (int tile = 0; tile < kDeltaTiles; ++tile) {
      if (tile >= tiles) break;
      float ws[2][4] = {}, out[2][4] = {};
      if (!zero_state) {
#pragma unroll
        for (int step = 0; step < kDeltaSteps; ++step) {
          unsigned b[4], c[4];
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float (&pair)[4] = state[2 * step + i / 2];
            a[i] = pack_pair_here(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
          }
          load_matrices(b, at_step(w + tile * kWideTile, step));
          load_matrices(c, at_step(q + tile * kWideTile, step));
          mma_16x8x16(ws[0], a[0], a[1], a[2], a[3], b[0], b[1]);
          mma_16x8x16(ws[1], a[0], a[1], a[2], a[3], b[2], b[3]);
          mma_16x8x16(out[0], a[0], a[1], a[2], a[3], c[0], c[1]);
          mma_16x8x16(out[1], a[0], a[1], a[2], a[3], c[2], c[3]);
        }
      }
      uint4 scaled_tile;
      unsigned* scaled_pair = &scaled_tile.x;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * kDeltaTile + 8 * half + lane % 4 * 2;
        const float2 since_start = load_two(gates.since_start + row), to_end = load_two(gates.to_end + row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unsigned& pair = v_new[tile][2 * half + i];
          const float x = low_half(pair) - ws[half][2 * i], y = high_half(pair) - ws[half][2 * i + 1];
          pair = pack_pair(x, y);
          scaled_pair[2 * half + i] = pack_pair(x * to_end.x, y * to_end.y);
          out[half][2 * i] *= since_start.x;
          out[half][2 * i + 1] *= since_start.y;
        }
      }
      scaled[tile * kWarp] = scaled_tile;
#pragma unroll
      for (int at = 0; at <= tile; ++at) {
        unsigned b[4];
        const unsigned (&a)[4] = v_new[at];
        load_matrices(b, weights + triangle(tile, at) * kSmallTile);
        mma_16x8x16(out[0], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_16x8x16(out[1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile * kDeltaTile + 8 * half + lane / 4;
        const int64_t at = (int64_t{node.x} + start + row) * p.value_heads + value_head;
        bf16* to = static_cast<bf16*>(p.out) + at * kDeltaDim + slice * kDeltaWidth + warp * kDeltaTile +
                   lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned pair =
              transpose_matrix(pack_pair(out[half][2 * i] * p.scale, out[half][2 * i + 1] * p.scale));
          if (row < rows) *reinterpret_cast<unsigned*>(to + 8 * i) = pair;
        }
      }
    }

    // The state after the chunk, where somebody reads it.
    if (next_rows > 0 || target >= 0) {
      const float decay = gates.since_start[kDeltaChunk - 1];
#pragma unroll
      for (int i = 0; i < 2 * kDeltaSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) state[i][j] *= decay;
      }
      const unsigned k = chunk.k + chunk.offsets.wide_rows;
#pragma unroll
      for (int tile = 0; tile < kDeltaTiles; ++tile) {
        if (tile >= tiles) break;
        const uint4 a = scaled[tile * kWarp];
#pragma unroll
        for (int step = 0; step < kDeltaSteps; ++step) {
          unsigned b[4];
          load_matrices_transposed(b, at_step(k + tile * kWideTile, step));
          mma_16x8x16(state[2 * step], a.x, a.y, a.z, a.w, b[0], b[1]);
          mma_16x8x16(state[2 * step + 1], a.x, a.y, a.z, a.w, b[2], b[3]);
        }
      }
    }
    if (kStages == 1 && next_rows > 0) {
      __syncthreads();
      copy_chunk(p, shared, 0, int64_t{node.x} + next, next_rows, value_head, slice);
    }
  }

  if (target < 0) return;
  float4* to = reinterpret_cast<float4*>(p.state) + part(target) * 2 * kDeltaSteps * kWarp;
#pragma unroll
  for (int i = 0; i < 2 * kDeltaSteps; ++i) {
    to[i * kWarp + lane] = make_float4(state[i][0], state[i][1], state[i][2], state[i][3]);
  }
  __threadfence();
  __syncwarp();
  if (lane == 0) store_release(p.flag + part(target), 1);
}

}  // namespace openjev_fast
