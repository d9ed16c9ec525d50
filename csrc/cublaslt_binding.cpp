// Products x w^T by cuBLASLt, as ops of torch.ops.openjev_fast_cuda: which algorithms the library has for a product, and
// one of them, chosen by the caller, on the current stream.
//
// x is [N, K], rows may be apart; w [O, K] contiguous; both bfloat16. out is [N, O] bfloat16, rows may be apart, or
// with partials S > 1 the sums over each of S parts of the columns, [S, N, O] float32, one strided batch. Sums are
// float32 throughout: an algorithm that adds up parts of the columns by itself keeps them in float32 in its workspace,
// and adds them in a fixed order. A call runs the algorithm it is given or raises; it never chooses.
//
// An algorithm is the library's own 64 bytes, as eight integers: they mean something to the version they came from only.
// The library is the one that PyTorch has loaded. Nothing links to it: its functions are found at the first call. Its
// descriptors are made by its own functions, since their sizes differ between versions.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cublasLt.h>
#include <dlfcn.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "ops.h"

namespace openjev_fast {
namespace {

using at::Tensor;

constexpr int64_t kMostWorkspace = 32 << 20;
constexpr int kMostDevices = 64;
// Of pointers and rows, in bytes.
constexpr uint32_t kAlignment = 16;
constexpr int kWords = sizeof(cublasLtMatmulAlgo_t) / sizeof(int64_t);
static_assert(kWords == 8);
// Parts that the first of the proposed algorithms are tried with, beside those proposed.
constexpr std::array<int32_t, 3> kSplits = {2, 3, 4};
constexpr size_t kSplitFirst = 8;

// How the product is put to the library. Memory is the same in both: out is in row order.
enum Form : int64_t {
  // out^T = w x^T, columns first, as PyTorch has it: rows of w are the library's M, rows of x its N.
  kWeightFirst = 0,
  // out = x w^T, out in row order: the other way around.
  kRowsFirst = 1,
};
constexpr int64_t kForms = 2;

[[noreturn]] void fail(const std::string& message) { TORCH_CHECK(false, "cublaslt: " + message); }

struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusName) status_name;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoCapGetAttribute) capability;
  decltype(&cublasLtMatmulAlgoCheck) check;
  decltype(&cublasLtMatmulAlgoConfigSetAttribute) configure;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
};

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) fail(std::string("the loaded library has no ") + name);
}

Library load_library() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    fail(name +
         ", which PyTorch loads, cannot be found: " + (reason == nullptr ? "no reason given" : reason));
  }
  Library library;
  find(handle, "cublasLtCreate", library.create);
  find(handle, "cublasLtGetVersion", library.version);
  find(handle, "cublasLtGetStatusName", library.status_name);
  find(handle, "cublasLtMatmul", library.matmul);
  find(handle, "cublasLtMatmulAlgoCapGetAttribute", library.capability);
  find(handle, "cublasLtMatmulAlgoCheck", library.check);
  find(handle, "cublasLtMatmulAlgoConfigSetAttribute", library.configure);
  find(handle, "cublasLtMatmulAlgoGetHeuristic", library.heuristic);
  find(handle, "cublasLtMatmulDescCreate", library.desc_create);
  find(handle, "cublasLtMatmulDescDestroy", library.desc_destroy);
  find(handle, "cublasLtMatmulDescSetAttribute", library.desc_set);
  find(handle, "cublasLtMatmulPreferenceCreate", library.preference_create);
  find(handle, "cublasLtMatmulPreferenceDestroy", library.preference_destroy);
  find(handle, "cublasLtMatmulPreferenceSetAttribute", library.preference_set);
  find(handle, "cublasLtMatrixLayoutCreate", library.layout_create);
  find(handle, "cublasLtMatrixLayoutDestroy", library.layout_destroy);
  find(handle, "cublasLtMatrixLayoutSetAttribute", library.layout_set);
  return library;
}

