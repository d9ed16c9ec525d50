// The kernels as ops of torch.ops.openjev_fast_cuda: checks, output allocation, launch on the current stream.
// The public ops, torch.ops.openjev_fast, reach them through openjev_fast_plugin/ops/_cuda.py.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "check.h"
#include "launch.h"
#include "ops.h"

namespace openjev_fast {
namespace {

using at::Tensor;

constexpr at::ScalarType kBFloat16 = at::ScalarType::BFloat16;
constexpr at::ScalarType kFloat32 = at::ScalarType::Float;
constexpr at::ScalarType kInt32 = at::ScalarType::Int;
// Longest head the kernels take, kMaxHead of common.cuh.
constexpr int64_t kLongestHead = 256;

cudaStream_t current_stream(const Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.get_device()).stream();
}

Tensor empty(at::IntArrayRef shape, const Tensor& like, at::ScalarType dtype = kBFloat16) {
  return at::empty(shape, like.options().dtype(dtype));
}

// The number launchers take for an update [M, H] of the model's dtype or [S, M, H] of partial sums.
int check_update(const Checker& check, const Tensor& update, int64_t rows, int64_t width) {
  if (update.dim() != 3) {
    check.tensor(update, "update", kBFloat16, {rows, width});
    return kModelUpdate;
  }
  const int64_t partials = update.size(0);
  if (partials != 1 && partials != 2 && partials != 4) {
    check.fail("update must hold 1, 2 or 4 partial sums, it has shape " + to_text(update.sizes()));
  }
  check.tensor(update, "update", kFloat32, {partials, rows, width});
  return static_cast<int>(partials);
}

}  // namespace

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& residual, const std::optional<Tensor>& update,
                                        const Tensor& weight, double eps) {
  const Checker check("add_rms_norm", residual);
  check.rank(residual, "residual", 2);
  const int64_t rows = residual.size(0), width = residual.size(1);
  check.tensor(residual, "residual", kBFloat16, {rows, width});
  const int partials = update ? check_update(check, *update, rows, width) : kNoUpdate;
  check.tensor(weight, "weight", kBFloat16, {width});
  check.fits_int32(rows, "rows of residual");

  const c10::cuda::CUDAGuard guard(residual.device());
  Tensor hidden = empty({rows, width}, residual), normed = empty({rows, width}, residual);
  if (residual.numel() > 0) {
    check.launched(launch_add_rms_norm(residual.const_data_ptr(), update ? update->const_data_ptr() : nullptr,
                                       partials, weight.const_data_ptr(), hidden.mutable_data_ptr(),
                                       normed.mutable_data_ptr(), rows, width, static_cast<float>(eps),
                                       current_stream(residual)));
  }
  return {hidden, normed};
}

Tensor head_score(const Tensor& residual, const Tensor& update, const Tensor& rows, const Tensor& norm_weight,
                  const Tensor& head_weight, const Tensor& head_bias, double eps) {
  const Checker check("head_score", residual);
  check.rank(residual, "residual", 2);
  const int64_t residual_rows = residual.size(0), width = residual.size(1);
  check.tensor(residual, "residual", kBFloat16, {residual_rows, width});
  const int partials = check_update(check, update, residual_rows, width);
  check.rank(rows, "rows", 1);
  const int64_t candidates = rows.size(0);
  check.tensor(rows, "rows", kInt32, {candidates});
  check.tensor(norm_weight, "norm_weight", kBFloat16, {width});
  check.tensor(head_weight, "head_weight", kFloat32, {width});
  check.tensor(head_bias, "head_bias", kFloat32, {});
  check.fits_int32(candidates, "length of rows");

  const c10::cuda::CUDAGuard guard(residual.device());
  Tensor score = empty({candidates}, residual, kFloat32);
  if (candidates > 0) {
    check.launched(launch_head_score(residual.const_data_ptr(), update.const_data_ptr(), partials,
                                     rows.const_data_ptr<int32_t>(), norm_weight.const_data_ptr(),
                                     head_weight.const_data_ptr<float>(), head_bias.const_data_ptr<float>(),
                                     score.mutable_data_ptr<float>(), candidates, residual_rows, width,
                                     static_cast<float>(eps), current_stream(residual)));
  }
  return score;
}

Tensor silu_mul(const Tensor& gate_up) {
  const Checker check("silu_mul", gate_up);
  check.rank(gate_up, "gate_up", 2);
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  if (gate_up.size(1) % 2 != 0) {
    check.fail("gate_up must have an even number of columns, it has shape " + to_text(gate_up.sizes()));
  }
  check.tensor(gate_up, "gate_up", kBFloat16, {rows, 2 * width}, Strides::kLastContiguous);
  check.fits_int32(rows * (1 + width / 128), "blocks for gate_up");

  const c10::cuda::CUDAGuard guard(gate_up.device());
  Tensor out = empty({rows, width}, gate_up);
  if (out.numel() > 0) {
    check.launched(launch_silu_mul(gate_up.const_data_ptr(), gate_up.stride(0), out.mutable_data_ptr(), rows,
                                   width, current_stream(gate_up)));
  }
  return out;
}

