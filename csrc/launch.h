// Launchers of every op. Each enqueues on `stream`, allocates nothing, does not synchronise, may be captured
// in a graph, and returns the launch's error. Sizes and strides are in elements; letters as in the ops'
// docstrings; the contract of each op is the comment at the top of its .cuh. Callers skip a launch that would
// write nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace openjev_fast {

// partials: 0 without update, -1 for a bfloat16 update [N, H], else S = 1, 2 or 4 for float32 [S, N, H].
constexpr int kNoUpdate = 0;
constexpr int kModelUpdate = -1;

cudaError_t launch_add_rms_norm(const void* residual, const void* update, int partials, const void* weight,
                                void* hidden, void* normed, int64_t rows, int64_t width, float eps,
                                cudaStream_t stream);

cudaError_t launch_head_score(const void* residual, const void* update, int partials, const int32_t* rows,
                              const void* norm_weight, const float* head_weight, const float* head_bias,
                              float* score, int64_t candidates, int64_t residual_rows, int64_t width,
                              float eps, cudaStream_t stream);

// x and w as linear_sm90.cuh has them; silu: the halves of w are gate and up. A block multiplies `tile` rows of w, of
// either half with silu; `parts` blocks share a tile. Tiles there are kernels for: linear_sm90.cu.
struct Linear {
  const void* x;
  int64_t x_row_stride;
  const void* w;
  void* out;
  int64_t rows;
  int64_t features;
  int64_t columns;
  bool silu;
  int tile;
  int parts;
};

cudaError_t launch_linear_sm90(const Linear& arguments, cudaStream_t stream);

cudaError_t launch_silu_mul(const void* gate_up, int64_t row_stride, void* out, int64_t rows, int64_t width,
                            cudaStream_t stream);

cudaError_t launch_gate_mul(const void* x, int64_t x_row_stride, int64_t x_head_stride, const void* gate,
                            int64_t gate_row_stride, int64_t gate_head_stride, void* out, int64_t rows,
                            int64_t heads, int64_t dim, cudaStream_t stream);

cudaError_t launch_gated_rms_norm(const void* x, int64_t x_row_stride, int64_t x_head_stride, const void* z,
                                  int64_t z_row_stride, int64_t z_head_stride, const void* weight, void* out,
                                  int64_t rows, int64_t heads, int64_t dim, float eps, cudaStream_t stream);

struct DeltaPrepare {
  const void* qkv;
  int64_t qkv_row_stride;
  const void* b;
  int64_t b_row_stride;
  const void* a;
  int64_t a_row_stride;
  const int32_t* predecessor;
  const void* conv_weight;
  const void* a_log;
  const void* dt_bias;
  void* q;
  void* k;
  void* v;
  float* g;
  float* beta;
  int64_t rows;
  int channels;
  int key_heads;
  int key_dim;
  int value_heads;
};

cudaError_t launch_delta_prepare(const DeltaPrepare& arguments, cudaStream_t stream);

// Tensors and tables as delta_rule's docstring has them, contiguous, on the device. work holds delta_rule_work()
// bytes, state node_slots slots, flag delta_rule_flags() ints; all three are scratch. kept: null without kept states.
struct DeltaRule {
  const void* q;
  const void* k;
  const void* v;
  const float* g;
  const float* beta;
  const int32_t* node;
  const int32_t* chunk;
  void* out;
  void* work;
  float* state;
  float* kept;
  int32_t* flag;
  int64_t flags;
  float scale;
  int nodes;
  int chunks;
  int key_heads;
  int value_heads;
};

int64_t delta_rule_work(int64_t tiles, int64_t value_heads);
int64_t delta_rule_flags(int64_t slots, int64_t value_heads);

cudaError_t launch_delta_rule(const DeltaRule& arguments, cudaStream_t stream);

// One of the two tensors attention_prepare treats alike.
struct RotaryInput {
  const void* x;
  int64_t row_stride;
  int64_t head_stride;
  const void* weight;
  const void* cos;
  const void* sin;
  void* out;
  int64_t rows;
  int heads;
};

cudaError_t launch_attention_prepare(const RotaryInput& q, const RotaryInput& k, int dim, int pairs,
                                     float eps, cudaStream_t stream);

// Strides in elements; tables as AttentionPlan holds them, on the device.
struct TreeAttention {
  const void* q;
  const void* k;
  int64_t k_row_stride;
  int64_t k_head_stride;
  const void* v;
  int64_t v_row_stride;
  int64_t v_head_stride;
  const void* gate;
  int64_t gate_row_stride;
  int64_t gate_head_stride;
  const int32_t* query_row;
  const int32_t* tile;
  const int32_t* tile_range;
  void* out;
  // scale / ln 2: the softmax is of powers of two.
  float scale_log2;
  int64_t rows;
  int64_t tiles;
  int tile_queries;
  int query_heads;
  int kv_heads;
  int dim;
};

cudaError_t launch_tree_attention(const TreeAttention& arguments, cudaStream_t stream);

// Heads of 256 on compute capability 9; launch_tree_attention calls it there.
cudaError_t launch_tree_attention_sm90(const TreeAttention& arguments, cudaStream_t stream);

}  // namespace openjev_fast
