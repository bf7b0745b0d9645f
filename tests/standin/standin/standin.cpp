// SPDX-License-Identifier: Apache-2.0
// A device for tests: four of them per machine, in the CPU's memory, computing on the CPU.
// What it emulates is listed in the docstring of standin/__init__.py.

#include "standin.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from_and_resize_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 4;
constexpr size_t kBytes = size_t{1} << 30;

std::array<std::atomic<size_t>, kDevices> allocated{};
thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> streams{};
std::atomic<c10::StreamId> latest_stream{0};

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there are ", kDevices, " stand-in devices, and no number ", int(index));
}

// -- the CPU waiting for a device ---------------------------------------------------------------------------

std::atomic<long long> host_waits_so_far{0};
std::atomic<int> on_host_wait{0};  // 0: count, 1: warn, 2: raise
std::atomic<bool> is_capturing{false};
thread_local int quiet = 0;        // More than 0 where the emulation itself copies.

void refuse_while_capturing(const char* what) {
  TORCH_CHECK(!is_capturing, what, ": operation not permitted when stream is capturing");
}

struct Quiet {
  Quiet() { ++quiet; }
  ~Quiet() { --quiet; }
};

// -- what streams were ordered after ------------------------------------------------------------------------

using standin::PendingPtr;
using Stream = std::pair<c10::DeviceIndex, c10::StreamId>;

std::mutex& orders_lock = *new std::mutex;
std::map<Stream, std::vector<PendingPtr>>& orders = *new std::map<Stream, std::vector<PendingPtr>>;
std::atomic<bool> has_orders{false};

void settle_all(const std::vector<PendingPtr>& all) {
  if (all.empty()) return;
  standin::OutsidePython outside;
  for (const auto& one : all) one->settle();
}

std::vector<PendingPtr> orders_of(Stream stream, bool take) {
  std::lock_guard<std::mutex> guard(orders_lock);
  auto found = orders.find(stream);
  if (found == orders.end()) return {};
  auto all = found->second;
  if (take) orders.erase(found);
  return all;
}

// Kept in the table while it blocks: other threads that use the stream block, too.
void settle(Stream stream) {
  if (!has_orders) return;
  auto all = orders_of(stream, false);
  if (all.empty()) return;
  settle_all(all);
  std::lock_guard<std::mutex> guard(orders_lock);
  auto& left = orders[stream];
  std::erase_if(left, [&](const auto& one) { return std::find(all.begin(), all.end(), one) != all.end(); });
}

Stream key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

// -- memory ---------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex index;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->index] -= block->bytes;
  std::free(block->data);
  delete block;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(allocated[current] + bytes <= kBytes, "out of memory on stand-in device ", int(current));
    void* data = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    allocated[current] += bytes;
    auto* block = new Block{data, bytes, current};
    return {data, block, &free_block, c10::Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = stats.reserved_bytes[0].current = int64_t(allocated[index].load());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  // Not marked as an override: torch 2.9 and older do not ask.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    check_index(index);
    return {kBytes - allocated[index], kBytes};
  }
};

Memory memory;

std::mutex pinned_lock;
std::map<uintptr_t, size_t> pinned;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(reinterpret_cast<uintptr_t>(data));
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned[reinterpret_cast<uintptr_t>(data)] = bytes;
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

PinnedMemory pinned_memory;

// -- random numbers ---------------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {
  explicit Random(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(kType, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom())) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Random* clone_impl() const override {
    auto* copy = new Random(device().index());
    copy->inner = inner.clone();
    return copy;
  }
  at::Generator inner;
};

const at::Generator& random_of(c10::DeviceIndex index) {
  static std::array<at::Generator, kDevices> all = [] {
    std::array<at::Generator, kDevices> made;
    for (int number = 0; number < kDevices; ++number) made[number] = at::make_generator<Random>(number);
    return made;
  }();
  index = index < 0 ? current : index;
  check_index(index);
  return all[index];
}

