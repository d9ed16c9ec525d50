// Token sequences to the packed tables of a forward; layout.h says what of.
#include "layout.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace openjev_fast {
namespace {

// Of the kernels: rows of a chunk and of a tile of the delta rule, queries of a tile of attention for few queries and
// for many, and the multiple at which keys start whose rows do not follow on.
constexpr int64_t kChunkRows = 64;
constexpr int64_t kTileRows = 16;
constexpr int kFewTileQueries = 10;
constexpr int kManyTileQueries = 21;
constexpr int32_t kRunKeys = 8;
// Tables start at multiples of so many int32.
constexpr int64_t kAlignment = 4;
constexpr int kNodeColumns = 8;
constexpr int kChunkColumns = 4;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Length of the longest common prefix.
int64_t shared_length(const int32_t* one, int64_t one_length, const int32_t* other, int64_t other_length) {
  const int64_t limit = std::min(one_length, other_length);
  return std::mismatch(one, one + limit, other).first - one;
}

// A sequence that differs from all others, and the tokens it shares with the one before it in lexicographic order.
struct Distinct {
  int64_t offset;
  int64_t length;
  int64_t shared;
};

// Distinct sequences in lexicographic order, and which of them each sequence is.
std::vector<Distinct> sorted_distinct(const int32_t* tokens, const int64_t* bounds, int64_t sequences,
                                      std::vector<int32_t>& distinct_of) {
  auto length = [&](int64_t sequence) { return bounds[sequence + 1] - bounds[sequence]; };
  // What all of them share decides no order.
  int64_t common = length(0);
  for (int64_t sequence = 1; sequence < sequences; ++sequence) {
    common = shared_length(tokens, common, tokens + bounds[sequence], length(sequence));
  }
  std::vector<int32_t> order(sequences);
  std::iota(order.begin(), order.end(), 0);
  auto rest = [&](int64_t sequence) { return tokens + bounds[sequence] + common; };
  auto end = [&](int64_t sequence) { return tokens + bounds[sequence + 1]; };
  std::sort(order.begin(), order.end(), [&](int32_t one, int32_t other) {
    return std::lexicographical_compare(rest(one), end(one), rest(other), end(other));
  });
  std::vector<Distinct> found;
  distinct_of.resize(sequences);
  for (const int32_t sequence : order) {
    const int32_t* start = tokens + bounds[sequence];
    int64_t shared = 0;
    if (!found.empty()) {
      const Distinct& before = found.back();
      shared = common + shared_length(tokens + before.offset + common, before.length - common, start + common,
                                      length(sequence) - common);
      if (shared == before.length && shared == length(sequence)) {
        distinct_of[sequence] = static_cast<int32_t>(found.size()) - 1;
        continue;
      }
    }
    distinct_of[sequence] = static_cast<int32_t>(found.size());
    found.push_back({bounds[sequence], length(sequence), shared});
  }
  return found;
}

// A node while the forest grows: it covers depths [begin, end) and keeps the first sequence below it.
struct Growing {
  int64_t begin;
  int64_t end;
  int32_t parent;
  int32_t first_leaf;
  int32_t level;
};

// The sequences that end on the path of a leaf and on no earlier one's.
struct EndsUnder {
  int32_t leaf;
  int64_t first;
  int64_t last;
};

}  // namespace

PackedLayout::PackedLayout(const int32_t* tokens, const int64_t* bounds, int64_t sequences,
                           const LayoutBucket& bucket) {
  build_nodes(tokens, bounds, sequences);
  fill_rows(tokens);
  pad(bucket);
  plan_delta_rule(bucket);
  std::vector<int32_t> every(token_.size());
  std::iota(every.begin(), every.end(), 0);
  attention_ = plan_attention(every, bucket.few_queries);
  read_attention_ = plan_attention(read_row_, bucket.few_queries);

  auto count = [](const std::vector<int32_t>& table, int columns) {
    return static_cast<int64_t>(table.size()) / columns;
  };
  sizes_.rows = count(token_, 1);
  sizes_.nodes = count(delta_node_, kNodeColumns);
  sizes_.chunks = count(delta_chunk_, kChunkColumns);
  sizes_.tiles = count(attention_.tile, 4);
  sizes_.ranges = count(attention_.tile_range, 4);
  sizes_.reads = count(read_row_, 1);
  sizes_.read_tiles = count(read_attention_.tile, 4);
  sizes_.read_ranges = count(read_attention_.tile_range, 4);
  sizes_.candidates = count(candidate_read_, 1);
  sizes_.tile_queries = attention_.tile_queries;
  sizes_.read_tile_queries = read_attention_.tile_queries;
}

