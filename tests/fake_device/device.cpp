// A device for tests: its memory is the host's and its kernels are the CPU's, but torch takes it for an accelerator. It
// counts what a real one would pay for: launches, by operator, and moments at which the host waits for the device.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

// Counting

std::mutex counting;
bool waits_are_errors = false;
std::map<std::string, int64_t> launches, waits;

void launched(const std::string& name) {
  std::lock_guard<std::mutex> hold(counting);
  ++launches[name];
}

void launched_kernel(std::string name) { launched(name); }

void waited(const std::string& why) {
  std::lock_guard<std::mutex> hold(counting);
  ++waits[why];
  TORCH_CHECK(!waits_are_errors, "the host waits for the device: ", why);
}

std::vector<std::string> report(const std::map<std::string, int64_t>& counts) {
  std::vector<std::string> lines;
  for (const auto& [name, count] : counts) lines.push_back(name + " " + std::to_string(count));
  return lines;
}

std::vector<std::string> read_launches() {
  std::lock_guard<std::mutex> hold(counting);
  return report(launches);
}

std::vector<std::string> read_waits() {
  std::lock_guard<std::mutex> hold(counting);
  return report(waits);
}

void reset_counts(bool raising) {
  std::lock_guard<std::mutex> hold(counting);
  launches.clear();
  waits.clear();
  waits_are_errors = raising;
}

