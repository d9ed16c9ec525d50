// Hopper's warpgroup products, bulk tensor copies and transaction barriers as functions. Holds no kernel; used
// only in code for sm_90a.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common.cuh"
#include "mma.cuh"

namespace openjev_fast {

// Tiles of 64 bfloat16 columns lie in shared memory as the copies write them: 8 rows of 128 bytes, whose 16-byte
// chunks are exchanged by exclusive or with the row. A multiplicand is made of such tiles: `leading` and `stride`
// are the bytes between them, along its outer dimension for columns that are summed over (leading is not used),
// and along columns and along rows for rows that are summed over.
__device__ __forceinline__ uint64_t tile_descriptor(unsigned address, unsigned leading, unsigned stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t{stride >> 4} << 32 | uint64_t{leading >> 4} << 16 | (address & 0x3ffff) >> 4;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most kPending of the newest committed groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of `x` across a wait.
template <int kCount>
__device__ __forceinline__ void wgmma_settle(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

#define OPENJEV_D8(d, i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define OPENJEV_D4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPENJEV_D32(d, i) OPENJEV_D8(d, i), OPENJEV_D8(d, i + 8), OPENJEV_D8(d, i + 16), OPENJEV_D8(d, i + 24)

// d += a b for 64 rows and 256 columns, 16 deep; a as mma_16x8x16 takes it, b by descriptor, its rows summed
// over.
__device__ __forceinline__ void wgmma_64x256x16(float (&d)[128], unsigned a0, unsigned a1, unsigned a2,
                                                unsigned a3, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
      : OPENJEV_D32(d, 0), OPENJEV_D32(d, 32), OPENJEV_D32(d, 64), OPENJEV_D32(d, 96)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(1));
}

// d (+)= a b for 64 rows of the warpgroup and kColumns columns, 16 deep; both multiplicands by descriptor, their
// columns summed over. A warp holds 16 rows; values 4 j to 4 j + 3 of a lane are those of mma_16x8x16 for columns
// from 8 j.
template <int kColumns>
__device__ __forceinline__ void wgmma_tile(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool add);

// Operands by number, in runs that tiles of all widths are made of.
#define OPENJEV_R0_15                \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define OPENJEV_R16_19 ", %16, %17, %18, %19"
#define OPENJEV_R20_23 ", %20, %21, %22, %23"
#define OPENJEV_R24_31 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define OPENJEV_R32_39 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define OPENJEV_R40_47 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define OPENJEV_R48_55 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define OPENJEV_R56_63 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define OPENJEV_R64_67 ", %64, %65, %66, %67"

// `first` is the number of the operand after d.
#define OPENJEV_WGMMA_TILE(columns, operands, first, second, third, ...)                                   \
  template <>                                                                                              \
  __device__ __forceinline__ void wgmma_tile<columns>(float (&d)[columns / 2], uint64_t a, uint64_t b,     \
                                                      bool add) {                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #third                                               \
                 ", 0;\n"                                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" operands "}, %" #first \
                 ", %" #second ", p, 1, 1, 0, 0;\n}\n"                                                     \
                 : __VA_ARGS__                                                                             \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                            \
  }

OPENJEV_WGMMA_TILE(40, OPENJEV_R0_15 OPENJEV_R16_19, 20, 21, 22, OPENJEV_D8(d, 0), OPENJEV_D8(d, 8),
                   OPENJEV_D4(d, 16))
OPENJEV_WGMMA_TILE(48, OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23, 24, 25, 26, OPENJEV_D8(d, 0),
                   OPENJEV_D8(d, 8), OPENJEV_D8(d, 16))
OPENJEV_WGMMA_TILE(64, OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23 OPENJEV_R24_31, 32, 33, 34,
                   OPENJEV_D32(d, 0))
OPENJEV_WGMMA_TILE(80, OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23 OPENJEV_R24_31 OPENJEV_R32_39, 40, 41, 42,
                   OPENJEV_D32(d, 0), OPENJEV_D8(d, 32))
OPENJEV_WGMMA_TILE(96,
                   OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23 OPENJEV_R24_31 OPENJEV_R32_39 OPENJEV_R40_47,
                   48, 49, 50, OPENJEV_D32(d, 0), OPENJEV_D8(d, 32), OPENJEV_D8(d, 40))
OPENJEV_WGMMA_TILE(112,
                   OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23 OPENJEV_R24_31 OPENJEV_R32_39 OPENJEV_R40_47
                       OPENJEV_R48_55,
                   56, 57, 58, OPENJEV_D32(d, 0), OPENJEV_D8(d, 32), OPENJEV_D8(d, 40), OPENJEV_D8(d, 48))
OPENJEV_WGMMA_TILE(136,
                   OPENJEV_R0_15 OPENJEV_R16_19 OPENJEV_R20_23 OPENJEV_R24_31 OPENJEV_R32_39 OPENJEV_R40_47
                       OPENJEV_R48_55 OPENJEV_R56_63 OPENJEV_R64_67,
                   68, 69, 70, OPENJEV_D32(d, 0), OPENJEV_D32(d, 32), OPENJEV_D4(d, 64))

#undef OPENJEV_WGMMA_TILE
#undef OPENJEV_R0_15
#undef OPENJEV_R16_19
#undef OPENJEV_R20_23
#undef OPENJEV_R24_31
#undef OPENJEV_R32_39
#undef OPENJEV_R40_47
#undef OPENJEV_R48_55
#undef OPENJEV_R56_63
#undef OPENJEV_R64_67
#undef OPENJEV_D32
#undef OPENJEV_D8
#undef OPENJEV_D4

// Barriers in shared memory, by address.
__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to copies.
__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only after so many more bytes were copied.
__device__ __forceinline__ void barrier_arrive_expecting(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copies one box of a tensor of four dimensions, innermost coordinate first; zeros outside the tensor.
__device__ __forceinline__ void copy_box(unsigned target, const CUtensorMap& map, unsigned barrier, int c0,
                                         int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
      "%6}], [%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// Copies one box of a tensor of two dimensions that is read once.
__device__ __forceinline__ void copy_once(unsigned target, const CUtensorMap& map, unsigned barrier, int c0,
                                          int c1) {
  asm volatile(
      "{\n.reg .b64 once;\ncreatepolicy.fractional.L2::evict_first.b64 once, 1.0;\n"
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%3, %4}], [%2], once;\n}\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

// Copies one box of a tensor of two dimensions.
__device__ __forceinline__ void copy_box(unsigned target, const CUtensorMap& map, unsigned barrier, int c0,
                                         int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
      "[%2];\n" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

// The barrier of a cluster, in which every thread of every block takes part; what one wrote before it arrived is
// visible to those that have waited.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
}

// The address in a block of the cluster of what lies at `address` in this one.
__device__ __forceinline__ unsigned cluster_address(unsigned address, int rank) {
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ __forceinline__ void store_to_cluster(unsigned there, float x) {
  asm volatile("st.shared::cluster.f32 [%0], %1;\n" ::"r"(there), "f"(x) : "memory");
}

// Orders this thread's earlier shared memory accesses before later ones of products and copies.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// Barrier of one warpgroup; numbers 1 to 15.
__device__ __forceinline__ void warpgroup_sync(int number) {
  asm volatile("bar.sync %0, 128;\n" ::"r"(number) : "memory");
}

}  // namespace openjev_fast
