// Pinned memory of the host, and copies that are under way.
//
// A non-blocking copy between the device and pinned memory is over only when the host knows it: it has waited for the stream, or an event has
// told. Until then a copy to the host shows poison, and a copy to the device remembers its source, so that code which reads too early
// gets wrong numbers here, always, and code which writes too early is reported.
#pragma once
#include <ATen/core/Tensor.h>

#include "memory.h"

namespace sim {

inline std::map<char*, size_t>& pinned_blocks() { static auto& it = *new std::map<char*, size_t>; return it; }
inline int64_t& pinned_bytes() { static int64_t it = 0; return it; }

inline bool is_pinned(const void* pointer) {
  Lock lock(mutex());
  auto after = pinned_blocks().upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (after == pinned_blocks().begin()) return false;
  auto& [start, size] = *std::prev(after);
  return pointer < start + size;
}

inline void unpin(void* pointer) {
  Lock lock(mutex());
  auto found = pinned_blocks().find(static_cast<char*>(pointer));
  pinned_bytes() -= found->second;
  pinned_blocks().erase(found);
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    size_t size = 64;
    while (size < bytes) size *= 2;  // CUDA's takes powers of two
    void* pointer = nullptr;
    TORCH_CHECK(!posix_memalign(&pointer, 64, size), "no memory for ", size, " pinned bytes");
    Lock lock(mutex());
    pinned_blocks()[static_cast<char*>(pointer)] = size;
    pinned_bytes() += size;
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator& pinned_allocator() { static auto& it = *new PinnedAllocator; return it; }

struct Transfer {
  StreamKey stream;
  int64_t time;
  bool to_host;
  at::Tensor host;          // keeps the pinned memory, as CUDA's allocator does until the copy is over
  std::vector<char> bytes;  // what arrives on the host, or what was there when the copy to the device began
};
inline std::vector<Transfer>& transfers() { static auto& it = *new std::vector<Transfer>; return it; }

inline void finish(Transfer& transfer) {
  char* memory = static_cast<char*>(transfer.host.mutable_data_ptr());
  if (transfer.to_host) {
    std::memcpy(memory, transfer.bytes.data(), transfer.bytes.size());
  } else if (std::memcmp(memory, transfer.bytes.data(), transfer.bytes.size())) {
    std::ostringstream text;
    text << "write after read: the host has changed pinned memory while copy H2D on " << stream_name(transfer.stream) << " read it ("
         << transfer.bytes.size() << " bytes)";
    races().push_back(text.str());
  }
}

// Finish the copies for which `over` holds. One whose memory nobody else holds any more can disturb nobody.
inline void settle(const std::function<bool(const Transfer&)>& over) {
  Lock lock(mutex());
  std::vector<Transfer> kept;
  for (auto& transfer : transfers()) {
    if (over(transfer)) finish(transfer);
    else if (transfer.host.use_count() > 1 || transfer.host.storage().use_count() > 1) kept.push_back(std::move(transfer));
  }
  transfers().swap(kept);
}

inline void settle_transfers() {
  settle([](const Transfer& transfer) { return knows(host_clock(), transfer.stream, transfer.time); });
}

// Begin a copy whose host side is contiguous pinned memory; `bytes` is what a copy to the host brings.
inline void begin_transfer(StreamKey stream, bool to_host, const at::Tensor& host, const void* bytes) {
  auto size = host.nbytes();
  auto* from = static_cast<const char*>(to_host ? bytes : host.const_data_ptr());
  Lock lock(mutex());
  settle([](const Transfer&) { return false; });
  transfers().push_back({stream, stream_clocks()[stream][stream], to_host, host, std::vector<char>(from, from + size)});
  if (to_host) std::memset(host.mutable_data_ptr(), 0x7f, size);
}

// A copy on `stream` reads or overwrites pinned memory: copies to it that come earlier in the streams' order have arrived by then.
inline void settle_before(StreamKey stream, const at::Tensor& host) {
  Lock lock(mutex());
  auto* begin = static_cast<const char*>(host.const_data_ptr());
  auto* end = begin + host.nbytes();
  settle([&](const Transfer& transfer) {
    auto* start = static_cast<const char*>(transfer.host.const_data_ptr());
    return start < end && begin < start + transfer.bytes.size() && knows(stream_clocks()[stream], transfer.stream, transfer.time);
  });
}

}  // namespace sim