// Memory

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
    void* place = host.get();
    auto free = host.get_deleter();
    void* context = host.release_context();
    return {place, context, free, c10::Device(kDevice, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
DeviceAllocator allocator;

std::mutex pinning;
std::map<const char*, size_t> pinned_ranges;

struct Pinned {
  c10::DataPtr memory;
};

void unpin(void* context) {
  auto* pinned = static_cast<Pinned*>(context);
  {
    std::lock_guard<std::mutex> hold(pinning);
    pinned_ranges.erase(static_cast<const char*>(pinned->memory.get()));
  }
  delete pinned;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* pinned = new Pinned{c10::GetCPUAllocator()->allocate(bytes ? bytes : 1)};
    void* place = pinned->memory.get();
    std::lock_guard<std::mutex> hold(pinning);
    pinned_ranges[static_cast<const char*>(place)] = bytes ? bytes : 1;
    return {place, pinned, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* place) {
  std::lock_guard<std::mutex> hold(pinning);
  auto after = pinned_ranges.upper_bound(static_cast<const char*>(place));
  if (after == pinned_ranges.begin()) return false;
  auto [begin, bytes] = *std::prev(after);
  return static_cast<const char*>(place) < begin + bytes;
}

// What torch asks of an accelerator

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return {kDevice, 0}; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return c10::Stream(c10::Stream::DEFAULT, stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { waited("synchronize stream"); }
  void synchronizeEvent(void*) const override { waited("synchronize event"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* place) const override { return is_pinned(place); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// The CPU's kernels on the device's memory

// A device tensor as a CPU tensor over the same memory. It does not own that memory.
at::Tensor on_host(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr same(storage.mutable_data(), c10::Device(c10::kCPU));
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(same), c10::GetCPUAllocator(), true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

at::Tensor as_host(const at::Tensor& tensor) { return tensor.device().type() == kDevice ? on_host(tensor) : tensor; }

void free_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// What a CPU kernel has made becomes the device's, without a copy.
c10::Storage on_device(const c10::Storage& host) {
  c10::DataPtr same(host.mutable_data(), new c10::Storage(host), &free_storage, c10::Device(kDevice, 0));
  return {c10::Storage::use_byte_size_t(), host.nbytes(), std::move(same), &allocator, true};
}

at::Tensor laid_out_like(const at::Tensor& host, c10::Storage storage) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return result;
}

using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // on the device, on the host

at::Tensor lent(const at::Tensor& tensor, Pairs& pairs) {
  if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
  for (const auto& [device, host] : pairs)
    if (device.is_same(tensor)) return host;
  pairs.emplace_back(tensor, on_host(tensor));
  return pairs.back().second;
}

at::Tensor returned(const at::Tensor& result, const Pairs& pairs, bool to_device) {
  if (!result.defined() || result.device().type() != c10::kCPU) return result;
  for (const auto& [device, host] : pairs) {
    if (host.is_same(result)) return device;
    if (host.storage().unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
      return laid_out_like(result, device.storage());
  }
  return to_device ? laid_out_like(result, on_device(result.storage())) : result;
}

bool waits_for_values(const std::string& name) {
  static const std::vector<std::string> reading = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::repeat_interleave.Tensor"};
  for (const auto& one : reading)
    if (name.rfind(one, 0) == 0) return true;
  return false;
}

c10::IValue lent_value(const c10::IValue& value, Pairs& pairs, bool& has_mask, bool& is_on_device) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    is_on_device |= tensor.defined() && tensor.device().type() == kDevice;
    return lent(tensor, pairs);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorList()) list.push_back(lent(one, pairs));
    is_on_device |= !pairs.empty();
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorList()) {
      has_mask |= one && one->defined() && one->scalar_type() == at::kBool;
      list.push_back(one ? std::optional<at::Tensor>(lent(*one, pairs)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) {
    is_on_device = true;
    return c10::Device(c10::kCPU);
  }
  return value;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::string name = schema.operator_name().name;
  if (!schema.operator_name().overload_name.empty()) name += "." + schema.operator_name().overload_name;
  const auto arguments = schema.arguments().size();
  const auto begin = stack->size() - arguments;
  Pairs pairs;
  bool has_mask = false, is_on_device = false;
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  for (size_t i = 0; i < arguments; ++i)
    (*stack)[begin + i] = lent_value(given[i], pairs, has_mask, is_on_device);
  bool is_view = false;
  for (const auto& result : schema.returns())
    is_view |= result.alias_info() && !result.alias_info()->isWrite();
  if (!is_view) launched(name);
  if (waits_for_values(name) || (has_mask && name.rfind("aten::index", 0) == 0)) waited(name);
  op.callBoxed(stack);
  for (const auto& [device, host] : pairs) {  // outputs that were given too small
    auto* impl = device.unsafeGetTensorImpl();
    if (host.storage().data() != device.storage().data()) impl->set_storage_keep_dtype(on_device(host.storage()));
    if (host.sizes() != device.sizes() || host.strides() != device.strides())
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  const auto results = schema.returns().size();
  const auto first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& result = (*stack)[first + i];
    if (result.isTensor()) {
      result = returned(result.toTensor(), pairs, is_on_device);
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : result.toTensorList()) list.push_back(returned(one, pairs, is_on_device));
      result = list;
    }
  }
}

// What needs more than that

at::Tensor empty_memory_format(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool arrives = target.device().type() == kDevice, leaves = source.device().type() == kDevice;
  if (source.numel()) {
    const at::Tensor& host = leaves ? target : source;
    const bool asynchronous = non_blocking && is_pinned(host.const_data_ptr());
    launched(arrives && leaves ? "copy_" : arrives ? "copy to device" : "copy to host");
    if (!(arrives && leaves) && !asynchronous) waited(arrives ? "copy to device" : "copy to host");
  }
  Pairs pairs;
  at::Tensor to = lent(target, pairs);
  to.copy_(lent(source, pairs));
  return target;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  waited("item");
  return at::_local_scalar_dense(on_host(tensor));
}

at::Tensor& set_storage_at(
    at::Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, storage, offset, size, stride);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fake_device, m) {
  m.def("launches() -> str[]", &read_launches);
  m.def("waits() -> str[]", &read_waits);
  m.def("reset(bool raising) -> ()", &reset_counts);
  m.def("launched(str name) -> ()", &launched_kernel);
  m.def("as_host(Tensor tensor) -> Tensor", &as_host);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("resize_", &at::native::resize_);
  // torch would take lists apart on a device that has no kernels for them.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const bool takes_lists = op.name.rfind("aten::_foreach_", 0) == 0 || op.name.rfind("aten::_fused_", 0) == 0;
    if (!takes_lists) continue;
    const std::string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

namespace {
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kDevice, &allocator);
  return true;
}();
}  // namespace