void PackedLayout::build_nodes(const int32_t* tokens, const int64_t* bounds, int64_t sequences) {
  std::vector<int32_t> distinct_of;
  const std::vector<Distinct> text = sorted_distinct(tokens, bounds, sequences, distinct_of);

  // One leaf for each sequence that is not a prefix of the next; the others end on the path of the leaf after them.
  // The stack is the path to the newest leaf.
  std::vector<Growing> nodes;
  std::vector<int32_t> stack;
  std::vector<EndsUnder> ends_under;
  int64_t waiting = 0, shared = 0;
  const auto distinct = static_cast<int64_t>(text.size());
  for (int64_t index = 0; index < distinct; ++index) {
    if (waiting == index) shared = text[index].shared;
    if (index + 1 < distinct && text[index + 1].shared == text[index].length) continue;
    while (!stack.empty() && nodes[stack.back()].begin >= shared) stack.pop_back();
    if (!stack.empty() && nodes[stack.back()].end > shared) {
      const int32_t below = stack.back();
      const auto upper = static_cast<int32_t>(nodes.size());
      nodes.push_back({nodes[below].begin, shared, nodes[below].parent, nodes[below].first_leaf, 0});
      nodes[below].begin = shared;
      nodes[below].parent = upper;
      stack.back() = upper;
    }
    const auto leaf = static_cast<int32_t>(nodes.size());
    nodes.push_back(
        {shared, text[index].length, stack.empty() ? -1 : stack.back(), static_cast<int32_t>(index), 0});
    stack.push_back(leaf);
    ends_under.push_back({leaf, waiting, index});
    waiting = index + 1;
  }

  // Depth first a parent comes before its children; a stable sort by level keeps the order of paths.
  std::vector<int32_t> order(nodes.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t one, int32_t other) {
    const Growing &a = nodes[one], &b = nodes[other];
    return a.first_leaf != b.first_leaf ? a.first_leaf < b.first_leaf : a.begin < b.begin;
  });
  for (const int32_t node : order) {
    if (nodes[node].parent >= 0) nodes[node].level = nodes[nodes[node].parent].level + 1;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t one, int32_t other) { return nodes[one].level < nodes[other].level; });
  std::vector<int32_t> renamed(nodes.size());
  for (size_t i = 0; i < order.size(); ++i) renamed[order[i]] = static_cast<int32_t>(i);

  int32_t start = 0;
  for (const int32_t node : order) {
    const Growing& each = nodes[node];
    const auto length = static_cast<int32_t>(each.end - each.begin);
    node_start_.push_back(start);
    node_length_.push_back(length);
    node_parent_.push_back(each.parent < 0 ? -1 : renamed[each.parent]);
    node_depth_.push_back(static_cast<int32_t>(each.begin));
    node_source_.push_back(text[each.first_leaf].offset);
    start += length;
  }

  // What ends under a leaf ends on nodes this leaf was the first to reach: each node is climbed once.
  std::vector<int32_t> row_of(text.size());
  for (const EndsUnder& ends : ends_under) {
    int32_t at = ends.leaf;
    for (int64_t index = ends.last; index >= ends.first; --index) {
      const int64_t last = text[index].length - 1;
      while (nodes[at].begin > last) at = nodes[at].parent;
      row_of[index] = static_cast<int32_t>(node_start_[renamed[at]] + last - nodes[at].begin);
    }
  }
  read_row_ = row_of;
  std::sort(read_row_.begin(), read_row_.end());
  read_row_.erase(std::unique(read_row_.begin(), read_row_.end()), read_row_.end());
  candidate_read_.resize(sequences);
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const auto found = std::lower_bound(read_row_.begin(), read_row_.end(), row_of[distinct_of[sequence]]);
    candidate_read_[sequence] = static_cast<int32_t>(found - read_row_.begin());
  }
}

