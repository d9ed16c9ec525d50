// Device code the kernels share: vectors of bfloat16, rounding, reductions, activations. Holds no kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace openjev_fast {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kFullMask = 0xffffffffu;
// bfloat16 values in one 16-byte access; kernels run at this width or at 1.
constexpr int kVector = 8;

// One access of kWidth bfloat16 values, kept as loaded until the values are needed.
template <int kWidth>
struct Packed;

template <>
struct Packed<kVector> {
  uint4 words;
};

template <>
struct Packed<1> {
  uint16_t words;
};

template <int kWidth>
__device__ __forceinline__ Packed<kWidth> load_packed(const bf16* source) {
  return *reinterpret_cast<const Packed<kWidth>*>(source);
}

// A bfloat16 is the upper half of the float32 of the same value.
__device__ __forceinline__ void unpack(const Packed<kVector>& packed, float (&x)[kVector]) {
  const unsigned words[4] = {packed.words.x, packed.words.y, packed.words.z, packed.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void unpack(const Packed<1>& packed, float (&x)[1]) {
  x[0] = __uint_as_float(static_cast<unsigned>(packed.words) << 16);
}

// Rounds to nearest even; `packed` then holds exactly what a store would write.
__device__ __forceinline__ void pack(const float (&x)[kVector], Packed<kVector>& packed) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
    words[i] = *reinterpret_cast<const unsigned*>(&pair);
  }
  packed.words = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void pack(const float (&x)[1], Packed<1>& packed) {
  packed.words = __bfloat16_as_ushort(__float2bfloat16_rn(x[0]));
}

template <int kWidth>
__device__ __forceinline__ void store_packed(bf16* target, const Packed<kWidth>& packed) {
  *reinterpret_cast<Packed<kWidth>*>(target) = packed;
}

template <int kWidth>
__device__ __forceinline__ void load(const bf16* source, float (&x)[kWidth]) {
  unpack(load_packed<kWidth>(source), x);
}

__device__ __forceinline__ void load(const float* source, float (&x)[kVector]) {
  const float4 low = reinterpret_cast<const float4*>(source)[0];
  const float4 high = reinterpret_cast<const float4*>(source)[1];
  const float values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = values[i];
}

__device__ __forceinline__ void load(const float* source, float (&x)[1]) { x[0] = *source; }

template <int kWidth>
__device__ __forceinline__ void store(bf16* target, const float (&x)[kWidth]) {
  Packed<kWidth> packed;
  pack(x, packed);
  store_packed(target, packed);
}

// Rounds every value to bfloat16 and keeps it as float32.
template <int kWidth>
__device__ __forceinline__ void round_to_bf16(float (&x)[kWidth]) {
  Packed<kWidth> packed;
  pack(x, packed);
  unpack(packed, x);
}

__device__ __forceinline__ float round_once(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Lets a kernel launched as a programmatic dependent start once every block of this one has started; it waits for this
// one's end where it first needs it. Does nothing before compute capability 9.
__device__ __forceinline__ void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}

// In a kernel launched as a programmatic dependent: waits for the end of those launched earlier. Every block of such a
// kernel calls it, since whoever waits for this kernel counts on the earlier ones' having ended too. Does nothing
// before compute capability 9.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Sum over aligned groups of kLanes lanes; every lane of the warp calls it and gets its group's sum.
template <int kLanes>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

// Sum over the block, returned to every thread. `scratch` holds kWarp floats and is not reused by the caller;
// blockDim.x is a multiple of kWarp.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  x = group_sum<kWarp>(x);
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  return group_sum<kWarp>(lane < warps ? scratch[lane] : 0.0f);
}

// Approximate exponential and reciprocal, relative error under 2^-17. On each of the 65,536 bfloat16 values
// it rounds to the same bfloat16 as the precise formula, and so does silu (tested). Only the reciprocal keeps
// subnormal results: they matter below x = -87.
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * x));
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return inverse;
}

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// Rows and heads of a tensor whose last dimension is contiguous.
struct HeadView {
  const bf16* data;
  int64_t row_stride;
  int64_t head_stride;

  __device__ __forceinline__ const bf16* at(unsigned row, unsigned head, unsigned column) const {
    return data + row * row_stride + head * head_stride + column;
  }
};

// How the lanes of a warp share heads of at most kMaxHead values: kLanes lanes a head, kItems accesses a
// lane.
constexpr int kMaxHead = 256;

template <int kWidth_, int kLanes_, int kItems_>
struct HeadTile {
  static constexpr int kWidth = kWidth_, kLanes = kLanes_, kItems = kItems_;
  static_assert(kWarp % kLanes == 0);

  // Column of a lane's access `item` in its head.
  __device__ __forceinline__ static int column(int item) {
    return (item * kLanes + static_cast<int>(threadIdx.x) % kLanes) * kWidth;
  }
};

using HalfWarpTile = HeadTile<kVector, 16, 1>;
using WarpTile = HeadTile<kVector, kWarp, 1>;
using ScalarTile = HeadTile<1, kWarp, kMaxHead / kWarp>;
static_assert(WarpTile::kWidth * WarpTile::kLanes == kMaxHead);

// Host side of the launchers.

// Calls `launch` with the tile type for heads of `dim` values; false where a head is too long.
template <typename Launch>
bool with_head_tile(int64_t dim, bool vectors, Launch&& launch) {
  if (dim > kMaxHead) return false;
  if (!vectors) {
    launch(ScalarTile());
  } else if (dim <= HalfWarpTile::kWidth * HalfWarpTile::kLanes) {
    launch(HalfWarpTile());
  } else {
    launch(WarpTile());
  }
  return true;
}

// Launches a kernel that may start before those launched earlier have ended, and waits for them itself, as its first
// step: the time a launch takes passes meanwhile. Before compute capability 9 it is launched like any other.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, cudaStream_t stream,
                         Arguments... arguments) {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace openjev_fast
