// Collectives of device tensors: gloo on their bytes, in the order of the streams as NCCL keeps it.
//
// A group has one stream a device. A collective begins when the current stream has come so far, and `Work.wait()` makes the current stream wait,
// not the host: who reads a result without waiting, or changes an input too early, is a race. With async_op=False it runs on the current
// stream itself. The calling thread stands still until gloo is done, which counts as no wait: a real device would let it go on.
#pragma once
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "kernels.h"

namespace sim {

using Tensors = std::vector<Tensor>;
using c10d::OpType;
template <class T> using Pointer = c10::intrusive_ptr<T>;

inline Tensors as_cpu(const Tensors& tensors) {
  Tensors found;
  for (auto& tensor : tensors) found.push_back(as_cpu(tensor));
  return found;
}

struct Work final : c10d::Work {
  Work(int rank, OpType type, c10::Stream stream, Tensors used, Tensors results)
      : c10d::Work(rank, type), stream(stream), end(clock_of(key(stream))), used(std::move(used)), results(std::move(results)), type(type) {}
  // Whoever drops it without a wait: the memory is given to nobody before the collective is over, as NCCL's watchdog sees to.
  ~Work() override {
    for (auto& tensor : used) allocator().recordStream(tensor.storage().data_ptr(), stream);
  }
  bool isCompleted() override {
    host_learns(end);
    return true;
  }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    {
      Lock lock(mutex());
      merge(stream_clocks()[current_stream(stream.device_index())], end);
    }
    used.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (type == OpType::BARRIER) host_waits(end, "barrier");
    return true;
  }
  Tensors result() override { return results; }
  Pointer<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    c10::StreamGuard guard(stream);  // the future's event is recorded there
    future->markCompleted(at::IValue(results));
    return future;
  }

  c10::Stream stream;
  Clock end;
  Tensors used, results;
  OpType type;
};

class Group final : public c10d::Backend {
 public:
  explicit Group(Pointer<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  Pointer<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalescing_ = true; }
  Pointer<c10d::Work> endCoalescing() override {
    coalescing_ = false;
    auto parts = std::move(parts_);
    parts_.clear();
    Tensors used, results;
    for (auto& part : parts) {
      finish(part);
      used.insert(used.end(), part.used.begin(), part.used.end());
      results.insert(results.end(), part.results.begin(), part.results.end());
    }
    auto index = used.empty() ? current_device() : used.front().device().index();
    return c10::make_intrusive<Work>(rank_, OpType::COALESCED, stream(index), used, results);
  }