void PackedLayout::fill_rows(const int32_t* tokens) {
  const size_t rows = node_start_.back() + node_length_.back();
  token_.resize(rows);
  position_.resize(rows);
  node_of_row_.resize(rows);
  std::vector<int32_t> back(rows);
  for (size_t node = 0; node < node_start_.size(); ++node) {
    const int32_t start = node_start_[node], length = node_length_[node], parent = node_parent_[node];
    const int32_t depth = node_depth_[node];
    std::memcpy(&token_[start], tokens + node_source_[node] + depth, length * sizeof(int32_t));
    std::iota(&position_[start], &position_[start] + length, depth);
    std::fill_n(&node_of_row_[start], length, static_cast<int32_t>(node));
    std::iota(&back[start], &back[start] + length, start - 1);
    back[start] = parent < 0 ? -1 : node_start_[parent] + node_length_[parent] - 1;
  }
  auto before = [&](int32_t row) { return row < 0 ? -1 : back[row]; };
  predecessor_.resize(3 * rows);
  for (size_t row = 0; row < rows; ++row) {
    const int32_t one = back[row], two = before(one);
    predecessor_[3 * row] = one;
    predecessor_[3 * row + 1] = two;
    predecessor_[3 * row + 2] = before(two);
  }
}

// Rows added form a root of their own; the last read row and the first candidate are repeated.
void PackedLayout::pad(const LayoutBucket& bucket) {
  const auto rows = static_cast<int64_t>(token_.size());
  const auto extra = static_cast<int32_t>(round_up(rows, bucket.rows) - rows);
  if (extra > 0) {
    for (int32_t i = 0; i < extra; ++i) {
      token_.push_back(0);
      position_.push_back(i);
      node_of_row_.push_back(static_cast<int32_t>(node_start_.size()));
      for (int32_t back = 1; back <= 3; ++back) {
        predecessor_.push_back(i < back ? -1 : static_cast<int32_t>(rows) + i - back);
      }
    }
    node_start_.push_back(static_cast<int32_t>(rows));
    node_length_.push_back(extra);
    node_parent_.push_back(-1);
  }
  read_row_.resize(round_up(static_cast<int64_t>(read_row_.size()), bucket.reads), read_row_.back());
  candidate_read_.resize(round_up(static_cast<int64_t>(candidate_read_.size()), bucket.reads),
                         candidate_read_.front());
}

void PackedLayout::plan_delta_rule(const LayoutBucket& bucket) {
  const size_t nodes = node_start_.size();
  std::vector<int32_t> slot(nodes, -1);
  for (const int32_t parent : node_parent_) {
    if (parent >= 0) slot[parent] = 0;
  }
  int32_t slots = 0;
  for (int32_t& each : slot) {
    if (each == 0) each = slots++;
  }
  int32_t tile = 0;
  for (size_t node = 0; node < nodes; ++node) {
    const int32_t start = node_start_[node], length = node_length_[node], parent = node_parent_[node];
    delta_node_.insert(delta_node_.end(),
                       {start, length, parent < 0 ? -1 : slot[parent], slot[node], tile, 0, 0, 0});
    for (int32_t first = 0; first < length; first += kChunkRows) {
      const auto chunk = static_cast<int32_t>(std::min<int64_t>(length - first, kChunkRows));
      delta_chunk_.insert(delta_chunk_.end(),
                          {start + first, chunk, tile + static_cast<int32_t>(first / kTileRows), 0});
    }
    tile += static_cast<int32_t>(divide_up(length, kTileRows));
  }
  const int64_t chunks = static_cast<int64_t>(delta_chunk_.size()) / kChunkColumns;
  delta_node_.resize(round_up(static_cast<int64_t>(nodes), bucket.nodes) * kNodeColumns);
  delta_chunk_.resize(round_up(chunks, bucket.nodes) * kChunkColumns);
  sizes_.node_tiles = round_up(tile, bucket.nodes);
  sizes_.node_slots = round_up(slots, bucket.nodes);
}

