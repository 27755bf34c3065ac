// From a call to its launches without Python: what native_call.py describes, executed; with the node of autograd.
//
// At short sequences the kernels take less time than Python takes to start them, and torch's own attention has no
// Python on its way. Tiles, grids and compiled kernels are chosen in Python at the first call of a signature; a call of
// a signature that is not known here yet is answered with None, and Python does it.

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

namespace cs336sys {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// cuLaunchKernelEx and cuTensorMapEncodeTiled of the CUDA driver, whose headers the build does without.
struct LaunchAttribute {
  int id;
  alignas(8) std::array<int, 16> value;
};
struct LaunchConfig {
  unsigned grid[3], threads[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned num_attributes;
};
using LaunchKernel = int (*)(const LaunchConfig* config, void* function, void** parameters, void** extra);
using EncodeTensorMap = int (*)(
    void* map, int dtype, uint32_t rank, void* address, const uint64_t* shape, const uint64_t* stride_bytes,
    const uint32_t* box, const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion, int fill);
LaunchKernel launch_kernel = nullptr;
EncodeTensorMap encode_tensor_map = nullptr;

void check_driver(int error, const char* call) {
  if (error == 0) return;
  // Put together without a stream, in which the process ended where g++ 13 had compiled this, beside torch 2.11.
  throw std::runtime_error(std::string(call) + " failed with error " + std::to_string(error) + " of the CUDA driver");
}

struct alignas(128) TensorMap {
  std::array<char, 128> bytes;
};

// A TMA descriptor of the tensor in a slot. What the GPU is given depends on the address alone, and the allocator gives
// the same ones again and again, so they are remembered.
class Descriptor {
 public:
  Descriptor(
      size_t slot, int dtype, int swizzle, uint64_t element_bytes, const std::vector<uint32_t>& box,
      const std::vector<uint64_t>& shape, const std::vector<uint64_t>& strides)
      : slot(slot), dtype_(dtype), swizzle_(swizzle), box_(box.rbegin(), box.rend()),
        shape_(shape.rbegin(), shape.rend()) {
    // The driver counts dimensions from the innermost, whose elements lie side by side.
    for (auto stride = strides.rbegin() + 1; stride != strides.rend(); ++stride) {
      stride_bytes_.push_back(*stride * element_bytes);
    }
  }

  void* map_of(void* address) {
    if (maps_.size() >= kMaxMaps && maps_.count(address) == 0) maps_.clear();
    auto& map = maps_[address];
    if (map == nullptr) {
      map = std::make_unique<TensorMap>();
      constexpr int kNoInterleave = 0, kPromoteTo128Bytes = 2, kFillZeros = 0;
      const std::vector<uint32_t> element_strides(box_.size(), 1);
      const int error = encode_tensor_map(
          map.get(), dtype_, box_.size(), address, shape_.data(), stride_bytes_.data(), box_.data(),
          element_strides.data(), kNoInterleave, swizzle_, kPromoteTo128Bytes, kFillZeros);
      if (error != 0) maps_.clear();
      check_driver(error, "cuTensorMapEncodeTiled");
    }
    return map.get();
  }

  const size_t slot;

 private:
  // More tensors of one kind than a model has layers.
  static constexpr size_t kMaxMaps = 256;
  int dtype_, swizzle_;
  std::vector<uint32_t> box_;
  std::vector<uint64_t> shape_, stride_bytes_;
  std::unordered_map<void*, std::unique_ptr<TensorMap>> maps_;
};

// What a kernel is given for one parameter: the address of the tensor in a slot, a number's bytes, or a descriptor.
using Parameter = std::variant<size_t, std::string, std::shared_ptr<Descriptor>>;

class Launch {
 public:
  // Early: by programmatic dependent launch, while the kernel before it ends.
  Launch(
      uintptr_t function, unsigned grid, unsigned threads, unsigned shared_bytes, bool is_early,
      std::vector<Parameter> parameters)
      : function_(reinterpret_cast<void*>(function)),
        config_{{grid, 1, 1}, {threads, 1, 1}, shared_bytes, nullptr, &early_, is_early},
        parameters_(std::move(parameters)), values_(parameters_.size()) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (auto* number = std::get_if<std::string>(&parameters_[i])) values_[i] = number->data();
    }
  }
  Launch(const Launch&) = delete;

  void run(void** addresses, void* stream) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (const auto* slot = std::get_if<size_t>(&parameters_[i])) {
        values_[i] = &addresses[*slot];
      } else if (auto* descriptor = std::get_if<std::shared_ptr<Descriptor>>(&parameters_[i])) {
        values_[i] = (*descriptor)->map_of(addresses[(*descriptor)->slot]);
      }
    }
    config_.stream = stream;
    check_driver(launch_kernel(&config_, function_, values_.data(), nullptr), "cuLaunchKernelEx");
  }

 private:
  static constexpr int kProgrammaticStreamSerialization = 6;
  void* function_;
  LaunchAttribute early_{kProgrammaticStreamSerialization, {1}};
  LaunchConfig config_;
  std::vector<Parameter> parameters_;
  std::vector<void*> values_;  // where the value of each parameter lies
};

