// Token sequences to packed tables: the contract is in layout.h.
#include "layout.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace openjev_fast {
namespace {

// As in ops/tree_attention.py, ops/delta_rule.py and layout.py, where they are explained.
constexpr int32_t kTileQueriesOfFew = 10, kTileQueriesOfMany = 21, kRunKeys = 8;
constexpr int32_t kChunkRows = 64, kTileRows = 16;
constexpr int64_t kAlignment = 4;
constexpr int kNodeColumns = 8;

// A node while the tree is built, over depths [begin, end).
struct Draft {
  int32_t begin;
  int32_t end;
  int32_t parent;
  // The first sequence that ends at a leaf below.
  int32_t first_leaf;
};

// Where a distinct sequence ends.
struct End {
  int32_t row;
  int32_t node;
  int32_t sequence;
};

template <typename T>
T ceil_div(T value, T by) {
  return (value + by - 1) / by;
}

template <typename T>
T round_up(T value, T multiple) {
  return ceil_div(value, multiple) * multiple;
}

// Length of the longest common prefix of two sequences that share `from` tokens.
int32_t shared_length(const int32_t* one, const int32_t* other, int32_t from, int32_t limit) {
  constexpr int32_t kBlock = 32;
  while (from + kBlock <= limit && std::memcmp(one + from, other + from, kBlock * sizeof(int32_t)) == 0) {
    from += kBlock;
  }
  while (from < limit && one[from] == other[from]) ++from;
  return from;
}

// A sequence in a sorted run; shared: tokens it shares with the one before it there.
struct Sorted {
  const int32_t* token;
  int32_t length;
  int32_t shared;
  int32_t index;
};

// Merges two sorted runs. A head that shares more with what went out last comes first; only where both share as much are
// tokens compared, from there on, so none is compared again. Of equal sequences those of `left` come first.
void merge(const Sorted* left, const Sorted* left_end, const Sorted* right, const Sorted* right_end,
           Sorted* out) {
  Sorted one = *left, other = *right;
  one.shared = other.shared = 0;
  while (true) {
    bool take_left = one.shared > other.shared;
    if (one.shared == other.shared) {
      const int32_t limit = std::min(one.length, other.length);
      const int32_t shared = shared_length(one.token, other.token, one.shared, limit);
      take_left = shared == limit ? one.length <= other.length : one.token[shared] < other.token[shared];
      // The one that stays shares this much with the one that goes.
      (take_left ? other : one).shared = shared;
    }
    if (take_left) {
      *out++ = one;
      if (++left == left_end) break;
      one = *left;
    } else {
      *out++ = other;
      if (++right == right_end) break;
      other = *right;
    }
  }
  // The first of what is left may share another number of tokens with its new neighbour, the others have theirs.
  if (left != left_end) {
    *out++ = one;
    std::copy(left + 1, left_end, out);
  } else {
    *out++ = other;
    std::copy(right + 1, right_end, out);
  }
}

std::vector<Sorted> sorted(const Sequences& sequences) {
  const int64_t count = sequences.count;
  std::vector<Sorted> order(count), merged(count);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t* token = sequences.token + sequences.bound[i];
    order[i] = {token, static_cast<int32_t>(sequences.length(i)), 0, static_cast<int32_t>(i)};
  }
  for (int64_t width = 1; width < count; width *= 2) {
    for (int64_t begin = 0; begin < count; begin += 2 * width) {
      const int64_t middle = std::min(begin + width, count), end = std::min(begin + 2 * width, count);
      if (middle == end) {
        std::copy(order.begin() + begin, order.begin() + end, merged.begin() + begin);
      } else {
        const Sorted* first = order.data();
        merge(first + begin, first + middle, first + middle, first + end, &merged[begin]);
      }
    }
    order.swap(merged);
  }
  return order;
}

// Levels of nodes, 0 for a root.
std::vector<int32_t> levels(const std::vector<Draft>& drafts) {
  std::vector<int32_t> level(drafts.size(), -1), path;
  for (size_t i = 0; i < drafts.size(); ++i) {
    int32_t node = static_cast<int32_t>(i);
    while (node >= 0 && level[node] < 0) {
      path.push_back(node);
      node = drafts[node].parent;
    }
    int32_t next = node < 0 ? 0 : level[node] + 1;
    for (; !path.empty(); path.pop_back()) level[path.back()] = next++;
  }
  return level;
}

// `items` in the order of key(item), one of 0 to keys - 1; those of one key keep their order.
template <typename Key>
std::vector<int32_t> ordered(const std::vector<int32_t>& items, int32_t keys, const Key& key) {
  std::vector<int32_t> place(keys + 1, 0), found(items.size());
  for (const int32_t item : items) ++place[key(item) + 1];
  for (int32_t i = 0; i < keys; ++i) place[i + 1] += place[i];
  for (const int32_t item : items) found[place[key(item)]++] = item;
  return found;
}

