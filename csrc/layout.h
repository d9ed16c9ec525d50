// Computes: token sequences to the packed tables of a layout for the kernels: what build_forest, then build_layout
//   with portable=False, then Layout.pack give (openjev_fast_plugin/forest.py, layout.py), bit for bit but for what
//   lies between two tables.
// Shapes: token [bound[C]], the sequences one after the other; bound [C + 1], where each begins and ends, from 0. The packed tables, int32, each
//   contiguous, from the next multiple of 4 int32 on, written in this order:
//   token [N], position [N], predecessor [N, 3], node [K, 8], node_chunk [D, 4],
//   of every row: query_row [N], query_first [N], tile [T, 4], tile_range [S, 4],
//   of the read rows: query_row [M], query_first [M], tile [T', 4], tile_range [S', 4],
//   read_row [M], candidate_read [C, to the next multiple].
// Dtypes: int32 tables and tokens, 64-bit sizes and offsets.
// Rounding points: none.
// Limits: at least one sequence, none empty, ids not negative, fewer than 2^31 tokens with padding; what the numpy code
//   refuses is refused before this. Not safe for two threads on one object. Host code without CUDA and torch. Time is linear in tokens and tables, with C log C
//   steps to order C sequences; scratch memory is linear in sequences, nodes and tile ranges.
// Source: the longest common prefixes that order the sequences are merged as in Ng and Kakehi, "Merging String Sequences
//   by Longest Common Prefixes" (IPSJ Digital Courier 4, 2008). Twin: the numpy code named above,
//   tests/test_packed_layout.py.
#pragma once

#include <cstdint>
#include <vector>

namespace openjev_fast {

struct Sequences {
  const int32_t* token;
  const int64_t* bound;
  int64_t count;

  int64_t length(int64_t index) const { return bound[index + 1] - bound[index]; }
};

// Sizes are rounded up to multiples of `rows`, `nodes` and `reads`, each at least 1, as layout.Bucket has them. Up to
// few_queries queries are planned in tiles of 10, more in tiles of 21.
struct LayoutOptions {
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

// The distinct sequences in lexicographic order, a prefix before what continues it.
class SortedSequences {
 public:
  explicit SortedSequences(const Sequences& sequences);

  struct Distinct {
    const int32_t* token;
    int32_t length;
    // Tokens shared with the one before.
    int32_t shared;
  };

  // Number of distinct prefixes.
  int64_t rows() const;

  std::vector<Distinct> distinct;
  // The distinct sequence of each input sequence.
  std::vector<int32_t> distinct_of;
};

// A layout whose sizes are known and whose tables are not written yet. Tokens are read until they are.
class PackedLayout {
 public:
  PackedLayout(const Sequences& sequences, const LayoutOptions& options);

  const LayoutSizes& sizes() const { return sizes_; }

  // Length of the packed tables in int32.
  int64_t length() const;

  // packed: length() int32; what lies between tables stays as it is.
  void write(int32_t* packed) const;

 private:
  struct Node {
    // Its tokens, its first row, how many there are, and the depth of the first on its path.
    const int32_t* token;
    int32_t start;
    int32_t length;
    int32_t depth;
    int32_t parent;
    // Where the final state is left, -1 without children.
    int32_t slot;
    int32_t first_tile;

    int32_t end() const { return start + length; }
  };

  // Queries of one node, one after the other.
  struct Run {
    int32_t node;
    int32_t begin;
    int32_t end;
  };

  struct Four {
    int32_t value[4];
  };

  struct Tiles {
    int32_t queries;
    std::vector<Four> tile;
    std::vector<Four> range;
  };

  void build_tree(const SortedSequences& sorted, const LayoutOptions& options);
  // Numbers what the delta rule keeps; multiple: what sizes are rounded up to.
  void plan_states(int64_t multiple);
  // query_row: the rows of the queries, null where a query's number is its row.
  Tiles plan_tiles(const std::vector<Run>& runs, const int32_t* query_row, int64_t few_queries) const;

  LayoutSizes sizes_{};
  // In the order of their rows; the padding rows are the last one, with null tokens.
  std::vector<Node> node_;
  std::vector<Run> read_run_;
  std::vector<int32_t> read_row_;
  std::vector<int32_t> candidate_read_;
  Tiles every_{};
  Tiles read_{};
};

}  // namespace openjev_fast