struct Layout {
  std::vector<int64_t> shape, strides;
  at::ScalarType dtype;
};

// A constant, or a scratch tensor, which lives for one run.
using Addition = std::variant<Tensor, Layout>;

// Launches over slots: the tensors it is run with, its results, then its own.
class Plan {
 public:
  Plan(std::vector<Layout> results, std::vector<Addition> additions, std::vector<std::shared_ptr<Launch>> launches)
      : results_(std::move(results)), additions_(std::move(additions)), launches_(std::move(launches)) {}

  Tensors run(at::ArrayRef<Tensor> given) {
    const auto device = given[0].device();
    Tensors results, scratch;
    std::vector<void*> addresses;
    results.reserve(results_.size());
    addresses.reserve(given.size() + results_.size() + additions_.size());
    for (const auto& tensor : given) addresses.push_back(tensor.data_ptr());
    for (const auto& layout : results_) {
      results.push_back(allocate(layout, device));
      addresses.push_back(results.back().data_ptr());
    }
    for (const auto& addition : additions_) {
      if (const auto* layout = std::get_if<Layout>(&addition)) {
        scratch.push_back(allocate(*layout, device));
        addresses.push_back(scratch.back().data_ptr());
      } else {
        addresses.push_back(std::get<Tensor>(addition).data_ptr());
      }
    }
    void* stream = nullptr;
    if (device.is_cuda()) {
      const c10::impl::VirtualGuardImpl guard(device.type());
      stream = guard.getStreamNativeHandle(guard.getStream(device));
    }
    const std::lock_guard lock(mutex_);
    for (const auto& launch : launches_) launch->run(addresses.data(), stream);
    return results;
  }

 private:
  static Tensor allocate(const Layout& layout, at::Device device) {
    return at::empty_strided(layout.shape, layout.strides, at::TensorOptions(device).dtype(layout.dtype));
  }

  std::vector<Layout> results_;
  std::vector<Addition> additions_;
  std::vector<std::shared_ptr<Launch>> launches_;
  std::mutex mutex_;  // a launch keeps its parameters' values; autograd's thread may run beside the main one
};

// Everything that a plan depends on.
using Signature = std::vector<int64_t>;

struct SignatureHash {
  size_t operator()(const Signature& signature) const {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, a number at a time
    for (const int64_t number : signature) hash = (hash ^ static_cast<uint64_t>(number)) * 0x100000001b3;
    return hash ^ (hash >> 32);
  }
};

Signature sign(int64_t options, at::ArrayRef<Tensor> tensors) {
  Signature signature;
  signature.reserve(1 + 11 * tensors.size());
  signature.push_back(options);
  for (const auto& tensor : tensors) {
    signature.push_back(tensor.dim());
    signature.push_back(static_cast<int64_t>(tensor.scalar_type()));
    signature.push_back(tensor.device().index());
    for (const int64_t size : tensor.sizes()) signature.push_back(size);
    for (const int64_t stride : tensor.strides()) signature.push_back(stride);
  }
  return signature;
}

class Plans {
 public:
  void add(const Signature& signature, std::shared_ptr<Plan> plan) {
    const std::lock_guard lock(mutex_);
    if (plans_.size() >= kMaxPlans) plans_.clear();
    plans_[signature] = std::move(plan);
  }

  void clear() {
    const std::lock_guard lock(mutex_);
    plans_.clear();
  }

  std::shared_ptr<Plan> find(const Signature& signature) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(signature);
    return found == plans_.end() ? nullptr : found->second;
  }

 private:
  static constexpr size_t kMaxPlans = 1024;
  std::mutex mutex_;
  std::unordered_map<Signature, std::shared_ptr<Plan>, SignatureHash> plans_;
};

// Never destroyed: at exit their constants may outlive the CUDA context.
Plans& forward_plans = *new Plans;
Plans& backward_plans = *new Plans;

// Whether kernels may read the tensors as they lie: nothing else wants to see the call, and plans are made for the
// current device and for addresses that 16 divides.
bool readable(at::ArrayRef<Tensor> tensors) {
  const c10::impl::VirtualGuardImpl guard(tensors[0].device().type());
  if (guard.getDevice() != tensors[0].device()) return false;
  for (const auto& tensor : tensors) {
    if (at::isTensorSubclassLike(tensor) || tensor.is_conj() || tensor.is_neg()) return false;
    if (tensor.layout() != at::kStrided || reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 != 0) return false;
  }
  return true;
}

