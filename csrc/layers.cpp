// The layers of a forward in one call, so that the host takes microseconds an op and none of Python's lock; the one
// file of these that knows the model. It follows forward_by_ops of openjev_fast_plugin/forward.py step by step, for
// layouts without reuse: that is where the maths is explained, and the two change together. The same kernels in the
// same order, so the same bits.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "ops.h"
#include "product.h"

namespace openjev_fast {
namespace {

using at::Tensor;

[[noreturn]] void fail(const std::string& message) { TORCH_CHECK(false, "layers: " + message); }

// Ops of openjev_fast_plugin/ops/linear.py, in the order of OPS of ops/_choices.py.
enum Op : int64_t { kLinear, kLinearSiluMul, kLinearUpdate };

// The products of a forward, each in the way chosen for its op and sizes.
class Products {
 public:
  // numbers: of every product its op, rows, features and columns, and a choice.
  explicit Products(at::IntArrayRef numbers) {
    size_t next = 0;
    while (next < numbers.size()) {
      if (next + kSizes > numbers.size()) fail("a product is an op, rows, features and columns");
      const at::IntArrayRef sizes = numbers.slice(next, kSizes);
      next += kSizes;
      found_.push_back({sizes[0], sizes[1], sizes[2], sizes[3], read_choice(numbers, next)});
    }
  }

  Tensor compute(Op op, const Tensor& x, const Tensor& weight) const {
    for (const Product& one : found_) {
      if (one.op == op && one.rows == x.size(0) && one.features == weight.size(0) &&
          one.columns == weight.size(1)) {
        return product(x, weight, op == kLinearSiluMul, one.choice);
      }
    }
    fail("no choice is given for op " + std::to_string(op) + " of " + std::to_string(x.size(0)) + " rows, " +
         std::to_string(weight.size(0)) + " features and " + std::to_string(weight.size(1)) + " columns");
  }

 private:
  struct Product {
    int64_t op;
    int64_t rows;
    int64_t features;
    int64_t columns;
    Choice choice;
  };
  static constexpr size_t kSizes = 4;

  std::vector<Product> found_;
};

// The weights of all layers, in the order of the fields of Weights.
class WeightReader {
 public:
  explicit WeightReader(at::TensorList weights) : weights_(weights) {}

  const Tensor& next() {
    if (read_ == weights_.size()) fail("there are more layers than weights");
    return weights_[read_++];
  }

  bool at_end() const { return read_ == weights_.size(); }

