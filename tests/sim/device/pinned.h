// Pinned memory of the host, and copies that are under way.
//
// A non-blocking copy between the device and pinned memory is over only when the host knows it: it has waited for the stream, or an event has
// told. Until then a copy to the host shows poison, and a copy to the device remembers its source, so that code which reads too early
// gets wrong numbers here, always, and code which writes too early is reported. Two copies that use the same bytes on two streams without an
// order between them are a race, as two kernels are in the device's memory.
#pragma once
#include "memory.h"

namespace sim {

struct PinnedBlock : History {
  size_t size = 0;
};
inline std::map<char*, PinnedBlock>& pinned_blocks() { static auto& it = *new std::map<char*, PinnedBlock>; return it; }
inline int64_t& pinned_bytes() { static int64_t it = 0; return it; }

// A copy between the device and pinned memory that may not be over.
struct Transfer {
  StreamKey stream;
  int64_t time;
  bool to_host;
  char* memory;
  std::vector<char> bytes;  // what arrives on the host, or what was there when the copy to the device began
  bool overlaps(const char* begin, const char* end) const { return memory < end && begin < memory + bytes.size(); }
};
inline std::vector<Transfer>& transfers() { static auto& it = *new std::vector<Transfer>; return it; }
inline void drop_transfers(const std::function<bool(const Transfer&)>& which) {
  transfers().erase(std::remove_if(transfers().begin(), transfers().end(), which), transfers().end());
}

// The block that has this address, and its start; null: the address is not pinned.
inline std::pair<char* const, PinnedBlock>* pinned_block(const void* pointer) {
  auto after = pinned_blocks().upper_bound(static_cast<char*>(const_cast<void*>(pointer)));
  if (after == pinned_blocks().begin()) return nullptr;
  auto& found = *std::prev(after);
  return pointer < found.first + found.second.size ? &found : nullptr;
}

inline bool is_pinned(const void* pointer) {
  Lock lock(mutex());
  return pinned_block(pointer) != nullptr;
}

// A copy on `stream` reads or writes `size` bytes of pinned memory.
inline void touch_pinned(const void* pointer, size_t size, bool writes, StreamKey stream, const std::string& op) {
  Lock lock(mutex());
  auto* found = pinned_block(pointer);
  if (!found || !size) return;
  size_t begin = static_cast<const char*>(pointer) - found->first;
  note_access(found->second, {stream, stream_clocks()[stream][stream], op, begin, begin + size}, writes, found->second.size, " of pinned memory");
}

// CUDA's allocator gives the memory to nobody before copies are over; here they end with it.
inline void unpin(void* pointer) {
  Lock lock(mutex());
  auto found = pinned_blocks().find(static_cast<char*>(pointer));
  char* start = found->first;
  size_t size = found->second.size;
  drop_transfers([&](const Transfer& transfer) { return transfer.overlaps(start, start + size); });
  pinned_bytes() -= size;
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
    pinned_blocks()[static_cast<char*>(pointer)].size = size;
    pinned_bytes() += size;
    return {pointer, pointer, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator& pinned_allocator() { static auto& it = *new PinnedAllocator; return it; }

inline void finish(const Transfer& transfer) {
  if (transfer.to_host) {
    std::memcpy(transfer.memory, transfer.bytes.data(), transfer.bytes.size());
  } else if (std::memcmp(transfer.memory, transfer.bytes.data(), transfer.bytes.size())) {
    std::ostringstream text;
    text << "write after read: the host has changed pinned memory while copy H2D on " << stream_name(transfer.stream) << " read it ("
         << transfer.bytes.size() << " bytes)";
    races().push_back(text.str());
  }
}

// Finish the copies for which `over` holds.
inline void settle(const std::function<bool(const Transfer&)>& over) {
  Lock lock(mutex());
  drop_transfers([&](const Transfer& transfer) {
    if (!over(transfer)) return false;
    finish(transfer);
    return true;
  });
}

inline void settle_transfers() {
  settle([](const Transfer& transfer) { return knows(host_clock(), transfer.stream, transfer.time); });
}

// Begin a copy whose host side is contiguous pinned memory; `arrives` is what a copy to the host brings, null for one to the device.
inline void begin_transfer(StreamKey stream, void* memory, size_t size, const void* arrives) {
  auto* from = static_cast<const char*>(arrives ? arrives : memory);
  Lock lock(mutex());
  transfers().push_back({stream, stream_clocks()[stream][stream], arrives != nullptr, static_cast<char*>(memory), {from, from + size}});
  if (arrives) std::memset(memory, 0x7f, size);
}

// A copy on `stream` reads or overwrites pinned memory: copies to it that come earlier in the streams' order have arrived by then.
inline void settle_before(StreamKey stream, const void* memory, size_t size) {
  auto* begin = static_cast<const char*>(memory);
  settle([&](const Transfer& transfer) {
    return transfer.overlaps(begin, begin + size) && knows(stream_clocks()[stream], transfer.stream, transfer.time);
  });
}

}  // namespace sim