std::shared_ptr<Plan> find_forward(const Tensors& inputs, int64_t options) {
  return readable(inputs) ? forward_plans.find(sign(options, inputs)) : nullptr;
}

// Deterministic algorithms may be switched on between forward and backward.
Signature sign_backward(const Tensors& tensors, int64_t options) {
  auto signature = sign(options, tensors);
  signature.push_back(at::globalContext().deterministicAlgorithms());
  return signature;
}

// The tensors: query, key, value, output, logsumexp and the output's gradient.
std::optional<Tensors> run_backward(const Tensors& tensors, int64_t options) {
  if (!readable(tensors)) return std::nullopt;
  const auto plan = backward_plans.find(sign_backward(tensors, options));
  if (plan == nullptr) return std::nullopt;
  return plan->run(tensors);
}

using Window = std::optional<int64_t>;
using Scale = std::optional<double>;

// What decides, beside the tensors, how attention is computed.
struct Options {
  bool is_causal;
  std::string_view float32_precision;
  bool deterministic;
  std::string_view kernels;
  Window window = {};
  Scale scale = {};
  bool aligned_at_end = false;
};

// The combinations of the first four options. A plan's signature holds the number of its own among them, and for each
// key of a window their count on top.
using FirstOptions = std::tuple<bool, std::string, bool, std::string>;
std::vector<FirstOptions> combinations;

// -1 for what only Python computes.
int64_t number_of(const Options& options) {
  if ((options.window && *options.window < 1) || options.scale || options.aligned_at_end) return -1;
  const auto first_options =
      std::tie(options.is_causal, options.float32_precision, options.deterministic, options.kernels);
  for (size_t number = 0; number < combinations.size(); ++number) {
    if (combinations[number] == first_options) return number + options.window.value_or(0) * combinations.size();
  }
  return -1;
}

// What computes, and makes a plan, where none is known: for the operators, and for autograd's node.
PyObject* python_forward = nullptr;
PyObject* python_backward = nullptr;
PyObject* python_node_backward = nullptr;

Tensors call_python(PyObject* function, const Tensors& tensors, const Options& options) {
  const py::gil_scoped_acquire gil;
  py::list arguments;
  for (const auto& tensor : tensors) arguments.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  arguments.append(options.is_causal);
  arguments.append(options.float32_precision);
  arguments.append(options.deterministic);
  arguments.append(options.kernels);
  arguments.append(options.window);
  arguments.append(options.scale);
  arguments.append(options.aligned_at_end);
  const auto results = py::reinterpret_steal<py::object>(PyObject_CallObject(function, py::tuple(arguments).ptr()));
  if (!results) {
    python_error error;
    error.persist();
    throw error;
  }
  return results.cast<Tensors>();
}

struct FlashAttentionTriton : torch::autograd::Function<FlashAttentionTriton> {
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
      int64_t options, const std::shared_ptr<Plan>& plan) {
    auto results = plan->run({query, key, value});
    context->save_for_backward({query, key, value, results[0], results[1]});
    context->saved_data["options"] = options;
    return std::move(results[0]);
  }

  static Tensors backward(torch::autograd::AutogradContext* context, Tensors grad_outputs) {
    TORCH_CHECK(
        !at::GradMode::is_enabled(),
        "FlashAttentionTriton is differentiable once: it has no second derivative, so create_graph=True is refused");
    auto tensors = context->get_saved_variables();
    tensors.push_back(std::move(grad_outputs[0]));
    const int64_t number = context->saved_data["options"].toInt();
    auto gradients = run_backward(tensors, number);
    if (!gradients) {
      const int64_t count = combinations.size();
      const auto& [is_causal, float32_precision, deterministic, kernels] = combinations.at(number % count);
      const Window window = number < count ? Window() : Window(number / count);
      gradients = call_python(
          python_node_backward, tensors, {is_causal, float32_precision, deterministic, kernels, window});
    }
    gradients->resize(5);  // none for the options and the plan
    return std::move(*gradients);
  }
};

std::optional<Tensor> attend(py::handle query, py::handle key, py::handle value, int64_t options) {
  Tensors inputs;
  inputs.reserve(3);
  for (const auto handle : {query, key, value}) {
    if (!THPVariable_CheckExact(handle.ptr())) return std::nullopt;
    inputs.push_back(THPVariable_Unpack(handle.ptr()));
  }
  const py::gil_scoped_release no_gil;
  const auto plan = find_forward(inputs, options);
  if (plan == nullptr) return std::nullopt;
  const bool differentiable = at::GradMode::is_enabled() &&
      (inputs[0].requires_grad() || inputs[1].requires_grad() || inputs[2].requires_grad());
  if (!differentiable) return std::move(plan->run(inputs)[0]);
  return FlashAttentionTriton::apply(inputs[0], inputs[1], inputs[2], options, plan);
}

