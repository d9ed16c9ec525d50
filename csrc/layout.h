// Computes: the tables that one forward of the kernels reads, from token sequences, in one buffer: what build_forest,
//   build_layout without the portable ops' tables, and Layout.pack make of them, value by value. Host code, no torch,
//   no CUDA.
// Shapes: C sequences, one after the other in `tokens`, sequence c from bounds[c] to bounds[c + 1]; none is empty.
//   The tables, their meaning and their shapes are those of openjev_fast_plugin/layout.py and the plans it holds.
// Dtypes: token ids and tables int32; ids are not negative.
// Limits: fewer than 2^31 tokens. Not safe for two threads on one object; any number of objects at once.
// Errors: none; what the numpy code refuses is refused before this.
// Source: openjev_fast_plugin/forest.py, layout.py, ops/delta_rule.py and ops/tree_attention.py, which are its twin:
//   tests/test_packed_layout.py.
#pragma once

#include <cstdint>
#include <vector>

namespace openjev_fast {

// Sizes are rounded up to multiples of rows, nodes and reads. few_queries: the most queries that attention plans in
// small tiles.
struct LayoutBucket {
  int64_t rows;
  int64_t nodes;
  int64_t reads;
  int64_t few_queries;
};

// What the shapes of the tables follow from, and the numbers of the plans.
struct LayoutSizes {
  int64_t rows, nodes, chunks, tiles, ranges, reads, read_tiles, read_ranges, candidates;
  int64_t node_tiles, node_slots, tile_queries, read_tile_queries;
};

// What each query of attention sees: AttentionPlan.
struct AttentionTables {
  std::vector<int32_t> query_row, query_first, tile, tile_range;
  int tile_queries;
};

class PackedLayout {
 public:
  PackedLayout(const int32_t* tokens, const int64_t* bounds, int64_t sequences, const LayoutBucket& bucket);

  const LayoutSizes& sizes() const { return sizes_; }
  // Length of the buffer in int32.
  int64_t length() const;
  // Fills the buffer; what lies between tables stays as it is.
  void write(int32_t* packed) const;

 private:
  void build_nodes(const int32_t* tokens, const int64_t* bounds, int64_t sequences);
  void fill_rows(const int32_t* tokens);
  void pad(const LayoutBucket& bucket);
  void plan_delta_rule(const LayoutBucket& bucket);
  AttentionTables plan_attention(const std::vector<int32_t>& query_row, int64_t few_queries) const;
  std::vector<const std::vector<int32_t>*> tables() const;

  LayoutSizes sizes_{};
  // Of each row.
  std::vector<int32_t> token_, position_, predecessor_, node_of_row_;
  // Of each node, in the order of the packed rows.
  std::vector<int32_t> node_start_, node_length_, node_parent_, node_depth_;
  std::vector<int64_t> node_source_;
  std::vector<int32_t> read_row_, candidate_read_;
  std::vector<int32_t> delta_node_, delta_chunk_;
  AttentionTables attention_, read_attention_;
};

}  // namespace openjev_fast
