// One product with a weight, computed in one chosen way.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace openjev_fast {

// A way to compute a product: Choice of openjev_fast_plugin/ops/_choices.py, field by field.
struct Choice {
  enum Way : int64_t { kPytorch, kKernel, kCublasLt };

  int64_t way;
  int64_t band;
  int64_t tile;
  int64_t parts;
  bool fused;
  int64_t form;
  int64_t partials;
  int64_t workspace;
  // In the numbers that the choice was read from.
  at::IntArrayRef algorithm;
};

// The choice that numbers hold from `next` on, as its method `encoded` lists it; `next` is moved behind it.
Choice read_choice(at::IntArrayRef numbers, size_t& next);

// x [N, K] times weight [O, K] transposed, bfloat16, as the ops of ops/linear.py return it: [N, O], partial sums
// [S, N, O] float32, or with silu [N, O / 2], activated.
at::Tensor product(const at::Tensor& x, const at::Tensor& weight, bool silu, const Choice& choice);

}  // namespace openjev_fast