std::optional<Tensors> run_forward(const Tensors& inputs, int64_t options) {
  const auto plan = find_forward(inputs, options);
  if (plan == nullptr) return std::nullopt;
  return plan->run(inputs);
}

// The operators as torch.compile's code calls them.
std::tuple<Tensor, Tensor> forward_operator(
    const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal, std::string_view float32_precision,
    bool deterministic, std::string_view kernels, Window window, Scale scale, bool aligned_at_end) {
  const Tensors inputs{query, key, value};
  const Options options{is_causal, float32_precision, deterministic, kernels, window, scale, aligned_at_end};
  auto results = run_forward(inputs, number_of(options));
  if (!results) results = call_python(python_forward, inputs, options);
  return {results->at(0), results->at(1)};
}

std::tuple<Tensor, Tensor, Tensor> backward_operator(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& logsumexp,
    const Tensor& grad_out, bool is_causal, std::string_view float32_precision, bool deterministic,
    std::string_view kernels, Window window, Scale scale, bool aligned_at_end) {
  const Tensors tensors{query, key, value, out, logsumexp, grad_out};
  const Options options{is_causal, float32_precision, deterministic, kernels, window, scale, aligned_at_end};
  auto results = run_backward(tensors, number_of(options));
  if (!results) results = call_python(python_backward, tensors, options);
  return {results->at(0), results->at(1), results->at(2)};
}

void register_operators(const std::string& library_name, at::DeviceType device_type) {
  // Never destroyed: the dispatcher keeps what is registered for as long as the library lives.
  auto& library = *new torch::Library(
      torch::Library::IMPL, library_name, c10::computeDispatchKey(std::nullopt, at::kStrided, device_type), __FILE__,
      __LINE__);
  library.impl("flash_attention_forward", TORCH_FN(forward_operator));
  library.impl("flash_attention_backward", TORCH_FN(backward_operator));
}

std::vector<Parameter> parameters_of(const py::list& list) {
  std::vector<Parameter> parameters;
  for (const auto parameter : list) {
    if (py::isinstance<py::bytes>(parameter)) {
      parameters.emplace_back(parameter.cast<std::string>());
    } else if (py::isinstance<py::int_>(parameter)) {
      parameters.emplace_back(parameter.cast<size_t>());
    } else {
      parameters.emplace_back(parameter.cast<std::shared_ptr<Descriptor>>());
    }
  }
  return parameters;
}

}  // namespace cs336sys

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace cs336sys;

  py::class_<Descriptor, std::shared_ptr<Descriptor>>(module, "Descriptor", py::module_local())
      .def(py::init<size_t, int, int, uint64_t, std::vector<uint32_t>, std::vector<uint64_t>, std::vector<uint64_t>>());
  py::class_<Layout>(module, "Layout", py::module_local())
      .def(py::init<std::vector<int64_t>, std::vector<int64_t>, at::ScalarType>());
  py::class_<Launch, std::shared_ptr<Launch>>(module, "Launch", py::module_local())
      .def(py::init([](uintptr_t function, unsigned grid, unsigned threads, unsigned bytes, bool is_early,
                       const py::list& list) {
        return std::make_shared<Launch>(function, grid, threads, bytes, is_early, parameters_of(list));
      }));
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan", py::module_local())
      .def(py::init<std::vector<Layout>, std::vector<Addition>, std::vector<std::shared_ptr<Launch>>>());

  module.def("use_driver", [](uintptr_t launch, uintptr_t encode) {
    launch_kernel = reinterpret_cast<LaunchKernel>(launch);
    encode_tensor_map = reinterpret_cast<EncodeTensorMap>(encode);
  });
  module.def("use_python", [](py::object forward, py::object backward, py::object node_backward) {
    python_forward = forward.release().ptr();
    python_backward = backward.release().ptr();
    python_node_backward = node_backward.release().ptr();
  });
  module.def("use_options", [](std::vector<FirstOptions> options) { combinations = std::move(options); });
  module.def("register_operators", [](const std::string& library_name, const std::string& device) {
    register_operators(library_name, at::Device(device).type());
  });
  module.def("add_forward", [](const Tensors& inputs, int64_t options, std::shared_ptr<Plan> plan) {
    forward_plans.add(sign(options, inputs), std::move(plan));
  });
  module.def("add_backward", [](const Tensors& tensors, int64_t options, std::shared_ptr<Plan> plan) {
    backward_plans.add(sign_backward(tensors, options), std::move(plan));
  });
  module.def("forget_plans", [] {
    forward_plans.clear();
    backward_plans.clear();
  });
  module.def("attend", torch::wrap_pybind_function(attend));
  module.def("forward", torch::wrap_pybind_function_no_gil(run_forward));
  module.def("backward", torch::wrap_pybind_function_no_gil(run_backward));
}
