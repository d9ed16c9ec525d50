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

// tokens: [L] int32 and bounds: [C + 1] int64 on the CPU, as layout.h says. Returns the buffer [length] int32, and the
// sizes in the order of LayoutSizes.
std::tuple<Tensor, std::vector<int64_t>> packed_layout(const Tensor& tokens, const Tensor& bounds,
                                                       int64_t rows, int64_t nodes, int64_t reads,
                                                       int64_t few_queries, bool pinned) {
  TORCH_CHECK(tokens.is_cpu() && tokens.scalar_type() == at::ScalarType::Int && tokens.dim() == 1 &&
                  tokens.is_contiguous(),
              "packed_layout: tokens must be int32 [L] on the CPU");
  TORCH_CHECK(bounds.is_cpu() && bounds.scalar_type() == at::ScalarType::Long && bounds.dim() == 1 &&
                  bounds.is_contiguous() && bounds.numel() >= 2,
              "packed_layout: bounds must be int64 [C + 1] on the CPU, of at least one sequence");
  TORCH_CHECK(rows >= 1 && nodes >= 1 && reads >= 1, "packed_layout: sizes are rounded up to at least 1");
  const auto* bound = bounds.const_data_ptr<int64_t>();
  const int64_t sequences = bounds.numel() - 1;
  bool filled = bound[0] == 0 && bound[sequences] == tokens.numel();
  for (int64_t i = 0; i < sequences; ++i) filled = filled && bound[i] < bound[i + 1];
  TORCH_CHECK(filled, "packed_layout: bounds must ascend from 0 to the number of tokens");
  const PackedLayout layout(tokens.const_data_ptr<int32_t>(), bound, sequences,
                            {rows, nodes, reads, few_queries});
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