// Hands out the tables of a packed tensor one after the other.
class Writer {
 public:
  explicit Writer(int32_t* packed) : next_(packed) {}

  int32_t* table(int64_t size) {
    int32_t* const found = next_;
    next_ += round_up(size, kAlignment);
    return found;
  }

  template <typename T>
  void copy(const std::vector<T>& table) {
    const int64_t size = table.size() * (sizeof(T) / sizeof(int32_t));
    std::memcpy(this->table(size), table.data(), size * sizeof(int32_t));
  }

 private:
  int32_t* next_;
};

}  // namespace

SortedSequences::SortedSequences(const Sequences& sequences) {
  distinct.reserve(sequences.count);
  distinct_of.resize(sequences.count);
  for (const Sorted& each : sorted(sequences)) {
    const bool known =
        !distinct.empty() && each.shared == each.length && each.length == distinct.back().length;
    if (!known) distinct.push_back({each.token, each.length, each.shared});
    distinct_of[each.index] = static_cast<int32_t>(distinct.size()) - 1;
  }
}

int64_t SortedSequences::rows() const {
  int64_t rows = 0;
  for (const Distinct& each : distinct) rows += each.length - each.shared;
  return rows;
}

PackedLayout::PackedLayout(const Sequences& sequences, const LayoutOptions& options) {
  build_tree(SortedSequences(sequences), options);
  plan_states(options.nodes);

  // Every row is a query, so a node's rows are its run.
  std::vector<Run> runs(node_.size());
  for (size_t i = 0; i < node_.size(); ++i)
    runs[i] = {static_cast<int32_t>(i), node_[i].start, node_[i].end()};
  every_ = plan_tiles(runs, nullptr, options.few_queries);
  read_ = plan_tiles(read_run_, read_row_.data(), options.few_queries);

  sizes_.tiles = every_.tile.size();
  sizes_.ranges = every_.range.size();
  sizes_.tile_queries = every_.queries;
  sizes_.reads = read_row_.size();
  sizes_.read_tiles = read_.tile.size();
  sizes_.read_ranges = read_.range.size();
  sizes_.read_tile_queries = read_.queries;
  sizes_.candidates = candidate_read_.size();
}

int64_t PackedLayout::length() const {
  int64_t total = 0;
  for (const int64_t size :
       {sizes_.rows, sizes_.rows, 3 * sizes_.rows, kNodeColumns * sizes_.nodes, 4 * sizes_.chunks,
        sizes_.rows, sizes_.rows, 4 * sizes_.tiles, 4 * sizes_.ranges, sizes_.reads, sizes_.reads,
        4 * sizes_.read_tiles, 4 * sizes_.read_ranges, sizes_.reads, sizes_.candidates}) {
    total += round_up(size, kAlignment);
  }
  return total;
}

