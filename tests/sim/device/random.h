// Random numbers: each device has a generator of its own, beside the CPU's.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include "clocks.h"

namespace sim {

// A generator of the device that draws what a CPU generator with the same seed draws: kernels run on the CPU.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int index, at::Generator inner = at::make_generator<at::CPUGeneratorImpl>())
      : c10::GeneratorImpl(sim::device(index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device_.index(), inner.clone()); }

  at::Generator inner;
};

inline at::Generator& default_generator(int index) {
  static auto& all = *new std::array<at::Generator, DEVICES>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return all.at(index);
}

inline at::Generator& inner_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace sim