// -- what torch asks about a kind of device -----------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    check_index(index);
    current = index;
  }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_index(index);
    return std::exchange(current, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return random_of(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Random>(index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto found = pinned.upper_bound(reinterpret_cast<uintptr_t>(data));
    if (found == pinned.begin()) return false;
    --found;
    return reinterpret_cast<uintptr_t>(data) < found->first + std::max(found->second, size_t{1});
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kType, current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

using Clock = std::chrono::steady_clock;

struct Event {
  Clock::time_point recorded;
  std::vector<PendingPtr> after;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_index(device.index());
    return {kType, std::exchange(current, device.index())};
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    check_index(device.index());
    current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    auto index = device.has_index() ? device.index() : current;
    check_index(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kType, device.has_index() ? device.index() : current));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    auto index = device.has_index() ? device.index() : current;
    check_index(index);
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), ++latest_stream);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = std::exchange(streams[stream.device_index()], stream.id());
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), before);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  // What was computed is done when a call returns: an event can only wait for what its stream was ordered after.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = Event{Clock::now(), orders_of(key_of(stream), false)};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    auto passed = static_cast<Event*>(end)->recorded - static_cast<Event*>(begin)->recorded;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    for (const auto& one : static_cast<Event*>(event)->after) standin::order_after(stream, one);
  }
  static bool query(const std::vector<PendingPtr>& all) {
    for (const auto& one : all)
      if (!one->is_finished()) return false;
    settle_all(all);
    return true;
  }
  bool queryEvent(void* event) const override {
    refuse_while_capturing("Event.query");
    return !event || query(static_cast<Event*>(event)->after);
  }
  bool queryStream(const c10::Stream& stream) const override {
    refuse_while_capturing("Stream.query");
    return query(orders_of(key_of(stream), false));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    standin::host_waits("Stream.synchronize");
    settle(key_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    standin::host_waits("Event.synchronize");
    if (event) settle_all(static_cast<Event*>(event)->after);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    standin::host_waits("synchronize");
    std::vector<Stream> all;
    {
      std::lock_guard<std::mutex> guard(orders_lock);
      for (const auto& [stream, _] : orders)
        if (stream.first == index) all.push_back(stream);
    }
    for (auto stream : all) settle(stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- operators --------------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return device.has_value() && device->has_index() ? device->index() : current;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(kType, index_of(device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(kType, index_of(device)));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, kKeys, c10::dtype_or_default(dtype));
}

// The same memory, as the CPU sees it.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void settle_for(const at::Tensor& tensor) {
  if (tensor.device().type() == kType) settle({tensor.device().index(), streams[tensor.device().index()]});
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const auto& host = self.device().is_cpu() ? self : to;
  if (host.device().is_cpu() && self.numel() > 0 && !(non_blocking && host.is_pinned()))
    standin::host_waits(self.device().is_cpu() ? "a copy to the device" : "a copy from the device");
  settle_for(self);
  settle_for(to);
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
  auto target = on_cpu(to);
  target.copy_(on_cpu(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  standin::host_waits("the value of one element");
  settle_for(self);
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  auto plain = offset.has_value() ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), plain);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto bytes = static_cast<int64_t>(self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, source, 0, {static_cast<int64_t>(source.nbytes()) / bytes}, {});
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                               c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// torch's own way through mse_loss.out warns of the size of what it returns.
at::Tensor mse_loss(const at::Tensor& self, const at::Tensor& target, int64_t reduction) {
  Quiet guard;
  settle_for(self);
  return at::mse_loss(on_cpu(self), on_cpu(target), reduction).to(self.device());
}

// Changes its running statistics, which its schema does not say: the fallback would not bring them back.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& self, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  Quiet guard;
  settle_for(self);
  auto seen = [](const std::optional<at::Tensor>& tensor) {
    return tensor.has_value() && tensor->defined() ? std::optional<at::Tensor>(on_cpu(*tensor)) : std::nullopt;
  };
  auto [output, saved_mean, saved_variance] = at::native_batch_norm(
      on_cpu(self), seen(weight), seen(bias), seen(mean), seen(variance), training, momentum, eps);
  return {output.to(self.device()), saved_mean.to(self.device()), saved_variance.to(self.device())};
}

void record_stream(at::Tensor&, at::Stream) {}

// Operators whose result's size depends on values: on CUDA they wait for the device.
bool reads_values(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  static const std::unordered_set<std::string> always = {
      "aten::nonzero",   "aten::masked_select",      "aten::equal",    "aten::_unique",
      "aten::_unique2",  "aten::unique_dim",         "aten::bincount", "aten::unique_consecutive",
      "aten::embedding_renorm_", "aten::unique_dim_consecutive"};
  const auto& name = op.schema().name();
  if (always.count(name)) return true;
  const auto& arguments = op.schema().arguments();
  if (name == "aten::repeat_interleave") {
    for (size_t number = 0; number < arguments.size(); ++number)
      if (arguments[number].name() == "output_size") return stack[first + number].isNone();
    return false;
  }
  if (name != "aten::index" && name != "aten::_index_put_impl_" && name != "aten::_unsafe_index") return false;
  bool has_mask = false, only_masks = true;
  for (const auto& value : stack[first + 1].toListRef()) {
    if (value.isNone() || !value.toTensor().defined()) continue;
    const auto kind = value.toTensor().scalar_type();
    const bool is_mask = (kind == at::kBool || kind == at::kByte) && !value.toTensor().is_cpu();
    has_mask = has_mask || is_mask;
    only_masks = only_masks && is_mask;
  }
  // torch fills by the mask where one value of the CPU is put.
  const bool fills = name == "aten::_index_put_impl_" && only_masks && stack[first + 2].toTensor().numel() == 1 &&
                     stack[first + 2].toTensor().is_cpu();
  return has_mask && !fills;
}

c10::DeviceIndex index_in(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() && tensor.device().type() == kType ? tensor.device().index() : -1;
  }
  if (value.isList())
    for (const auto& one : value.toListRef())
      if (auto index = one.isTensor() ? index_in(one) : c10::DeviceIndex(-1); index >= 0) return index;
  return -1;
}