  Pointer<c10d::Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch("broadcast", OpType::BROADCAST, getRank() == options.rootRank ? tensors : Tensors{}, tensors, options.asyncOp, [&] {
      auto cpu = as_cpu(tensors);
      return Part{gloo_->broadcast(cpu, options)};
    });
  }

  Pointer<c10d::Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch("allreduce", OpType::ALLREDUCE, tensors, tensors, options.asyncOp, [&] {
      auto cpu = as_cpu(tensors);
      auto sums = options;
      sums.reduceOp = summed(options.reduceOp);
      return Part{gloo_->allreduce(cpu, sums), average(options.reduceOp, cpu)};
    });
  }

  Pointer<c10d::Work> allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return together(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      allreduce(one, options);
    });
  }

  Pointer<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch("reduce", OpType::REDUCE, tensors, tensors, options.asyncOp, [&] {
      auto cpu = as_cpu(tensors);
      auto sums = options;
      sums.reduceOp = summed(options.reduceOp);
      return Part{gloo_->reduce(cpu, sums), average(options.reduceOp, cpu)};
    });
  }

  Pointer<c10d::Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return launch("allgather", OpType::ALLGATHER, inputs, outputs.front(), options.asyncOp, [&] {
      std::vector<Tensors> to{as_cpu(outputs.front())};
      auto from = as_cpu(inputs);
      return Part{gloo_->allgather(to, from, options)};
    });
  }

  Pointer<c10d::Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return launch("allgather_into_tensor", OpType::_ALLGATHER_BASE, {input}, {output}, options.asyncOp, [&] {
      std::vector<Tensors> to{as_cpu(output).view(-1).chunk(getSize())};
      Tensors from{as_cpu(input).flatten().clone()};  // the input may be a part of the output
      return Part{gloo_->allgather(to, from, options)};
    });
  }

  Pointer<c10d::Work> allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return together(inputs.size(), [&](size_t i) { _allgather_base(outputs[i], inputs[i], options); });
  }

  Pointer<c10d::Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch("reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, {input}, {output}, options.asyncOp, [&] {
      Tensors sums{as_cpu(input).clone()};  // all ranks sum all parts, each keeps its own
      c10d::AllreduceOptions reduced;
      reduced.reduceOp = summed(options.reduceOp);
      auto keep = [this, sums, to = as_cpu(output), scale = average(options.reduceOp, sums)]() mutable {
        if (scale) scale();
        to.copy_(sums[0].flatten().chunk(getSize())[getRank()].view_as(to));
      };
      return Part{gloo_->allreduce(sums, reduced), keep};
    });
  }

  Pointer<c10d::Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors flat;
    for (auto& tensor : inputs.front()) flat.push_back(tensor.flatten());
    auto input = at::cat(flat);
    return _reduce_scatter_base(outputs.front(), input, options);
  }

  Pointer<c10d::Work> reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return together(inputs.size(), [&](size_t i) { _reduce_scatter_base(outputs[i], inputs[i], options); });
  }

  Pointer<c10d::Work> gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    return launch("gather", OpType::GATHER, inputs, outputs.empty() ? Tensors{} : outputs.front(), options.asyncOp, [&] {
      std::vector<Tensors> to;
      if (!outputs.empty()) to.push_back(as_cpu(outputs.front()));
      auto from = as_cpu(inputs);
      return Part{gloo_->gather(to, from, options)};
    });
  }

  Pointer<c10d::Work> scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    return launch("scatter", OpType::SCATTER, inputs.empty() ? Tensors{} : inputs.front(), outputs, options.asyncOp, [&] {
      std::vector<Tensors> from;
      if (!inputs.empty()) from.push_back(as_cpu(inputs.front()));
      auto to = as_cpu(outputs);
      return Part{gloo_->scatter(to, from, options)};
    });
  }

  Pointer<c10d::Work> alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
                                    const c10d::AllToAllOptions& options) override {
    return launch("all_to_all_single", OpType::ALLTOALL_BASE, {input}, {output}, options.asyncOp, [&] {
      auto to = as_cpu(output), from = as_cpu(input);
      return Part{gloo_->alltoall_base(to, from, output_sizes, input_sizes, options)};
    });
  }

  Pointer<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    return launch("send", OpType::SEND, tensors, {}, true, [&] {
      auto cpu = as_cpu(tensors);
      return Part{gloo_->send(cpu, to, tag)};
    });
  }

  Pointer<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    return launch("recv", OpType::RECV, {}, tensors, true, [&] {
      auto cpu = as_cpu(tensors);
      return Part{gloo_->recv(cpu, from, tag)};
    });
  }

  Pointer<c10d::Work> barrier(const c10d::BarrierOptions& options) override {
    return launch("barrier", OpType::BARRIER, {}, {}, true, [&] { return Part{gloo_->barrier(options)}; });
  }

 private:
  // A collective that gloo has begun.
  struct Part {
    Pointer<c10d::Work> work;
    std::function<void()> after;
    Tensors used{}, results{};
  };

  static c10d::ReduceOp summed(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op; }
  // Gloo has no AVG.
  std::function<void()> average(const c10d::ReduceOp& op, const Tensors& cpu) {
    if (!(op == c10d::ReduceOp::AVG)) return {};
    return [cpu, size = getSize()] {
      for (auto tensor : cpu) tensor.div_(size);
    };
  }

  static void finish(const Part& part) {
    part.work->wait();
    if (part.after) part.after();
  }

  c10::Stream stream(int index) {
    auto found = streams_.find(index);
    if (found == streams_.end()) found = streams_.emplace(index, pool_stream(device(index), true)).first;
    return found->second;
  }

  Pointer<c10d::Work> together(size_t count, const std::function<void(size_t)>& one) {
    bool inside = coalescing_;
    coalescing_ = true;
    for (size_t i = 0; i < count; ++i) one(i);
    return inside ? Pointer<c10d::Work>() : endCoalescing();
  }

  template <class Begin>
  Pointer<c10d::Work> launch(const char* name, OpType type, const Tensors& reads, const Tensors& writes, bool async, const Begin& begin) {
    int index = !reads.empty() ? reads.front().device().index() : !writes.empty() ? writes.front().device().index() : current_device();
    auto current = c10::Stream(c10::Stream::UNSAFE, device(index), current_stream_id(index));
    auto on = async || coalescing_ ? stream(index) : current;
    {
      Lock lock(mutex());
      sim::merge(stream_clocks()[key(on)], stream_clocks()[key(current)]);
      tick(key(on));
      for (auto& tensor : reads) touch(tensor, false, key(on), name);
      for (auto& tensor : writes) touch(tensor, true, key(on), name);
    }
    Part part = begin();
    part.used = reads;
    part.used.insert(part.used.end(), writes.begin(), writes.end());
    part.results = writes;
    if (coalescing_) {
      parts_.push_back(std::move(part));
      return Pointer<c10d::Work>();
    }
    finish(part);
    return c10::make_intrusive<Work>(rank_, type, on, part.used, part.results);
  }

  Pointer<c10d::Backend> gloo_;
  std::map<int, c10::Stream> streams_;
  std::vector<Part> parts_;
  bool coalescing_ = false;
};

}  // namespace sim
