// A simulated accelerator, "sim", on torch's device type for devices from outside (privateuse1). See ../README.md.
//
// One translation unit: reading torch's headers is nearly all of the time that it takes to build.
#include <ATen/autocast_mode.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "collectives.h"

namespace sim {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice(device(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current_device();
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  at::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock(mutex());
    auto found = live_blocks().find(pointer);
    return device(found == live_blocks().end() ? current_device() : found->second->device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index < 0 ? current_device() : index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index < 0 ? current_device() : index); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_bytes(storage, bytes); }
};

static bool registered = [] {
  c10::SetAllocator(SIM, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

static void set_on_wait(py::object callback) {
  auto* kept = new py::object(std::move(callback));  // never destroyed: threads may wait while the interpreter ends
  on_wait() = [kept](const char* name) {
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    (*kept)(name);
  };
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &sim::empty_memory_format);
  m.impl("empty_strided", &sim::empty_strided);
  m.impl("resize_", &sim::resize_);
  m.impl("set_.source_Storage_storage_offset", &sim::set_storage);
  m.impl("set_.source_Tensor", &sim::set_source);
  m.impl("view", &sim::view);
  m.impl("as_strided", &sim::as_strided);
  m.impl("_reshape_alias", &sim::reshape_alias);
  m.impl("unfold", &sim::unfold);
  m.impl("_copy_from", &sim::copy_from);
  m.impl("_copy_from_and_resize", &sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", &sim::local_scalar_dense);
  m.impl("record_stream", &sim::record_stream);
  m.impl("_has_compatible_shallow_copy_type", &sim::has_compatible_shallow_copy_type);
}

// Autocast as on every accelerator: the lists that torch keeps for all of them.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  using at::autocast::CastPolicy;
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_PROMOTE(PROMOTE)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using sim::Lock;
  m.attr("DEVICES") = sim::DEVICES;
  m.def("races", [] { Lock lock(sim::mutex()); return sim::races(); });
  m.def("clear_races", [] { Lock lock(sim::mutex()); sim::races().clear(); });
  m.def("on_wait", &sim::set_on_wait);
  m.def("pinned_bytes", [] { Lock lock(sim::mutex()); return sim::pinned_bytes(); });
  m.def("set_capacity", [](int index, int64_t bytes) { sim::memory(index).capacity = bytes; });
  m.def("default_generator", [](int index) { return sim::default_generator(index); });
  m.def("group", [](sim::Pointer<c10d::Backend> gloo) -> sim::Pointer<c10d::Backend> { return c10::make_intrusive<sim::Group>(std::move(gloo)); });
}
