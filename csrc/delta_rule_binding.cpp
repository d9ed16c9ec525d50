// delta_rule as an op of torch.ops.openjev_fast_cuda: checks, output allocation, launch on the current stream.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cmath>
#include <optional>

#include "check.h"
#include "launch.h"
#include "ops.h"

namespace openjev_fast {
namespace {

using at::Tensor;

// Key and value dim of the kernel, kDeltaDim of delta_rule.cuh.
constexpr int64_t kDim = 128;

void check_aligned(const Checker& check, const Tensor& tensor, const char* name) {
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) {
    check.fail(std::string(name) + " must start at a multiple of 16 bytes");
  }
}

// Arguments are those of the public op; the chunk tables serve its portable implementation only.
Tensor public_delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                         const Tensor& beta, const Tensor& /*chunk_start*/, const Tensor& /*chunk_length*/,
                         const Tensor& /*chunk_source*/, const Tensor& /*chunk_target*/,
                         const Tensor& /*step_start*/, const Tensor& /*step_kept*/, int64_t /*slots*/,
                         int64_t /*chunk_size*/, const Tensor& /*kept_source*/, const Tensor& /*kept_target*/,
                         const Tensor& node, const Tensor& node_chunk, int64_t node_tiles, int64_t node_slots,
                         const std::optional<Tensor>& kept) {
  return delta_rule(q, k, v, g, beta, node, node_chunk, node_tiles, node_slots, kept);
}

}  // namespace

Tensor delta_rule(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                  const Tensor& node, const Tensor& node_chunk, int64_t node_tiles, int64_t node_slots,
                  const std::optional<Tensor>& kept) {
  constexpr at::ScalarType kBFloat16 = at::ScalarType::BFloat16, kFloat32 = at::ScalarType::Float;
  constexpr at::ScalarType kInt32 = at::ScalarType::Int;
  const Checker check("delta_rule", q);
  check.rank(q, "q", 3);
  check.rank(v, "v", 3);
  check.rank(node, "node", 2);
  check.rank(node_chunk, "node_chunk", 2);
  const int64_t rows = q.size(0), key_heads = q.size(1), value_heads = v.size(1);
  const int64_t nodes = node.size(0), chunks = node_chunk.size(0);
  check.tensor(q, "q", kBFloat16, {rows, key_heads, kDim});
  check.tensor(k, "k", kBFloat16, {rows, key_heads, kDim});
  check.tensor(v, "v", kBFloat16, {rows, value_heads, kDim});
  check.tensor(g, "g", kFloat32, {rows, value_heads});
  check.tensor(beta, "beta", kFloat32, {rows, value_heads});
  check.tensor(node, "node", kInt32, {nodes, 8});
  check.tensor(node_chunk, "node_chunk", kInt32, {chunks, 4});
  check_aligned(check, q, "q");
  check_aligned(check, k, "k");
  check_aligned(check, v, "v");
  check_aligned(check, node, "node");
  check_aligned(check, node_chunk, "node_chunk");
  if (kept) {
    check.rank(*kept, "kept", 4);
    check.tensor(*kept, "kept", kFloat32, {kept->size(0), value_heads, kDim, kDim});
    check_aligned(check, *kept, "kept");
  }
  if (key_heads < 1 || value_heads % key_heads != 0) {
    check.fail("heads of v must be a multiple of those of q, found " + std::to_string(value_heads) + " and " +
               std::to_string(key_heads));
  }
  if (node_tiles < 0 || node_slots < 0) {
    check.fail("node_tiles and node_slots must not be negative, found " + std::to_string(node_tiles) +
               " and " + std::to_string(node_slots));
  }
  check.at_most((nodes + chunks) * value_heads, int64_t{1} << 29, "nodes and chunks times heads of v");

  const c10::cuda::CUDAGuard guard(q.device());
  Tensor out = at::empty(v.sizes(), v.options());
  if (out.numel() > 0 && chunks > 0) {
    const int64_t flags = delta_rule_flags(node_slots, value_heads);
    Tensor work =
        at::empty({delta_rule_work(node_tiles, value_heads)}, q.options().dtype(at::ScalarType::Byte));
    Tensor state = at::empty({node_slots, value_heads, kDim, kDim}, g.options());
    Tensor flag = at::empty({flags}, node.options());
    const DeltaRule arguments{q.const_data_ptr(),
                              k.const_data_ptr(),
                              v.const_data_ptr(),
                              g.const_data_ptr<float>(),
                              beta.const_data_ptr<float>(),
                              node.const_data_ptr<int32_t>(),
                              node_chunk.const_data_ptr<int32_t>(),
                              out.mutable_data_ptr(),
                              work.mutable_data_ptr(),
                              state.mutable_data_ptr<float>(),
                              kept ? kept->mutable_data_ptr<float>() : nullptr,
                              flag.mutable_data_ptr<int32_t>(),
                              flags,
                              1.0f / std::sqrt(static_cast<float>(kDim)),
                              static_cast<int>(nodes),
                              static_cast<int>(chunks),
                              static_cast<int>(key_heads),
                              static_cast<int>(value_heads)};
    check.launched(launch_delta_rule(arguments, c10::cuda::getCurrentCUDAStream(q.get_device()).stream()));
  }
  return out;
}

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) { library.def("delta_rule", &public_delta_rule); }

}  // namespace openjev_fast