const Library& library() {
  // Tried again by the next call where it raises.
  static const Library found = load_library();
  return found;
}

void succeed(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(std::string(what) + ": " + library().status_name(status));
}

// A handle belongs to one device and is kept: for the current device, whose index this is.
cublasLtHandle_t handle_of(int64_t device) {
  static std::mutex mutex;
  static std::array<cublasLtHandle_t, kMostDevices> handles = {};
  if (device < 0 || device >= kMostDevices) fail("no handle for device " + std::to_string(device));
  const std::lock_guard<std::mutex> lock(mutex);
  if (handles[device] == nullptr) succeed(library().create(&handles[device]), "cublasLtCreate");
  return handles[device];
}

// A descriptor, destroyed with this object.
template <typename Descriptor>
class Owned {
 public:
  explicit Owned(cublasStatus_t (*destroy)(Descriptor)) : destroy_(destroy) {}
  ~Owned() {
    if (value_ != nullptr) destroy_(value_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  Descriptor* created() { return &value_; }
  Descriptor get() const { return value_; }

 private:
  Descriptor value_ = nullptr;
  cublasStatus_t (*destroy_)(Descriptor);
};

struct Shape {
  int64_t rows;
  int64_t features;
  int64_t columns;
  int64_t x_row_stride;
  int64_t out_row_stride;
  int64_t form;
  int64_t partials;
};

void check_shape(const Shape& s) {
  if (s.form < 0 || s.form >= kForms) fail("there is no form " + std::to_string(s.form));
  if (s.partials != 1 && s.partials != 2 && s.partials != 4) {
    fail("partials must be 1, 2 or 4, found " + std::to_string(s.partials));
  }
  constexpr int64_t kEights = kAlignment / 2, kMost = (int64_t{1} << 31) - 1;
  if (s.rows < 1 || s.features < 1 || s.columns < 1 || s.features % kEights != 0 ||
      s.columns % (kEights * s.partials) != 0 || s.x_row_stride % kEights != 0 ||
      s.x_row_stride < s.columns || std::max({s.rows, s.features, s.columns}) > kMost) {
    fail("features, columns of each part and the row stride must be positive multiples of 8, found " +
         std::to_string(s.rows) + " rows, " + std::to_string(s.features) + " features, " +
         std::to_string(s.columns) + " columns in " + std::to_string(s.partials) + " parts, row stride " +
         std::to_string(s.x_row_stride));
  }
  if (s.out_row_stride < s.features || s.out_row_stride % kEights != 0 || s.out_row_stride > kMost ||
      (s.partials > 1 && s.out_row_stride != s.features)) {
    fail(
        "rows of the product must be multiples of 8 apart, those of partial sums lie one behind the other, "
        "found " +
        std::to_string(s.features) + " features, row stride " + std::to_string(s.out_row_stride) + ", " +
        std::to_string(s.partials) + " parts");
  }
}

// The product as the library's descriptors have it.
class Problem {
 public:
  explicit Problem(const Shape& s)
      : desc_(library().desc_destroy),
        x_(library().layout_destroy),
        w_(library().layout_destroy),
        out_(library().layout_destroy),
        x_first_(s.form == kRowsFirst) {
    check_shape(s);
    const Library& lt = library();
    succeed(lt.desc_create(desc_.created(), CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    const int32_t transposed = CUBLAS_OP_T, plain = CUBLAS_OP_N;
    set(lt.desc_set, desc_.get(), CUBLASLT_MATMUL_DESC_TRANSA, transposed);
    set(lt.desc_set, desc_.get(), CUBLASLT_MATMUL_DESC_TRANSB, plain);

    // Rows of x and w are columns to the library.
    const int64_t part = s.columns / s.partials;
    create(x_, CUDA_R_16BF, part, s.rows, s.x_row_stride);
    create(w_, CUDA_R_16BF, part, s.features, s.columns);
    const cudaDataType_t out_type = s.partials == 1 ? CUDA_R_16BF : CUDA_R_32F;
    if (x_first_) {
      create(out_, out_type, s.rows, s.features, s.out_row_stride);
      const int32_t row_order = CUBLASLT_ORDER_ROW;
      set(lt.layout_set, out_.get(), CUBLASLT_MATRIX_LAYOUT_ORDER, row_order);
    } else {
      create(out_, out_type, s.features, s.rows, s.out_row_stride);
    }
    if (s.partials > 1) {
      batch(x_, s.partials, part);
      batch(w_, s.partials, part);
      batch(out_, s.partials, s.rows * s.features);
    }
  }

  cublasLtMatmulDesc_t desc() const { return desc_.get(); }
  cublasLtMatrixLayout_t a() const { return x_first_ ? x_.get() : w_.get(); }
  cublasLtMatrixLayout_t b() const { return x_first_ ? w_.get() : x_.get(); }
  cublasLtMatrixLayout_t out() const { return out_.get(); }

 private:
  using Layout = Owned<cublasLtMatrixLayout_t>;

  template <typename Setter, typename Descriptor, typename Attribute, typename Value>
  static void set(Setter setter, Descriptor descriptor, Attribute attribute, const Value& value) {
    succeed(setter(descriptor, attribute, &value, sizeof(value)), "setting an attribute");
  }

  static void create(Layout& layout, cudaDataType_t type, int64_t rows, int64_t columns, int64_t stride) {
    succeed(library().layout_create(layout.created(), type, static_cast<uint64_t>(rows),
                                    static_cast<uint64_t>(columns), stride),
            "cublasLtMatrixLayoutCreate");
  }

  static void batch(const Layout& layout, int64_t count, int64_t offset) {
    const int32_t batches = static_cast<int32_t>(count);
    set(library().layout_set, layout.get(), CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batches);
    set(library().layout_set, layout.get(), CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, offset);
  }

  Owned<cublasLtMatmulDesc_t> desc_;
  Layout x_;
  Layout w_;
  Layout out_;
  bool x_first_;
};

using Heuristic = cublasLtMatmulHeuristicResult_t;

// Whether an algorithm computes this product here; then `found` has its workspace.
bool accepts(cublasLtHandle_t handle, const Problem& problem, const cublasLtMatmulAlgo_t& algorithm,
             Heuristic& found) {
  const cublasStatus_t status = library().check(handle, problem.desc(), problem.a(), problem.b(),
                                                problem.out(), problem.out(), &algorithm, &found);
  return status == CUBLAS_STATUS_SUCCESS && static_cast<int64_t>(found.workspaceSize) <= kMostWorkspace;
}

std::vector<Heuristic> proposed(cublasLtHandle_t handle, const Problem& problem, int64_t most) {
  const Library& lt = library();
  Owned<cublasLtMatmulPreference_t> preference(lt.preference_destroy);
  succeed(lt.preference_create(preference.created()), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    succeed(lt.preference_set(preference.get(), attribute, &value, sizeof(value)), "setting a preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kMostWorkspace));
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(attribute, kAlignment);
  }
  std::vector<Heuristic> results(static_cast<size_t>(most));
  int count = 0;
  const cublasStatus_t status =
      lt.heuristic(handle, problem.desc(), problem.a(), problem.b(), problem.out(), problem.out(),
                   preference.get(), static_cast<int>(most), results.data(), &count);
  // The library has none for such a product, in this form.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED)
    count = 0;
  else
    succeed(status, "cublasLtMatmulAlgoGetHeuristic");
  results.resize(static_cast<size_t>(count));
  results.erase(std::remove_if(results.begin(), results.end(),
                               [](const Heuristic& result) { return result.state != CUBLAS_STATUS_SUCCESS; }),
                results.end());
  return results;
}

// An algorithm that is to add up `splits` parts of the columns, in float32 in its workspace; false where it cannot.
bool split(cublasLtMatmulAlgo_t& algorithm, int32_t splits) {
  const Library& lt = library();
  int32_t supported = 0;
  uint32_t schemes = 0;
  size_t written = 0;
  const uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  return lt.capability(&algorithm, CUBLASLT_ALGO_CAP_SPLITK_SUPPORT, &supported, sizeof(supported),
                       &written) == CUBLAS_STATUS_SUCCESS &&
         lt.capability(&algorithm, CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes),
                       &written) == CUBLAS_STATUS_SUCCESS &&
         supported != 0 && (schemes & scheme) != 0 &&
         lt.configure(&algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof(splits)) ==
             CUBLAS_STATUS_SUCCESS &&
         lt.configure(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme)) ==
             CUBLAS_STATUS_SUCCESS;
}

cublasLtMatmulAlgo_t from_words(at::IntArrayRef words) {
  if (words.size() != kWords) {
    fail("an algorithm is " + std::to_string(kWords) + " integers, found " + std::to_string(words.size()));
  }
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(&algorithm, words.data(), sizeof(algorithm));
  return algorithm;
}

int64_t cublaslt_version() { return static_cast<int64_t>(library().version()); }

// The row stride of a product that callers name, 0 where its rows lie one behind the other.
int64_t stride_or(int64_t out_stride, int64_t features) { return out_stride == 0 ? features : out_stride; }

// What the library proposes for x [rows, columns] contiguous and w [features, columns], best first by its own
// estimate, at most `most`, then the first of them with other numbers of parts. out_stride: of the product's rows, 0
// for features. Returns [A, 9] int64 on the host: eight integers that are the algorithm, then the bytes of its
// workspace.
Tensor cublaslt_algorithms(int64_t device, int64_t rows, int64_t features, int64_t columns, int64_t form,
                           int64_t partials, int64_t most, int64_t out_stride) {
  const Problem problem({rows, features, columns, columns, stride_or(out_stride, features), form, partials});
  if (most < 1 || most > 1024)
    fail("between 1 and 1024 algorithms may be asked for, found " + std::to_string(most));
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  const cublasLtHandle_t handle = handle_of(device);

  std::vector<Heuristic> found;
  for (const Heuristic& one : proposed(handle, problem, most)) {
    // What is kept is checked in the same way when it is read back.
    Heuristic checked = one;
    if (!accepts(handle, problem, one.algo, checked)) continue;
    checked.workspaceSize = std::max(checked.workspaceSize, one.workspaceSize);
    found.push_back(checked);
  }
  const size_t first = std::min(found.size(), kSplitFirst);
  if (partials == 1) {
    for (size_t i = 0; i < first; ++i) {
      for (const int32_t splits : kSplits) {
        Heuristic other = found[i];
        if (!split(other.algo, splits) || !accepts(handle, problem, other.algo, other)) continue;
        const bool known = std::any_of(found.begin(), found.end(), [&](const Heuristic& one) {
          return std::memcmp(&one.algo, &other.algo, sizeof(other.algo)) == 0;
        });
        if (!known) found.push_back(other);
      }
    }
  }
  Tensor table =
      at::empty({static_cast<int64_t>(found.size()), kWords + 1}, at::TensorOptions().dtype(at::kLong));
  int64_t* row = table.mutable_data_ptr<int64_t>();
  for (const Heuristic& one : found) {
    std::memcpy(row, &one.algo, sizeof(one.algo));
    row[kWords] = static_cast<int64_t>(one.workspaceSize);
    row += kWords + 1;
  }
  return table;
}

// Whether an algorithm computes such a product on the device within `workspace` bytes.
bool cublaslt_accepts(int64_t device, int64_t rows, int64_t features, int64_t columns, int64_t form,
                      int64_t partials, at::IntArrayRef algorithm, int64_t workspace, int64_t out_stride) {
  const Problem problem({rows, features, columns, columns, stride_or(out_stride, features), form, partials});
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Heuristic found = {};
  return accepts(handle_of(device), problem, from_words(algorithm), found) &&
         static_cast<int64_t>(found.workspaceSize) <= workspace;
}

}  // namespace

// workspace: the bytes the algorithm needs, taken from PyTorch's allocator for the current stream.
void cublaslt_matmul_into(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t form,
                          at::IntArrayRef algorithm, int64_t workspace) {
  constexpr at::ScalarType kBFloat16 = at::ScalarType::BFloat16, kFloat32 = at::ScalarType::Float;
  const Checker check("cublaslt_matmul", x);
  check.rank(x, "x", 2);
  check.rank(weight, "weight", 2);
  const int64_t rows = x.size(0), columns = x.size(1), features = weight.size(0);
  check.tensor(x, "x", kBFloat16, {rows, columns}, Strides::kLastContiguous);
  check.tensor(weight, "weight", kBFloat16, {features, columns});
  const bool sums = out.dim() == 3;
  const int64_t partials = sums ? out.size(0) : 1;
  if (sums && partials < 2) check.fail("partial sums must be several, found " + to_text(out.sizes()));
  if (sums)
    check.tensor(out, "the product", kFloat32, {partials, rows, features});
  else
    check.tensor(out, "the product", kBFloat16, {rows, features}, Strides::kLastContiguous);
  for (const Tensor* tensor : {&x, &weight, &out}) {
    if (reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % kAlignment != 0) {
      check.fail("x, weight and the product must start at multiples of 16 bytes");
    }
  }
  check.at_most(workspace, kMostWorkspace, "workspace");
  if (workspace < 0) check.fail("workspace must not be negative, found " + std::to_string(workspace));
  const Problem problem({rows, features, columns, x.stride(0), out.stride(-2), form, partials});
  const cublasLtMatmulAlgo_t chosen = from_words(algorithm);

  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor scratch = at::empty({workspace}, x.options().dtype(at::kByte));
  const void* a = x.const_data_ptr();
  const void* b = weight.const_data_ptr();
  if (form == kWeightFirst) std::swap(a, b);
  const float one = 1.0f, zero = 0.0f;
  succeed(
      library().matmul(handle_of(x.get_device()), problem.desc(), &one, a, problem.a(), b, problem.b(), &zero,
                       out.mutable_data_ptr(), problem.out(), out.mutable_data_ptr(), problem.out(), &chosen,
                       workspace == 0 ? nullptr : scratch.mutable_data_ptr(), static_cast<size_t>(workspace),
                       c10::cuda::getCurrentCUDAStream(x.get_device()).stream()),
      "cublasLtMatmul");
}

Tensor cublaslt_matmul(const Tensor& x, const Tensor& weight, int64_t form, int64_t partials,
                       at::IntArrayRef algorithm, int64_t workspace) {
  const Checker check("cublaslt_matmul", x);
  check.rank(x, "x", 2);
  check.rank(weight, "weight", 2);
  const int64_t rows = x.size(0), features = weight.size(0);
  const Tensor out = partials == 1 ? at::empty({rows, features}, x.options())
                                   : at::empty({partials, rows, features}, x.options().dtype(at::kFloat));
  cublaslt_matmul_into(out, x, weight, form, algorithm, workspace);
  return out;
}

TORCH_LIBRARY_FRAGMENT(openjev_fast_cuda, library) {
  library.def("cublaslt_version", &cublaslt_version);
  library.def(
      "cublaslt_algorithms(int device, int rows, int features, int columns, int form, int partials, "
      "int most, int out_stride=0) -> Tensor",
      &cublaslt_algorithms);
  library.def(
      "cublaslt_accepts(int device, int rows, int features, int columns, int form, int partials, "
      "int[] algorithm, int workspace, int out_stride=0) -> bool",
      &cublaslt_accepts);
  library.def("cublaslt_matmul", &cublaslt_matmul);
}

}  // namespace openjev_fast