// Everything else: on the CPU, with the results brought back. Random numbers come from the device's own generator.
void elsewhere(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto first = stack->size() - arguments.size();
  auto index = current;
  for (size_t number = 0; number < arguments.size(); ++number) {
    if (auto found = index_in((*stack)[first + number]); found >= 0) {
      index = found;
      break;
    }
  }
  if (reads_values(op, *stack, first)) standin::host_waits(op.schema().name().c_str());
  settle({index, streams[index]});
  Quiet as_the_device;
  c10::DeviceGuard guard(c10::Device(kType, index));
  for (size_t number = 0; number < arguments.size(); ++number) {
    const auto& type = *arguments[number].type();
    const bool is_generator = type.str() == "Generator?" || type.str() == "Generator";
    if (!is_generator) continue;
    auto& value = (*stack)[first + number];
    auto given = value.toOptional<at::Generator>();
    auto own = given.has_value() ? *given : random_of(index);
    if (own.device().type() == kType) value = static_cast<Random*>(own.unsafeGetGeneratorImpl())->inner;
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("mse_loss", mse_loss);
  m.impl("native_batch_norm", batch_norm);
  m.impl("record_stream", record_stream);
  // Kernels of its own, which can be replaced: the fallback computes an operation's parts on the CPU.
  for (auto name : {"bernoulli_.float", "exponential_", "native_dropout", "normal_", "random_", "random_.from",
                    "random_.to", "randperm.generator_out", "uniform_"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&elsewhere>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

bool registered = [] {
  c10::SetAllocator(kType, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

namespace standin {

void* (*leave_python)() = nullptr;
void (*enter_python)(void*) = nullptr;

c10::Stream new_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), ++latest_stream);
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), streams[index]);
}

void order_after(c10::Stream stream, const PendingPtr& pending) {
  std::lock_guard<std::mutex> guard(orders_lock);
  has_orders = true;
  auto& all = orders[key_of(stream)];
  std::erase_if(all, [](const auto& one) { return one->is_settled(); });
  if (std::find(all.begin(), all.end(), pending) == all.end()) all.push_back(pending);
}

void settle_current(c10::DeviceIndex index) { settle({index, streams[index]}); }

void host_waits(const char* what) {
  if (quiet) return;
  refuse_while_capturing(what);
  ++host_waits_so_far;
  if (on_host_wait == 1) TORCH_WARN("the CPU waits for the stand-in device: ", what);
  TORCH_CHECK(on_host_wait != 2, "the CPU waits for the stand-in device: ", what);
}

}  // namespace standin

extern "C" {
long long standin_host_syncs() { return host_waits_so_far; }
void standin_set_sync_debug_mode(int mode) { on_host_wait = mode; }
void standin_set_capturing(bool value) { is_capturing = value; }
bool standin_is_capturing() { return is_capturing; }
int standin_device_count() { return kDevices; }
int standin_current_device() { return current; }
void standin_set_device(int index) { current = static_cast<c10::DeviceIndex>(index); }
void standin_manual_seed(int index, unsigned long long seed) { at::Generator(random_of(index)).set_current_seed(seed); }
long long standin_state_bytes() { return at::Generator(random_of(0)).get_state().nbytes(); }
void standin_get_state(int index, void* to) {
  auto state = at::Generator(random_of(index)).get_state();
  std::memcpy(to, state.data_ptr(), state.nbytes());
}
void standin_set_state(int index, void* from) {
  auto state = at::from_blob(from, {standin_state_bytes()}, at::TensorOptions(at::kByte)).clone();
  at::Generator(random_of(index)).set_state(state);
}
}