Tensor gate_mul(const Tensor& x, const Tensor& gate) {
  const Checker check("gate_mul", x);
  check.rank(x, "x", 3);
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2);
  check.tensor(x, "x", kBFloat16, {rows, heads, dim}, Strides::kLastContiguous);
  check.tensor(gate, "gate", kBFloat16, {rows, heads, dim}, Strides::kLastContiguous);
  check.fits_int32(x.numel(), "elements of x");

  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = empty({rows, heads * dim}, x);
  if (out.numel() > 0) {
    check.launched(launch_gate_mul(x.const_data_ptr(), x.stride(0), x.stride(1), gate.const_data_ptr(),
                                   gate.stride(0), gate.stride(1), out.mutable_data_ptr(), rows, heads, dim,
                                   current_stream(x)));
  }
  return out;
}

Tensor gated_rms_norm(const Tensor& x, const Tensor& z, const Tensor& weight, double eps) {
  const Checker check("gated_rms_norm", x);
  check.rank(x, "x", 3);
  const int64_t rows = x.size(0), heads = x.size(1), dim = x.size(2);
  check.tensor(x, "x", kBFloat16, {rows, heads, dim}, Strides::kLastContiguous);
  check.tensor(z, "z", kBFloat16, {rows, heads, dim}, Strides::kLastContiguous);
  check.tensor(weight, "weight", kBFloat16, {dim});
  check.at_most(dim, kLongestHead, "the last dimension of x");
  check.fits_int32(rows * heads, "heads in all rows of x");

  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = empty({rows, heads * dim}, x);
  if (out.numel() > 0) {
    check.launched(launch_gated_rms_norm(x.const_data_ptr(), x.stride(0), x.stride(1), z.const_data_ptr(),
                                         z.stride(0), z.stride(1), weight.const_data_ptr(),
                                         out.mutable_data_ptr(), rows, heads, dim, static_cast<float>(eps),
                                         current_stream(x)));
  }
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> delta_prepare(const Tensor& qkv, const Tensor& b,
                                                                 const Tensor& a, const Tensor& predecessor,
                                                                 const Tensor& conv_weight,
                                                                 const Tensor& a_log, const Tensor& dt_bias,
                                                                 int64_t key_heads, int64_t key_dim) {
  const Checker check("delta_prepare", qkv);
  check.rank(qkv, "qkv", 2);
  check.rank(b, "b", 2);
  const int64_t rows = qkv.size(0), channels = qkv.size(1), value_heads = b.size(1);
  check.tensor(qkv, "qkv", kBFloat16, {rows, channels}, Strides::kLastContiguous);
  check.tensor(b, "b", kBFloat16, {rows, value_heads}, Strides::kLastContiguous);
  check.tensor(a, "a", kBFloat16, {rows, value_heads}, Strides::kLastContiguous);
  check.tensor(predecessor, "predecessor", kInt32, {rows, 3});
  check.tensor(conv_weight, "conv_weight", kBFloat16, {channels, 4});
  check.tensor(a_log, "a_log", kBFloat16, {value_heads});
  check.tensor(dt_bias, "dt_bias", kBFloat16, {value_heads});
  const int64_t values = channels - 2 * key_heads * key_dim;
  if (key_heads < 1 || key_dim < 1 || value_heads < 1 || values < 0 || values % value_heads != 0) {
    check.fail("columns of qkv must be 2 key_heads key_dim + value_heads value_dim, found " +
               std::to_string(channels) + " columns, key_heads " + std::to_string(key_heads) + ", key_dim " +
               std::to_string(key_dim) + ", value_heads " + std::to_string(value_heads));
  }
  check.at_most(key_dim, kLongestHead, "key_dim");
  check.at_most(channels, 1 << 20, "columns of qkv");

  const c10::cuda::CUDAGuard guard(qkv.device());
  Tensor q = empty({rows, key_heads, key_dim}, qkv), k = empty({rows, key_heads, key_dim}, qkv);
  Tensor v = empty({rows, value_heads, values / value_heads}, qkv);
  Tensor g = empty({rows, value_heads}, qkv, kFloat32), beta = empty({rows, value_heads}, qkv, kFloat32);
  if (rows > 0) {
    const DeltaPrepare arguments{qkv.const_data_ptr(),
                                 qkv.stride(0),
                                 b.const_data_ptr(),
                                 b.stride(0),
                                 a.const_data_ptr(),
                                 a.stride(0),
                                 predecessor.const_data_ptr<int32_t>(),
                                 conv_weight.const_data_ptr(),
                                 a_log.const_data_ptr(),
                                 dt_bias.const_data_ptr(),
                                 q.mutable_data_ptr(),
                                 k.mutable_data_ptr(),
                                 v.mutable_data_ptr(),
                                 g.mutable_data_ptr<float>(),
                                 beta.mutable_data_ptr<float>(),
                                 rows,
                                 static_cast<int>(channels),
                                 static_cast<int>(key_heads),
                                 static_cast<int>(key_dim),
                                 static_cast<int>(value_heads)};
    check.launched(launch_delta_prepare(arguments, current_stream(qkv)));
  }
  return {q, k, v, g, beta};
}

Tensor linear_sm90(const Tensor& x, const Tensor& weight, bool silu, int64_t tile, int64_t parts) {
  const Checker check("linear_sm90", x);
  check.rank(x, "x", 2);
  check.rank(weight, "weight", 2);
  const int64_t rows = x.size(0), columns = x.size(1), features = weight.size(0);
  check.tensor(x, "x", kBFloat16, {rows, columns}, Strides::kLastContiguous);
  check.tensor(weight, "weight", kBFloat16, {features, columns});
  check.multiple(features, silu ? 16 : 8, "rows of weight");
  check.multiple(columns, 64 * parts, "columns of x");
  check.multiple(x.stride(0), 8, "row stride of x");

  const c10::cuda::CUDAGuard guard(x.device());
  Tensor out = empty({rows, silu ? features / 2 : features}, x);
  if (out.numel() > 0) {
    check.launched(
        launch_linear_sm90({x.const_data_ptr(), x.stride(0), weight.const_data_ptr(), out.mutable_data_ptr(),
                            rows, features, columns, silu, static_cast<int>(tile), static_cast<int>(parts)},
                           current_stream(x)));
  }
  return out;
}

std::tuple<Tensor, Tensor> attention_prepare(const Tensor& q, const Tensor& k, const Tensor& q_weight,
                                             const Tensor& k_weight, const Tensor& q_cos, const Tensor& q_sin,
                                             const Tensor& k_cos, const Tensor& k_sin, double eps) {
  const Checker check("attention_prepare", q);
  check.rank(q, "q", 3);
  check.rank(k, "k", 3);
  check.rank(q_cos, "q_cos", 2);
  const int64_t q_rows = q.size(0), k_rows = k.size(0), dim = q.size(2), pairs = q_cos.size(1);
  check.tensor(q, "q", kBFloat16, {q_rows, q.size(1), dim}, Strides::kLastContiguous);
  check.tensor(k, "k", kBFloat16, {k_rows, k.size(1), dim}, Strides::kLastContiguous);
  check.tensor(q_weight, "q_weight", kBFloat16, {dim});
  check.tensor(k_weight, "k_weight", kBFloat16, {dim});
  check.tensor(q_cos, "q_cos", kBFloat16, {q_rows, pairs});
  check.tensor(q_sin, "q_sin", kBFloat16, {q_rows, pairs});
  check.tensor(k_cos, "k_cos", kBFloat16, {k_rows, pairs});
  check.tensor(k_sin, "k_sin", kBFloat16, {k_rows, pairs});
  check.at_most(dim, kLongestHead, "the last dimension of q");
  check.at_most(2 * pairs, dim, "twice the columns of q_cos");
  check.fits_int32(q_rows * q.size(1) + k_rows * k.size(1), "heads in all rows of q and k");

  const c10::cuda::CUDAGuard guard(q.device());
  Tensor q_out = empty(q.sizes(), q), k_out = empty(k.sizes(), k);
  const RotaryInput q_input{q.const_data_ptr(),
                            q.stride(0),
                            q.stride(1),
                            q_weight.const_data_ptr(),
                            q_cos.const_data_ptr(),
                            q_sin.const_data_ptr(),
                            q_out.mutable_data_ptr(),
                            q_rows,
                            static_cast<int>(q.size(1))};
  const RotaryInput k_input{k.const_data_ptr(),
                            k.stride(0),
                            k.stride(1),
                            k_weight.const_data_ptr(),
                            k_cos.const_data_ptr(),
                            k_sin.const_data_ptr(),
                            k_out.mutable_data_ptr(),
                            k_rows,
                            static_cast<int>(k.size(1))};
  if (q_out.numel() + k_out.numel() > 0) {
    check.launched(launch_attention_prepare(q_input, k_input, static_cast<int>(dim), static_cast<int>(pairs),
                                            static_cast<float>(eps), current_stream(q)));
  }
  return {q_out, k_out};
}

// Schemas follow from the signatures; arguments are those of the public ops of the same names.
TORCH_LIBRARY(openjev_fast_cuda, library) {
  library.def("add_rms_norm", &add_rms_norm);
  library.def("attention_prepare", &attention_prepare);
  library.def("delta_prepare", &delta_prepare);
  library.def("gate_mul", &gate_mul);
  library.def("gated_rms_norm", &gated_rms_norm);
  library.def("head_score", &head_score);
  library.def("linear_sm90", &linear_sm90);
  library.def("silu_mul", &silu_mul);
}

}  // namespace openjev_fast
