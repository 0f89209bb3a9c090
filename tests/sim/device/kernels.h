// Kernels: every operation of torch runs its CPU kernel on the device's bytes, once its tensors' devices and its place in the streams' order
// are checked. By hand stand only those that move data, make tensors or views.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "random.h"
#include "streams.h"

namespace sim {

using at::Tensor;

inline bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

// The same bytes as a CPU tensor.
inline Tensor as_cpu(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  auto options = tensor.options().device(c10::kCPU).requires_grad(false).pinned_memory(false);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// A kernel on `stream` reads or writes a tensor: the bytes from its first to its last element.
inline void touch(const Tensor& tensor, bool writes, StreamKey stream, const std::string& op) {
  if (!on_device(tensor) || !tensor.numel()) return;
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  size_t item = tensor.itemsize();
  touch(tensor.storage().mutable_data(), tensor.storage_offset() * item, (last + 1) * item, writes, stream, op);
}

// ---- tensors ---------------------------------------------------------------------------------------------------------------------

inline c10::Device chosen(std::optional<c10::Device> asked) { return asked && asked->has_index() ? *asked : device(current_device()); }

inline Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> asked,
                                  std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(asked));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<c10::Device> asked, std::optional<bool>) {
  c10::DeviceGuard guard(chosen(asked));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

inline void resize_bytes(const c10::Storage& storage, size_t bytes) {
  c10::DeviceGuard guard(storage.device());
  auto data = allocator().allocate(bytes);
  if (bytes && storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
  auto& changed = const_cast<c10::Storage&>(storage);
  changed.set_data_ptr_noswap(std::move(data));
  changed.set_nbytes(bytes);
}

inline const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t bytes = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < bytes) resize_bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

inline Tensor& set_storage(Tensor& tensor, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return tensor;
}
inline Tensor& set_source(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline Tensor view(const Tensor& tensor, c10::IntArrayRef size) { return at::native::view(tensor, size); }
inline Tensor as_strided(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}
inline Tensor reshape_alias(const Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(tensor, size, stride); }
inline Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(tensor, dim, size, step); }

inline void record_stream(Tensor& tensor, c10::Stream stream) { allocator().recordStream(tensor.storage().data_ptr(), stream); }

// `Module.to` then changes what a Parameter holds, as from CPU to CUDA, and does not put another Parameter in its place.
inline bool has_compatible_shallow_copy_type(const Tensor&, const Tensor& from) { return from.layout() == c10::kStrided; }

// ---- copies ----------------------------------------------------------------------------------------------------------------------

inline Tensor copy_between_devices(const Tensor& from, const Tensor& to) {
  Lock lock(mutex());
  StreamKey reader = current_stream(from.device().index()), writer = current_stream(to.device().index());
  merge(stream_clocks()[reader], stream_clocks()[writer]);  // both devices' current streams stand at the copy, as with CUDA
  tick(reader);
  touch(from, false, reader, "copy D2D");
  touch(to, true, reader, "copy D2D");
  merge(stream_clocks()[writer], stream_clocks()[reader]);
  as_cpu(to).copy_(as_cpu(from));
  return to;
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (on_device(from) && on_device(to)) return copy_between_devices(from, to);
  if (!to.numel()) return to;
  bool to_host = on_device(from);
  const char* name = to_host ? "copy D2H" : "copy H2D";
  const Tensor& host = to_host ? to : from;
  StreamKey stream = current_stream((to_host ? from : to).device().index());
  bool pinned = is_pinned(host.const_data_ptr());
  bool deferred = non_blocking && pinned && host.is_contiguous();
  {
    Lock lock(mutex());
    tick(stream);
    touch(from, false, stream, name);
    touch(to, true, stream, name);
    if (pinned) {
      touch_pinned(host.const_data_ptr(), host.nbytes(), to_host, stream, name);
      settle_before(stream, host.const_data_ptr(), host.nbytes());
    }
  }
  if (deferred) {
    auto arrives = to_host ? as_cpu(from).to(to.scalar_type()).expand_as(to).contiguous() : Tensor();
    if (!to_host) as_cpu(to).copy_(from);
    begin_transfer(stream, const_cast<void*>(host.const_data_ptr()), host.nbytes(), to_host ? arrives.const_data_ptr() : nullptr);
    return to;
  }
  as_cpu(to).copy_(as_cpu(from));
  // CUDA: a copy to pageable memory always waits; one from it is staged first, and waits only if it is a blocking one.
  if (!non_blocking || (to_host && !pinned)) host_waits(clock_of(stream), name);
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar local_scalar_dense(const Tensor& tensor) {
  StreamKey stream = current_stream(tensor.device().index());
  {
    Lock lock(mutex());
    tick(stream);
    touch(tensor, false, stream, "item");
  }
  host_waits(clock_of(stream), "item");
  return as_cpu(tensor).item();
}

// ---- everything else ---------------------------------------------------------------------------------------------------------------

using Change = std::function<Tensor(const Tensor&, bool writes)>;

// Put `change(tensor)` in the place of each tensor among `count` values of the stack.
inline void each_tensor(torch::jit::Stack& stack, size_t begin, size_t count, const std::vector<c10::Argument>& described, const Change& change) {
  for (size_t i = 0; i < count; ++i) {
    auto& value = stack[begin + i];
    const auto* alias = described[i].alias_info();
    bool writes = alias && alias->isWrite();
    if (value.isTensor()) {
      value = change(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      c10::List<Tensor> changed;
      for (auto& tensor : value.toTensorVector()) changed.push_back(change(tensor, writes));
      value = changed;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> changed;
      for (auto&& tensor : value.toOptionalTensorVector())
        changed.push_back(tensor && tensor->defined() ? std::optional<Tensor>(change(*tensor, writes)) : tensor);
      value = changed;
    }
  }
}

// Operations that take tensors of the CPU beside the device's: indices, and lists of copies.
inline bool takes_cpu_tensors(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" || name.rfind("aten::_foreach_copy", 0) == 0;
}

// Whether a CUDA kernel of this name waits: the size or the value of its result depends on data, or an index must be moved to the device.
// (A mask in `index` has been through `nonzero` when it comes here.)
inline bool waits(const c10::OperatorHandle& op, const std::string& name, const torch::jit::Stack& given) {
  for (auto tag : op.getTags())
    if ((tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) && name != "aten::index") return true;
  if (name != "aten::index" && name.find("index_put") == std::string::npos) return false;
  bool puts = name != "aten::index";
  bool fills = puts && given[2].toTensor().numel() == 1;  // a mask and one value: no indices are computed
  for (auto&& index : given[1].toOptionalTensorVector()) {
    if (!index || !index->defined()) continue;
    bool mask = index->scalar_type() == at::kBool || index->scalar_type() == at::kByte;
    if ((mask && puts && !fills) || (index->device().is_cpu() && index->dim())) return true;
  }
  return false;
}

// Where an operation runs; an error if its tensors are not all there.
inline std::optional<c10::Device> place(const std::string& name, torch::jit::Stack& stack, size_t begin, const std::vector<c10::Argument>& arguments) {
  std::optional<c10::Device> where;
  std::string odd;
  each_tensor(stack, begin, arguments.size(), arguments, [&](const Tensor& tensor, bool) {
    if (on_device(tensor)) {
      if (where && *where != tensor.device()) odd = tensor.device().str();
      where = tensor.device();
    }
    return tensor;
  });
  if (where && !takes_cpu_tensors(name))
    each_tensor(stack, begin, arguments.size(), arguments, [&](const Tensor& tensor, bool) {
      if (tensor.defined() && tensor.device().is_cpu() && tensor.dim()) odd = "cpu";
      return tensor;
    });
  TORCH_CHECK(odd.empty(), "Expected all tensors to be on the same device, but found at least two devices, ", where->str(), " and ", odd, "! (", name, ")");
  return where;
}

// The CPU's default generator draws in the device's state, for kernels that take no generator.
struct BorrowedGenerator {
  BorrowedGenerator(bool needed, int index) : cpu(at::detail::getDefaultCPUGenerator()), own(inner_generator(default_generator(index))), needed(needed) {
    if (!needed) return;
    std::lock_guard<std::mutex> lock(cpu.mutex());
    kept = cpu.get_state();
    cpu.set_state(own.get_state());
  }
  ~BorrowedGenerator() {
    if (!needed) return;
    std::lock_guard<std::mutex> lock(cpu.mutex());
    own.set_state(cpu.get_state());
    cpu.set_state(kept);
  }
  at::Generator cpu, own;
  Tensor kept;
  bool needed;
};

// Give the CPU kernel the CPU generators that stand behind the device's. Returns whether it draws without one.
inline bool give_generators(const c10::OperatorHandle& op, torch::jit::Stack& stack, size_t begin, c10::Device where) {
  bool draws = false;
  for (auto tag : op.getTags()) draws |= tag == at::Tag::nondeterministic_seeded;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = stack[begin + i];
    if (arguments[i].name() != "generator") continue;
    at::Generator generator = value.isGenerator() ? value.toGenerator() : default_generator(where.index());
    TORCH_CHECK(generator.device() == where, "Expected a '", where, "' generator, but found '", generator.device(), "'");
    value = inner_generator(generator);
    draws = false;
  }
  return draws;
}

inline void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  size_t begin = stack->size() - schema.arguments().size();
  torch::jit::Stack given(stack->begin() + begin, stack->end());
  auto each_argument = [&](const Change& change) { each_tensor(*stack, begin, given.size(), schema.arguments(), change); };

  auto found = place(name, *stack, begin, schema.arguments());
  auto where = found.value_or(device(current_device()));
  StreamKey stream = current_stream(where.index());
  bool must_wait = waits(op, name, given);
  {
    Lock lock(mutex());
    tick(stream);
    each_argument([&](const Tensor& tensor, bool writes) {
      if (!writes) touch(tensor, false, stream, name);
      return tensor;
    });
    each_argument([&](const Tensor& tensor, bool writes) {
      if (writes) touch(tensor, true, stream, name);
      return tensor;
    });
  }

  each_argument([&](const Tensor& tensor, bool) { return as_cpu(tensor); });
  std::vector<std::pair<Tensor, Tensor>> outs;  // a kernel may resize what it is given as out=: it gets a tensor of its own
  for (size_t i = 0; i < given.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (!schema.arguments()[i].is_out() || !given[i].isTensor() || !on_device(given[i].toTensor())) continue;
    outs.emplace_back(given[i].toTensor(), at::empty({0}, value.toTensor().options()));
    value = outs.back().second;
  }
  for (size_t i = begin; i < stack->size(); ++i)
    if ((*stack)[i].isDevice() && (*stack)[i].toDevice().type() == SIM) (*stack)[i] = c10::Device(c10::kCPU);
  {
    BorrowedGenerator generator(give_generators(op, *stack, begin, where), where.index());
    op.callBoxed(stack);
  }
  for (auto& [tensor, cpu] : outs) {
    if (tensor.sizes() != cpu.sizes()) tensor.resize_(cpu.sizes());
    as_cpu(tensor).copy_(cpu);
  }
  if (must_wait) host_waits(clock_of(stream), name.c_str());

  c10::DeviceGuard guard(where);
  const auto& returns = schema.returns();
  size_t first = stack->size() - returns.size();
  for (size_t i = 0; i < returns.size(); ++i) {
    const auto* alias = returns[i].alias_info();
    if (!alias) continue;
    for (size_t j = 0; j < given.size(); ++j) {
      const auto* of = schema.arguments()[j].alias_info();
      if (of && of->isWrite() && *of == *alias) (*stack)[first + i] = given[j];
    }
    TORCH_CHECK(!found || alias->isWrite(), name, " gives a view, for which the simulated device has no kernel: add it to tests/sim/device/kernels.h");
  }
  each_tensor(*stack, first, returns.size(), returns, [&](const Tensor& tensor, bool) {
    if (!tensor.defined() || !tensor.device().is_cpu() || !found) return tensor;
    auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(where));
    as_cpu(made).copy_(tensor);
    Lock lock(mutex());
    touch(made, true, stream, name);
    return made;
  });
}

}  // namespace sim
