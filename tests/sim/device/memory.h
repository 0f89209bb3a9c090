// Device memory: a caching allocator whose blocks belong to streams, as CUDA's do, and the record of who uses which bytes.
#pragma once
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "clocks.h"

namespace sim {

// A kernel that has read or written the bytes [begin, end) of a block.
struct Access {
  StreamKey stream;
  int64_t time;
  std::string op;
  size_t begin, end;
  bool overlaps(const Access& other) const { return begin < other.end && other.begin < end; }
};

// Who has used the bytes of a block.
struct History {
  std::vector<Access> reads, writes;
};

struct Block : History {
  Block(void* pointer, size_t size, int device, StreamKey stream) : pointer(pointer), size(size), device(device), stream(stream) {}
  void* pointer;
  size_t size;
  int device;
  StreamKey stream;              // whose cache it comes from and goes back to
  std::set<StreamKey> recorded;  // record_stream
};

struct DeviceMemory {
  int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, allocations = 0;
  int64_t capacity = int64_t(16) << 30;
};

inline std::map<void*, Block*>& live_blocks() { static auto& it = *new std::map<void*, Block*>; return it; }
inline std::multimap<std::pair<StreamKey, size_t>, Block*>& cached_blocks() {
  static auto& it = *new std::multimap<std::pair<StreamKey, size_t>, Block*>;
  return it;
}
inline DeviceMemory& memory(int device_index) {
  static auto& it = *new std::array<DeviceMemory, DEVICES>;
  return it.at(device_index);
}
inline std::vector<std::string>& races() { static auto& it = *new std::vector<std::string>; return it; }

inline std::string stream_name(StreamKey stream) {
  return "stream " + std::to_string(stream % 128) + " of sim:" + std::to_string(stream / 128);
}

inline void report_race(const char* kind, const Access& now, const Access& earlier, size_t bytes, const char* where) {
  std::ostringstream text;
  text << kind << ": " << now.op << " on " << stream_name(now.stream) << " is not ordered after " << earlier.op << " on "
       << stream_name(earlier.stream) << " (" << bytes << " bytes" << where << ")";
  races().push_back(text.str());
}

// Take from the accesses what [begin, end) covers: whoever comes after the new access comes after them too, or has been reported.
inline void cover(std::vector<Access>& accesses, const Access& now, bool any_stream) {
  for (auto& old : accesses) {
    if ((!any_stream && old.stream != now.stream) || !old.overlaps(now)) continue;
    if (now.begin <= old.begin) old.begin = std::min(now.end, old.end);
    else if (old.end <= now.end) old.end = now.begin;
  }
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), [](const Access& old) { return old.begin >= old.end; }), accesses.end());
}

// Work on `now.stream` reads or writes bytes of a block of `size` bytes, after the work in `history`. `where` ends the report of a race.
inline void note_access(History& history, const Access& now, bool writes, size_t size, const char* where = "") {
  const Clock& clock = stream_clocks()[now.stream];
  auto check = [&](const std::vector<Access>& earlier, const char* kind) {
    for (auto& access : earlier)
      if (access.stream != now.stream && access.overlaps(now) && !knows(clock, access.stream, access.time)) report_race(kind, now, access, size, where);
  };
  check(history.writes, writes ? "write after write" : "read after write");
  if (writes) {
    check(history.reads, "write after read");
    cover(history.reads, now, true);
    cover(history.writes, now, true);
    history.writes.push_back(now);
  } else {
    cover(history.reads, now, false);
    history.reads.push_back(now);
  }
}

// A kernel on `stream` touches bytes [begin, end) of the block at `base`.
inline void touch(void* base, size_t begin, size_t end, bool writes, StreamKey stream, const std::string& op) {
  auto found = live_blocks().find(base);
  if (found == live_blocks().end() || begin >= end) return;
  note_access(*found->second, {stream, stream_clocks()[stream][stream], op, begin, end}, writes, found->second->size);
}

// A freed block goes back to its stream's cache with its history: the stream that gets it next must come after those who used it. What
// a thread has waited for is over; so is, when the memory comes back, the work of streams that `record_stream` named.
inline void free_block(void* pointer) {
  Lock lock(mutex());
  auto found = live_blocks().find(pointer);
  if (found == live_blocks().end()) return;
  Block* block = found->second;
  live_blocks().erase(found);
  auto over = [&](const Access& access) { return block->recorded.count(access.stream) || knows(over_clock(), access.stream, access.time); };
  for (auto* accesses : {&block->reads, &block->writes})
    accesses->erase(std::remove_if(accesses->begin(), accesses->end(), over), accesses->end());
  block->recorded.clear();
  memory(block->device).allocated -= block->size;
  cached_blocks().emplace(std::make_pair(block->stream, block->size), block);
}

inline void empty_cache() {
  Lock lock(mutex());
  for (auto& [_, block] : cached_blocks()) {
    memory(block->device).reserved -= block->size;
    std::free(block->pointer);
    delete block;
  }
  cached_blocks().clear();
}

inline Block* new_block(int device_index, StreamKey stream, size_t size) {
  auto& counted = memory(device_index);
  if (counted.reserved + int64_t(size) > counted.capacity) empty_cache();
  TORCH_CHECK_WITH(OutOfMemoryError, counted.reserved + int64_t(size) <= counted.capacity, "sim out of memory. Tried to allocate ", size,
                   " bytes; ", counted.reserved, " of ", counted.capacity, " bytes are in use");
  void* pointer = nullptr;
  TORCH_CHECK(!posix_memalign(&pointer, 64, size), "the host has no memory for ", size, " bytes of the simulated device");
  counted.reserved += size;
  counted.peak_reserved = std::max(counted.peak_reserved, counted.reserved);
  return new Block(pointer, size, device_index, stream);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int index = current_device();
    if (!bytes) return {nullptr, nullptr, &free_block, device(index)};
    size_t size = (bytes + 511) / 512 * 512;  // as CUDA's allocator rounds
    StreamKey stream = current_stream(index);
    Lock lock(mutex());
    Block* block;
    auto cached = cached_blocks().find({stream, size});
    if (cached != cached_blocks().end()) {
      block = cached->second;
      cached_blocks().erase(cached);
    } else {
      block = new_block(index, stream, size);
    }
    std::memset(block->pointer, 0x7f, size);  // nobody can rely on what was there
    live_blocks()[block->pointer] = block;
    auto& counted = memory(index);
    ++counted.allocations;
    counted.allocated += size;
    counted.peak = std::max(counted.peak, counted.allocated);
    return {block->pointer, block->pointer, &free_block, device(index)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex());
    auto found = live_blocks().find(data.get());
    if (found != live_blocks().end() && key(stream) != found->second->stream) found->second->recorded.insert(key(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock(mutex());
    auto& counted = memory(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto fill = [](auto& stat, int64_t current, int64_t peak) { stat[0].current = current; stat[0].peak = peak; };
    fill(stats.allocated_bytes, counted.allocated, counted.peak);
    fill(stats.active_bytes, counted.allocated, counted.peak);
    fill(stats.reserved_bytes, counted.reserved, counted.peak_reserved);
    stats.num_device_alloc = counted.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock(mutex());
    memory(index).peak = memory(index).allocated;
    memory(index).peak_reserved = memory(index).reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Lock lock(mutex());
    return {memory(index).capacity - memory(index).reserved, memory(index).capacity};
  }
};
inline DeviceAllocator& allocator() { static auto& it = *new DeviceAllocator; return it; }

}  // namespace sim