 private:
  at::TensorList weights_;
  size_t read_ = 0;
};

// Queries of attention: tables and number of an AttentionPlan.
struct Queries {
  const Tensor& row;
  const Tensor& tile;
  const Tensor& tile_range;
  int64_t tile_queries;
};

// What every layer reads beside its weights; sizes as Shapes has them.
struct Forward {
  const Products products;
  const Tensor& cos;
  const Tensor& sin;
  const Tensor& predecessor;
  const Tensor& node;
  const Tensor& node_chunk;
  int64_t node_tiles;
  int64_t node_slots;
  const Queries queries;
  const Queries read_queries;
  int64_t key_heads;
  int64_t key_dim;
  int64_t value_heads;
  int64_t value_dim;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
  double eps;
};

// Gated DeltaNet over every row of normed; the output of the rows in `read` only, where given.
Tensor linear_attention(const Forward& f, WeightReader& weights, const Tensor& normed, const Tensor* read) {
  const Tensor& project = weights.next();
  const Tensor& conv = weights.next();
  const Tensor& a_log = weights.next();
  const Tensor& dt_bias = weights.next();
  const Tensor& norm = weights.next();
  const Tensor& output = weights.next();
  const int64_t values = f.value_heads * f.value_dim, channels = 2 * f.key_heads * f.key_dim + values;
  Tensor qkv, z, ba;
  if (read == nullptr) {
    const Tensor projected = f.products.compute(kLinear, normed, project);
    qkv = projected.narrow(1, 0, channels);
    z = projected.narrow(1, channels, values);
    ba = projected.narrow(1, channels + values, 2 * f.value_heads);
  } else {
    qkv = f.products.compute(kLinear, normed, project.narrow(0, 0, channels));
    z = f.products.compute(kLinear, normed.index_select(0, *read), project.narrow(0, channels, values));
    ba = f.products.compute(kLinear, normed, project.narrow(0, channels + values, 2 * f.value_heads));
  }
  const Tensor b = ba.narrow(1, 0, f.value_heads), a = ba.narrow(1, f.value_heads, f.value_heads);
  const auto [q, k, v, g, beta] =
      delta_prepare(qkv, b, a, f.predecessor, conv, a_log, dt_bias, f.key_heads, f.key_dim);
  Tensor mixed = delta_rule(q, k, v, g, beta, f.node, f.node_chunk, f.node_tiles, f.node_slots, std::nullopt);
  if (read != nullptr) mixed = mixed.index_select(0, *read);
  z = z.unflatten(1, {f.value_heads, f.value_dim});
  return f.products.compute(kLinearUpdate, gated_rms_norm(mixed, z, norm, f.eps), output);
}

// Gated attention of every row of normed; queries and output of the rows in `read` only, where given.
Tensor full_attention(const Forward& f, WeightReader& weights, const Tensor& normed, const Tensor* read) {
  const Tensor& project = weights.next();
  const Tensor& q_norm = weights.next();
  const Tensor& k_norm = weights.next();
  const Tensor& output = weights.next();
  const int64_t query_width = 2 * f.query_heads * f.head_dim, key_width = f.kv_heads * f.head_dim;
  Tensor q_gate, keys, values, q_cos = f.cos, q_sin = f.sin;
  if (read == nullptr) {
    const Tensor projected = f.products.compute(kLinear, normed, project);
    q_gate = projected.narrow(1, 0, query_width);
    keys = projected.narrow(1, query_width, key_width);
    values = projected.narrow(1, query_width + key_width, key_width);
  } else {
    q_gate = f.products.compute(kLinear, normed.index_select(0, *read), project.narrow(0, 0, query_width));
    const Tensor both = f.products.compute(kLinear, normed, project.narrow(0, query_width, 2 * key_width));
    keys = both.narrow(1, 0, key_width);
    values = both.narrow(1, key_width, key_width);
    q_cos = f.cos.index_select(0, *read);
    q_sin = f.sin.index_select(0, *read);
  }
  const Queries& queries = read == nullptr ? f.queries : f.read_queries;
  q_gate = q_gate.unflatten(1, {f.query_heads, 2 * f.head_dim});
  const Tensor gate = q_gate.narrow(2, f.head_dim, f.head_dim);
  keys = keys.unflatten(1, {f.kv_heads, f.head_dim});
  values = values.unflatten(1, {f.kv_heads, f.head_dim});
  const auto [q, k] = attention_prepare(q_gate.narrow(2, 0, f.head_dim), keys, q_norm, k_norm, q_cos, q_sin,
                                        f.cos, f.sin, f.eps);
  const double scale = std::pow(static_cast<double>(f.head_dim), -0.5);
  const Tensor mixed = tree_attention(q, k, values, gate, scale, queries.row, queries.tile,
                                      queries.tile_range, queries.tile_queries);
  return f.products.compute(kLinearUpdate, mixed, output);
}

// residual: [N, hidden], the embeddings. linear_attention: of every layer whether it is one, else full attention.
// Returns the residual stream of the read rows before the last layer's update, and that update, of either kind.
std::tuple<Tensor, Tensor> layers(const Tensor& residual, const Tensor& cos, const Tensor& sin,
                                  const Tensor& predecessor, const Tensor& read_row, const Tensor& node,
                                  const Tensor& node_chunk, int64_t node_tiles, int64_t node_slots,
                                  const Tensor& query_row, const Tensor& tile, const Tensor& tile_range,
                                  int64_t tile_queries, const Tensor& read_query_row, const Tensor& read_tile,
                                  const Tensor& read_tile_range, int64_t read_tile_queries,
                                  at::TensorList weights, at::IntArrayRef linear_attention_layers,
                                  int64_t key_heads, int64_t key_dim, int64_t value_heads, int64_t value_dim,
                                  int64_t query_heads, int64_t kv_heads, int64_t head_dim, double eps,
                                  at::IntArrayRef choices) {
  const Forward f{Products(choices),
                  cos,
                  sin,
                  predecessor,
                  node,
                  node_chunk,
                  node_tiles,
                  node_slots,
                  {query_row, tile, tile_range, tile_queries},
                  {read_query_row, read_tile, read_tile_range, read_tile_queries},
                  key_heads,
                  key_dim,
                  value_heads,
                  value_dim,
                  query_heads,
                  kv_heads,
                  head_dim,
                  eps};
  WeightReader reader(weights);
  const size_t count = linear_attention_layers.size();
  if (count == 0) fail("a model has layers");
  Tensor hidden = residual, normed;
  std::optional<Tensor> update;
  for (size_t index = 0; index < count; ++index) {
    const Tensor* const read = index + 1 == count ? &read_row : nullptr;
    std::tie(hidden, normed) = add_rms_norm(hidden, update, reader.next(), eps);
    update = linear_attention_layers[index] != 0 ? linear_attention(f, reader, normed, read)
                                                 : full_attention(f, reader, normed, read);
    if (read != nullptr) hidden = hidden.index_select(0, *read);
    std::tie(hidden, normed) = add_rms_norm(hidden, update, reader.next(), eps);
    const Tensor& gate_up = reader.next();
    const Tensor& down = reader.next();
    update = f.products.compute(kLinearUpdate, f.products.compute(kLinearSiluMul, normed, gate_up), down);
  }
  if (!reader.at_end()) fail("there are more weights than layers");
  return {hidden, *update};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) {
  // Named, since Python gives them by name.
  library.def(
      "layers(Tensor residual, Tensor cos, Tensor sin, Tensor predecessor, Tensor read_row, Tensor node, "
      "Tensor node_chunk, int node_tiles, int node_slots, Tensor query_row, Tensor tile, Tensor tile_range, "
      "int tile_queries, Tensor read_query_row, Tensor read_tile, Tensor read_tile_range, "
      "int read_tile_queries, Tensor[] weights, int[] linear_attention, int key_heads, int key_dim, "
      "int value_heads, int value_dim, int query_heads, int kv_heads, int head_dim, float eps, "
      "int[] choices) -> (Tensor, Tensor)",
      &layers);
}

}  // namespace openjev_fast
