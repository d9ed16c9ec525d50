// tree_attention as an op of torch.ops.openjev_fast_cuda: checks, output allocation, launch on the current
// stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "check.h"
#include "launch.h"
#include "ops.h"

namespace openjev_fast {
namespace {

using at::Tensor;

// 16-byte accesses: 8 elements.
void check_access(const Checker& check, const Tensor& tensor, const char* name) {
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  if (!aligned || tensor.stride(0) % 8 != 0 || tensor.stride(1) % 8 != 0) {
    check.fail(std::string(name) +
               " must start at a multiple of 16 bytes with strides in multiples of 8, its " + "strides are " +
               to_text(tensor.strides()));
  }
}

// Arguments are those of the public op; the block tables serve its portable implementation only.
Tensor public_tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate,
                             double scale, const Tensor& query_row, const Tensor& /*query_first*/,
                             const Tensor& /*block_query*/, const Tensor& /*block_own*/,
                             const Tensor& /*block_range*/, const Tensor& /*range_rows*/, const Tensor& tile,
                             const Tensor& tile_range, int64_t tile_queries) {
  return tree_attention(q, k, v, gate, scale, query_row, tile, tile_range, tile_queries);
}

}  // namespace

Tensor tree_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& gate, double scale,
                      const Tensor& query_row, const Tensor& tile, const Tensor& tile_range,
                      int64_t tile_queries) {
  constexpr at::ScalarType kBFloat16 = at::ScalarType::BFloat16, kInt32 = at::ScalarType::Int;
  const Checker check("tree_attention", q);
  check.rank(q, "q", 3);
  check.rank(k, "k", 3);
  check.rank(tile, "tile", 2);
  check.rank(tile_range, "tile_range", 2);
  const int64_t queries = q.size(0), query_heads = q.size(1), dim = q.size(2);
  const int64_t rows = k.size(0), kv_heads = k.size(1);
  check.tensor(q, "q", kBFloat16, {queries, query_heads, dim});
  check.tensor(k, "k", kBFloat16, {rows, kv_heads, dim}, Strides::kLastContiguous);
  check.tensor(v, "v", kBFloat16, {rows, kv_heads, dim}, Strides::kLastContiguous);
  check.tensor(gate, "gate", kBFloat16, {queries, query_heads, dim}, Strides::kLastContiguous);
  check.tensor(query_row, "query_row", kInt32, {queries});
  check.tensor(tile, "tile", kInt32, {tile.size(0), 4});
  check.tensor(tile_range, "tile_range", kInt32, {tile_range.size(0), 4});
  if (kv_heads < 1 || query_heads % kv_heads != 0) {
    check.fail("heads of q must be a multiple of those of k, found " + std::to_string(query_heads) + " and " +
               std::to_string(kv_heads));
  }
  if (dim != 64 && dim != 128 && dim != 256) {
    check.fail("the last dimension of q must be 64, 128 or 256, found " + std::to_string(dim));
  }
  if (tile_queries < 1 || tile_queries > 32) {
    check.fail("tile_queries must be 1 to 32, found " + std::to_string(tile_queries));
  }
  if (!(scale > 0.0)) check.fail("scale must be positive, found " + std::to_string(scale));
  check_access(check, q, "q");
  check_access(check, k, "k");
  check_access(check, v, "v");
  check_access(check, gate, "gate");
  check.fits_int32(tile.size(0) * query_heads, "tiles times heads of q");

  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = at::empty({queries, query_heads * dim}, q.options());
  if (out.numel() > 0 && tile.size(0) > 0) {
    constexpr double kLog2E = 1.4426950408889634;
    const TreeAttention arguments{q.const_data_ptr(),
                                  k.const_data_ptr(),
                                  k.stride(0),
                                  k.stride(1),
                                  v.const_data_ptr(),
                                  v.stride(0),
                                  v.stride(1),
                                  gate.const_data_ptr(),
                                  gate.stride(0),
                                  gate.stride(1),
                                  query_row.const_data_ptr<int32_t>(),
                                  tile.const_data_ptr<int32_t>(),
                                  tile_range.const_data_ptr<int32_t>(),
                                  out.mutable_data_ptr(),
                                  static_cast<float>(scale * kLog2E),
                                  rows,
                                  tile.size(0),
                                  static_cast<int>(tile_queries),
                                  static_cast<int>(query_heads),
                                  static_cast<int>(kv_heads),
                                  static_cast<int>(dim)};
    check.launched(
        launch_tree_attention(arguments, c10::cuda::getCurrentCUDAStream(q.get_device()).stream()));
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) { library.def("tree_attention", &public_tree_attention); }

}  // namespace openjev_fast
