// The ops of torch.ops.openjev_fast_cuda as functions, for those that are made of others: checks, output allocation,
// launch on the current stream. Arguments are those of the public ops of the same names; tables that only a portable
// implementation reads are left out.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace openjev_fast {

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& residual,
                                                const std::optional<at::Tensor>& update,
                                                const at::Tensor& weight, double eps);

at::Tensor silu_mul(const at::Tensor& gate_up);

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& z, const at::Tensor& weight, double eps);

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> delta_prepare(
    const at::Tensor& qkv, const at::Tensor& b, const at::Tensor& a, const at::Tensor& predecessor,
    const at::Tensor& conv_weight, const at::Tensor& a_log, const at::Tensor& dt_bias, int64_t key_heads,
    int64_t key_dim);

at::Tensor delta_rule(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                      const at::Tensor& beta, const at::Tensor& node, const at::Tensor& node_chunk,
                      int64_t node_tiles, int64_t node_slots, const std::optional<at::Tensor>& kept);

std::tuple<at::Tensor, at::Tensor> attention_prepare(const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& q_weight, const at::Tensor& k_weight,
                                                     const at::Tensor& q_cos, const at::Tensor& q_sin,
                                                     const at::Tensor& k_cos, const at::Tensor& k_sin,
                                                     double eps);

at::Tensor tree_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& gate, double scale, const at::Tensor& query_row,
                          const at::Tensor& tile, const at::Tensor& tile_range, int64_t tile_queries);

// tile and parts as in launch.h.
at::Tensor linear_sm90(const at::Tensor& x, const at::Tensor& weight, bool silu, int64_t tile, int64_t parts);

// form, partials, algorithm and workspace as in cublaslt_binding.cpp.
at::Tensor cublaslt_matmul(const at::Tensor& x, const at::Tensor& weight, int64_t form, int64_t partials,
                           at::IntArrayRef algorithm, int64_t workspace);

// Into out [N, O] bfloat16, whose rows may be apart, or [S, N, O] float32: S partial sums.
void cublaslt_matmul_into(const at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, int64_t form,
                          at::IntArrayRef algorithm, int64_t workspace);

}  // namespace openjev_fast
