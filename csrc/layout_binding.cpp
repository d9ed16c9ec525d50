// packed_layout as an op of torch.ops.openjev_fast_cuda: the tables of a forward, in page-locked memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "layout.h"

namespace openjev_fast {
namespace {

using at::Tensor;

// tokens: [L] int32 on the CPU; bounds: of the sequences in it, C + 1 numbers, as layout.h says. Returns the buffer
// [length] int32, and the sizes in the order of LayoutSizes.
std::tuple<Tensor, std::vector<int64_t>> packed_layout(const Tensor& tokens, at::IntArrayRef bounds,
                                                       int64_t rows, int64_t nodes, int64_t reads,
                                                       int64_t few_queries, bool pinned) {
  TORCH_CHECK(tokens.is_cpu() && tokens.scalar_type() == at::ScalarType::Int && tokens.dim() == 1 &&
                  tokens.is_contiguous(),
              "packed_layout: tokens must be int32 [L] on the CPU");
  TORCH_CHECK(rows >= 1 && nodes >= 1 && reads >= 1, "packed_layout: sizes are rounded up to at least 1");
  bool ascending = bounds.size() >= 2 && bounds.front() == 0 && bounds.back() == tokens.numel();
  for (size_t i = 1; i < bounds.size(); ++i) ascending = ascending && bounds[i - 1] < bounds[i];
  TORCH_CHECK(ascending, "packed_layout: bounds must ascend from 0 to the number of tokens");
  const PackedLayout layout(tokens.const_data_ptr<int32_t>(), bounds.data(),
                            static_cast<int64_t>(bounds.size()) - 1, {rows, nodes, reads, few_queries});
  Tensor packed = at::empty({layout.length()}, tokens.options().pinned_memory(pinned));
  layout.write(packed.mutable_data_ptr<int32_t>());
  const LayoutSizes& sizes = layout.sizes();
  return {packed,
          {sizes.rows, sizes.nodes, sizes.chunks, sizes.tiles, sizes.ranges, sizes.reads, sizes.read_tiles,
           sizes.read_ranges, sizes.candidates, sizes.node_tiles, sizes.node_slots, sizes.tile_queries,
           sizes.read_tile_queries}};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) { library.def("packed_layout", &packed_layout); }

}  // namespace openjev_fast
