// The bindings' checks, in the order dtype, device, shape, strides; every message names the op and the
// tensor. Messages are put together without iostreams: in a binary that links libstdc++ statically those
// crash on first use.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <string>

namespace openjev_fast {

// What a kernel needs of a tensor's strides.
enum class Strides {
  kContiguous,
  // Only the last dimension is contiguous; the others may be slices.
  kLastContiguous,
};

inline std::string to_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

// Checks of one call. `device` is that of the first tensor.
class Checker {
 public:
  Checker(const char* op, const at::Tensor& first) : op_(op), device_(first.device()) {}

  [[noreturn]] void fail(const std::string& message) const {
    TORCH_CHECK(false, std::string(op_) + ": " + message);
  }

  void tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef shape,
              Strides strides = Strides::kContiguous) const {
    if (tensor.scalar_type() != dtype) {
      fail(std::string(name) + " must be " + c10::toString(dtype) + ", it is " +
           c10::toString(tensor.scalar_type()));
    }
    if (!device_.is_cuda()) fail(std::string(name) + " must be on a CUDA device, it is on " + device_.str());
    if (tensor.device() != device_) {
      fail(std::string(name) + " must be on " + device_.str() + " like the first tensor, it is on " +
           tensor.device().str());
    }
    if (tensor.sizes() != shape) {
      fail(std::string(name) + " must have shape " + to_text(shape) + ", it has " + to_text(tensor.sizes()));
    }
    if (strides == Strides::kContiguous && !tensor.is_contiguous()) {
      fail(std::string(name) + " must be contiguous, its strides are " + to_text(tensor.strides()));
    }
    if (strides == Strides::kLastContiguous && tensor.size(-1) > 1 && tensor.stride(-1) != 1) {
      fail(std::string(name) + " must have a contiguous last dimension, its strides are " +
           to_text(tensor.strides()));
    }
  }

  void rank(const at::Tensor& tensor, const char* name, int64_t dimensions) const {
    if (tensor.dim() != dimensions) {
      fail(std::string(name) + " must have " + std::to_string(dimensions) + " dimensions, it has shape " +
           to_text(tensor.sizes()));
    }
  }

  void at_most(int64_t value, int64_t limit, const char* what) const {
    if (value > limit) {
      fail(std::string(what) + " must be at most " + std::to_string(limit) + ", found " +
           std::to_string(value));
    }
  }

  void multiple(int64_t value, int64_t of, const char* what) const {
    if (value % of != 0) {
      fail(std::string(what) + " must be a multiple of " + std::to_string(of) + ", found " +
           std::to_string(value));
    }
  }

  // Kernels and grids count such quantities with 31 bits.
  void fits_int32(int64_t value, const char* what) const { at_most(value, (int64_t{1} << 31) - 1, what); }

  void launched(cudaError_t error) const {
    if (error != cudaSuccess) fail(std::string("launch failed: ") + cudaGetErrorString(error));
  }

 private:
  const char* op_;
  at::Device device_;
};

}  // namespace openjev_fast
