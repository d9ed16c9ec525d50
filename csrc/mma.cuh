// Tensor core and asynchronous copy instructions of sm_80 as functions. Holds no kernel.
#pragma once

#include <cstdint>

#include "common.cuh"

namespace openjev_fast {

// Two float32 as the bfloat16 pair of a fragment register, `low` in the lower half.
__device__ __forceinline__ unsigned pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// d += a b on a 16x8 tile of float32, 16 deep in bfloat16. With g = lane / 4 and c = 2 (lane % 4): a holds
// rows g, g + 8, g, g + 8 at depths c, c, c + 8, c + 8; b holds depths c, c + 8 of column g; d holds columns
// c, c + 1 of row g, then of row g + 8.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                            unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit values, transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices_transposed(unsigned (&x)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}

// The same without the transposition: lane i gets columns 2 (i % 4) and the next of row i / 4 of each matrix.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], unsigned shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared_address)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit values held as ldmatrix leaves it.
__device__ __forceinline__ unsigned transpose_matrix(unsigned x) {
  unsigned transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(x));
  return transposed;
}

// d += a b on a 16x8 tile of float32, 8 deep in tf32. With g = lane / 4 and c = lane % 4: a holds rows g, g + 8,
// g, g + 8 at depths c, c, c + 4, c + 4; b holds depths c, c + 4 of column g; d as in mma_16x8x16. Of float32 bits
// the low 13 are not read.
__device__ __forceinline__ void mma_16x8x8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                                unsigned b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory, or writes zeros where `real` is false; past L1.
__device__ __forceinline__ void copy_async(unsigned target, const void* source, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(target), "l"(source),
               "r"(real ? 16 : 0)
               : "memory");
}

// The same for 4 bytes, through L1.
__device__ __forceinline__ void copy_async_word(unsigned target, const void* source, bool real) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(target), "l"(source), "r"(real ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits until at most kPending of this thread's newest committed groups are under way.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

}  // namespace openjev_fast