void PackedLayout::build_tree(const SortedSequences& sorted, const LayoutOptions& options) {
  const std::vector<SortedSequences::Distinct>& distinct = sorted.distinct;
  const int32_t count = static_cast<int32_t>(distinct.size());

  // One leaf for each sequence that is not a prefix of the next; the others end on the path of the leaf after them.
  // The stack is the path to the newest leaf.
  std::vector<Draft> drafts;
  drafts.reserve(2 * count);
  std::vector<int32_t> stack, leaf_of(count);
  int32_t shared = 0;
  bool waiting = false;
  for (int32_t i = 0; i < count; ++i) {
    if (!waiting) shared = distinct[i].shared;
    waiting = i + 1 < count && distinct[i + 1].shared == distinct[i].length;
    leaf_of[i] = -1;
    if (waiting) continue;
    while (!stack.empty() && drafts[stack.back()].begin >= shared) stack.pop_back();
    if (!stack.empty() && drafts[stack.back()].end > shared) {
      Draft& below = drafts[stack.back()];
      const Draft above{below.begin, shared, below.parent, below.first_leaf};
      below.begin = shared;
      below.parent = static_cast<int32_t>(drafts.size());
      stack.back() = below.parent;
      drafts.push_back(above);
    }
    leaf_of[i] = static_cast<int32_t>(drafts.size());
    drafts.push_back({shared, distinct[i].length, stack.empty() ? -1 : stack.back(), i});
    stack.push_back(leaf_of[i]);
  }

  // By level, then by path: a level holds one node at most of those with the same first leaf.
  const std::vector<int32_t> level = levels(drafts);
  std::vector<int32_t> order(drafts.size());
  std::iota(order.begin(), order.end(), 0);
  order = ordered(order, count, [&](int32_t node) { return drafts[node].first_leaf; });
  order = ordered(order, *std::max_element(level.begin(), level.end()) + 1,
                  [&](int32_t node) { return level[node]; });
  std::vector<int32_t> renamed(drafts.size());
  for (size_t i = 0; i < order.size(); ++i) renamed[order[i]] = static_cast<int32_t>(i);

  node_.reserve(order.size() + 1);
  int32_t row = 0;
  for (const int32_t drafted : order) {
    const Draft& draft = drafts[drafted];
    const int32_t parent = draft.parent < 0 ? -1 : renamed[draft.parent];
    const int32_t length = draft.end - draft.begin;
    node_.push_back(
        {distinct[draft.first_leaf].token + draft.begin, row, length, draft.begin, parent, -1, 0});
    row += length;
  }

  // What ends under a leaf ends on nodes that this leaf was the first to reach: each is climbed once.
  std::vector<End> ends;
  ends.reserve(count);
  int32_t at = -1;
  for (int32_t i = count - 1; i >= 0; --i) {
    if (leaf_of[i] >= 0) at = leaf_of[i];
    const int32_t last = distinct[i].length - 1;
    while (drafts[at].begin > last) at = drafts[at].parent;
    const Node& node = node_[renamed[at]];
    ends.push_back({node.start + last - node.depth, renamed[at], i});
  }
  std::sort(ends.begin(), ends.end(), [](const End& one, const End& other) { return one.row < other.row; });

  // Read rows and candidates, the last and the first repeated up to a multiple.
  const int32_t reads = round_up<int64_t>(count, options.reads);
  const int64_t candidates = sorted.distinct_of.size();
  read_row_.reserve(reads);
  std::vector<int32_t> read_of(count);
  for (const End& end : ends) {
    const int32_t read = static_cast<int32_t>(read_row_.size());
    if (read_run_.empty() || read_run_.back().node != end.node) read_run_.push_back({end.node, read, read});
    read_run_.back().end = read + 1;
    read_of[end.sequence] = read;
    read_row_.push_back(end.row);
  }
  read_run_.back().end = reads;
  read_row_.resize(reads, ends.back().row);
  candidate_read_.reserve(round_up(candidates, options.reads));
  for (const int32_t sequence : sorted.distinct_of) candidate_read_.push_back(read_of[sequence]);
  candidate_read_.resize(round_up(candidates, options.reads), candidate_read_.front());

  // Padding rows are a root of their own.
  sizes_.rows = round_up<int64_t>(row, options.rows);
  const int32_t extra = static_cast<int32_t>(sizes_.rows) - row;
  if (extra > 0) node_.push_back({nullptr, row, extra, 0, -1, -1, 0});
}

void PackedLayout::plan_states(int64_t multiple) {
  std::vector<bool> has_child(node_.size());
  for (const Node& node : node_) {
    if (node.parent >= 0) has_child[node.parent] = true;
  }
  int32_t slots = 0, tiles = 0;
  int64_t chunks = 0;
  for (size_t i = 0; i < node_.size(); ++i) {
    if (has_child[i]) node_[i].slot = slots++;
    node_[i].first_tile = tiles;
    tiles += ceil_div(node_[i].length, kTileRows);
    chunks += ceil_div(node_[i].length, kChunkRows);
  }
  sizes_.nodes = round_up<int64_t>(node_.size(), multiple);
  sizes_.chunks = round_up(chunks, multiple);
  sizes_.node_tiles = round_up<int64_t>(tiles, multiple);
  sizes_.node_slots = round_up<int64_t>(slots, multiple);
}

