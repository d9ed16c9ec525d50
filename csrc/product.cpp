// Products in every way there is: PyTorch's, in one call or in bands of the weight's rows, our kernel, and one
// algorithm of cuBLASLt. As torch.ops.openjev_fast_cuda.product, with the numbers of one choice.
#include "product.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "ops.h"

namespace openjev_fast {
namespace {

using at::Tensor;

// Numbers of a choice before those of its algorithm, the last of them how many these are.
constexpr size_t kFields = 9;

[[noreturn]] void fail(const std::string& message) { TORCH_CHECK(false, "product: " + message); }

// `band` rows of the weight at a time, each call into its columns of one product; an algorithm computes what is left.
Tensor by_bands(const Tensor& x, const Tensor& weight, const Choice& choice) {
  const int64_t features = weight.size(0);
  if (!choice.algorithm.empty() && features % choice.band == 0) {
    fail("bands of " + std::to_string(choice.band) + " leave nothing of " + std::to_string(features) +
         " rows to an algorithm");
  }
  Tensor found = at::empty({x.size(0), features}, x.options());
  for (int64_t first = 0; first < features; first += choice.band) {
    const int64_t count = std::min(choice.band, features - first);
    const Tensor part = weight.narrow(0, first, count);
    Tensor columns = found.narrow(1, first, count);
    if (count < choice.band && !choice.algorithm.empty()) {
      cublaslt_matmul_into(columns, x, part, choice.form, choice.algorithm, choice.workspace);
    } else {
      at::mm_out(columns, x, part.t());
    }
  }
  return found;
}

Tensor multiplied(const Tensor& x, const Tensor& weight, const Choice& choice) {
  switch (choice.way) {
    case Choice::kKernel:
      return linear_sm90(x, weight, choice.fused, choice.tile, choice.parts);
    case Choice::kCublasLt:
      return cublaslt_matmul(x, weight, choice.form, choice.partials, choice.algorithm, choice.workspace);
    case Choice::kPytorch:
      return choice.band > 0 ? by_bands(x, weight, choice) : at::linear(x, weight);
    default:
      fail("there is no way " + std::to_string(choice.way));
  }
}

Tensor product_by_numbers(const Tensor& x, const Tensor& weight, bool silu, at::IntArrayRef numbers) {
  size_t next = 0;
  const Choice choice = read_choice(numbers, next);
  if (next != numbers.size()) fail("one choice is expected, more numbers follow it");
  return product(x, weight, silu, choice);
}

}  // namespace

Choice read_choice(at::IntArrayRef numbers, size_t& next) {
  if (next + kFields > numbers.size()) fail("a choice is at least " + std::to_string(kFields) + " numbers");
  const at::IntArrayRef fields = numbers.slice(next, kFields);
  next += kFields;
  const int64_t words = fields.back();
  if (words < 0 || words > static_cast<int64_t>(numbers.size() - next)) {
    fail("a choice ends before the " + std::to_string(words) + " numbers of its algorithm");
  }
  const at::IntArrayRef algorithm = numbers.slice(next, static_cast<size_t>(words));
  next += static_cast<size_t>(words);
  return {fields[0], fields[1], fields[2], fields[3], fields[4] != 0,
          fields[5], fields[6], fields[7], algorithm};
}

Tensor product(const Tensor& x, const Tensor& weight, bool silu, const Choice& choice) {
  const Tensor found = multiplied(x, weight, choice);
  return silu && !choice.fused ? silu_mul(found) : found;
}

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) { library.def("product", &product_by_numbers); }

}  // namespace openjev_fast