AttentionTables PackedLayout::plan_attention(const std::vector<int32_t>& query_row,
                                             int64_t few_queries) const {
  AttentionTables plan;
  const auto total = static_cast<int64_t>(query_row.size());
  plan.tile_queries = total <= few_queries ? kFewTileQueries : kManyTileQueries;
  plan.query_row = query_row;
  plan.query_first.resize(total);
  for (int64_t i = 0; i < total; ++i) plan.query_first[i] = node_start_[node_of_row_[query_row[i]]];

  // Of the nodes that the tile's queries see: the queries, as bits from the tile's first, and the end of the rows seen.
  std::vector<uint32_t> seen_by(node_start_.size(), 0);
  std::vector<int32_t> seen_end(node_start_.size()), seen;
  auto see = [&](int32_t node, uint32_t bits, int32_t end) {
    if (seen_by[node] == 0) seen.push_back(node);
    seen_by[node] |= bits;
    seen_end[node] = end;
  };
  for (int64_t begin = 0; begin < total; begin += plan.tile_queries) {
    const int64_t end = std::min(begin + plan.tile_queries, total);
    for (int64_t first = begin; first < end;) {
      const int32_t node = node_of_row_[query_row[first]];
      int64_t next = first + 1;
      while (next < end && node_of_row_[query_row[next]] == node) ++next;
      const auto bits =
          static_cast<uint32_t>((uint64_t{1} << (next - begin)) - (uint64_t{1} << (first - begin)));
      see(node, bits, query_row[next - 1] + 1);
      for (int32_t above = node_parent_[node]; above >= 0; above = node_parent_[above]) {
        see(above, bits, node_start_[above] + node_length_[above]);
      }
      first = next;
    }
    // Nodes are numbered in the order of their rows.
    std::sort(seen.begin(), seen.end());
    const auto first_range = static_cast<int32_t>(plan.tile_range.size() / 4);
    int32_t keys = 0, range_end = 0;
    uint32_t range_bits = 0;
    for (const int32_t node : seen) {
      const int32_t start = node_start_[node];
      const uint32_t bits = seen_by[node];
      if (keys > 0 && start == range_end && bits == range_bits) {
        // One range with the one before.
        plan.tile_range.resize(plan.tile_range.size() - 4);
      } else if (keys > 0 && start != range_end && keys % kRunKeys != 0) {
        const auto aligned = static_cast<int32_t>(round_up(keys, kRunKeys));
        plan.tile_range.insert(plan.tile_range.end(), {range_end - keys, aligned, 0, 0});
        keys = aligned;
      }
      const int32_t shift = start - keys;
      keys += seen_end[node] - start;
      plan.tile_range.insert(plan.tile_range.end(), {shift, keys, static_cast<int32_t>(bits), 0});
      range_end = seen_end[node];
      range_bits = bits;
      seen_by[node] = 0;
    }
    seen.clear();
    plan.tile.insert(plan.tile.end(),
                     {static_cast<int32_t>(begin), static_cast<int32_t>(end - begin), first_range, keys});
  }
  size_t ranges = 1;
  while (4 * ranges < plan.tile_range.size()) ranges *= 2;
  plan.tile_range.resize(4 * ranges);
  return plan;
}

// In the order of Layout.pack; four tables of the delta rule are the portable implementation's, and empty.
std::vector<const std::vector<int32_t>*> PackedLayout::tables() const {
  return {&token_,
          &position_,
          &predecessor_,
          &delta_node_,
          &delta_chunk_,
          &attention_.query_row,
          &attention_.query_first,
          &attention_.tile,
          &attention_.tile_range,
          &read_attention_.query_row,
          &read_attention_.query_first,
          &read_attention_.tile,
          &read_attention_.tile_range,
          &read_row_,
          &candidate_read_};
}

int64_t PackedLayout::length() const {
  int64_t length = 0;
  for (const auto* table : tables()) length += round_up(static_cast<int64_t>(table->size()), kAlignment);
  return length;
}

void PackedLayout::write(int32_t* packed) const {
  for (const auto* table : tables()) {
    std::memcpy(packed, table->data(), table->size() * sizeof(int32_t));
    packed += round_up(static_cast<int64_t>(table->size()), kAlignment);
  }
}

}  // namespace openjev_fast