PackedLayout::Tiles PackedLayout::plan_tiles(const std::vector<Run>& runs, const int32_t* query_row,
                                             int64_t few_queries) const {
  // A node as the queries of one tile see it: rows up to `end`, by those in `bits`.
  struct Seen {
    int32_t tile;
    int32_t end;
    uint32_t bits;
  };
  std::vector<Seen> seen(node_.size(), {-1, 0, 0});
  std::vector<int32_t> nodes;

  const int32_t total = runs.back().end;
  Tiles plan;
  plan.queries = total <= few_queries ? kTileQueriesOfFew : kTileQueriesOfMany;
  plan.tile.reserve(ceil_div(total, plan.queries));
  size_t run = 0;
  for (int32_t tile = 0, begin = 0; begin < total; ++tile, begin += plan.queries) {
    const int32_t end = std::min(begin + plan.queries, total);
    // The nodes of the tile's paths; bits of own queries alone.
    nodes.clear();
    while (run < runs.size() && runs[run].begin < end) {
      const int32_t first = std::max(runs[run].begin, begin) - begin, last = std::min(runs[run].end, end) - 1;
      int32_t node = runs[run].node;
      const uint32_t bits = (uint32_t{1} << (last + 1 - begin)) - (uint32_t{1} << first);
      seen[node] = {tile, (query_row != nullptr ? query_row[last] : last) + 1, bits};
      nodes.push_back(node);
      while ((node = node_[node].parent) >= 0) {
        // What is above a node that was met before was met with it.
        const bool met = seen[node].tile == tile;
        seen[node] = {tile, node_[node].end(), met ? seen[node].bits : 0};
        if (met) break;
        nodes.push_back(node);
      }
      if (runs[run].end > end) break;
      ++run;
    }
    // Nodes are numbered in the order of their rows, a parent before its children.
    std::sort(nodes.begin(), nodes.end());
    for (size_t i = nodes.size(); i-- > 0;) {
      const int32_t parent = node_[nodes[i]].parent;
      if (parent >= 0) seen[parent].bits |= seen[nodes[i]].bits;
    }
    const int32_t first_range = static_cast<int32_t>(plan.range.size());
    int32_t keys = 0, range_end = 0;
    uint32_t range_bits = 0;
    for (const int32_t node : nodes) {
      const int32_t start = node_[node].start;
      const Seen& found = seen[node];
      if (keys > 0 && start == range_end && found.bits == range_bits) {
        plan.range.pop_back();
      } else if (keys > 0 && start != range_end && keys % kRunKeys != 0) {
        const int32_t shift = range_end - keys;
        keys = round_up(keys, kRunKeys);
        plan.range.push_back({{shift, keys, 0, 0}});
      }
      const int32_t shift = start - keys;
      keys += found.end - start;
      plan.range.push_back({{shift, keys, static_cast<int32_t>(found.bits), 0}});
      range_end = found.end;
      range_bits = found.bits;
    }
    plan.tile.push_back({{begin, end - begin, first_range, keys}});
  }
  size_t padded = 1;
  while (padded < plan.range.size()) padded *= 2;
  plan.range.resize(padded);
  return plan;
}

void PackedLayout::write(int32_t* packed) const {
  Writer writer(packed);
  const int64_t rows = sizes_.rows;
  int32_t* const token = writer.table(rows);
  int32_t* const position = writer.table(rows);
  int32_t* const predecessor = writer.table(3 * rows);
  int32_t* const node_table = writer.table(kNodeColumns * sizes_.nodes);
  int32_t* const chunk_table = writer.table(4 * sizes_.chunks);
  int32_t* const query_row = writer.table(rows);
  int32_t* const query_first = writer.table(rows);
  writer.copy(every_.tile);
  writer.copy(every_.range);
  writer.copy(read_row_);
  int32_t* const read_first = writer.table(sizes_.reads);
  writer.copy(read_.tile);
  writer.copy(read_.range);
  writer.copy(read_row_);
  writer.copy(candidate_read_);

  int32_t* node_entry = node_table;
  int32_t* chunk_entry = chunk_table;
  for (const Node& node : node_) {
    const size_t bytes = node.length * sizeof(int32_t);
    if (node.token != nullptr) {
      std::memcpy(token + node.start, node.token, bytes);
    } else {
      std::memset(token + node.start, 0, bytes);
    }
    for (int32_t i = 0; i < node.length; ++i) {
      const int32_t row = node.start + i;
      position[row] = node.depth + i;
      query_row[row] = row;
      query_first[row] = node.start;
      int32_t* const back = predecessor + int64_t{3} * row;
      back[0] = row - 1;
      back[1] = row - 2;
      back[2] = row - 3;
    }
    // The rows before the first three may be those of the nodes above.
    int32_t before[3] = {-1, -1, -1};
    if (node.parent >= 0) {
      before[0] = node_[node.parent].end() - 1;
      std::memcpy(before + 1, predecessor + int64_t{3} * before[0], 2 * sizeof(int32_t));
    }
    for (int32_t i = 0; i < std::min(node.length, 3); ++i) {
      std::memcpy(predecessor + int64_t{3} * (node.start + i) + i, before, (3 - i) * sizeof(int32_t));
    }

    const int32_t source = node.parent >= 0 ? node_[node.parent].slot : -1;
    const int32_t entry[kNodeColumns] = {node.start,      node.length, source, node.slot,
                                         node.first_tile, 0,           0,      0};
    node_entry = std::copy(entry, entry + kNodeColumns, node_entry);
    for (int32_t done = 0; done < node.length; done += kChunkRows) {
      const int32_t chunk[4] = {node.start + done, std::min(node.length - done, kChunkRows),
                                node.first_tile + done / kTileRows, 0};
      chunk_entry = std::copy(chunk, chunk + 4, chunk_entry);
    }
  }
  std::fill(node_entry, node_table + kNodeColumns * sizes_.nodes, 0);
  std::fill(chunk_entry, chunk_table + 4 * sizes_.chunks, 0);
  for (const Run& run : read_run_) {
    std::fill(read_first + run.begin, read_first + run.end, node_[run.node].start);
  }
}

}  // namespace openjev_fast
