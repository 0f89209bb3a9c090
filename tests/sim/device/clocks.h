// Order on the device: vector clocks.
//
// A kernel runs at once, on the thread that launches it; what a real device would do later shows only in the clocks. Each stream counts its
// kernels and knows, for every other stream, up to which kernel it has waited. Work A comes before work B exactly if the clock of B's
// stream had seen A when B was launched: that stays true however fast either runs, so a race is found even in a run in which nothing went wrong.
#pragma once
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sim {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int POOL = 32;  // side streams of one priority, as CUDA's pool has

inline c10::Device device(int index) { return c10::Device(SIM, static_cast<c10::DeviceIndex>(index)); }

// A stream of any device. Ids: 0 the default stream, 1 to 32 the pool, 33 to 64 the pool of high priority.
using StreamKey = int64_t;
inline StreamKey key(int device_index, int64_t stream_id) { return device_index * 128 + stream_id; }
inline StreamKey key(const c10::Stream& stream) { return key(stream.device_index(), stream.id()); }

// How many kernels of each stream are known to be over.
using Clock = std::map<StreamKey, int64_t>;
inline void merge(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}
inline bool knows(const Clock& clock, StreamKey stream, int64_t time) {
  auto found = clock.find(stream);
  return found != clock.end() && found->second >= time;
}

// One lock for all state. Kernels themselves run outside of it, and no tensor dies under it: that may need the GIL. State is never destroyed: tensors are freed until the very end of a process.
inline std::recursive_mutex& mutex() { static auto& it = *new std::recursive_mutex; return it; }
using Lock = std::lock_guard<std::recursive_mutex>;

inline std::map<StreamKey, Clock>& stream_clocks() { static auto& it = *new std::map<StreamKey, Clock>; return it; }

// What this thread has waited for. Each thread has its own: a writer's thread that waits for its copy orders nothing for the training's.
inline Clock& host_clock() { static thread_local Clock it; return it; }

// What any thread has waited for: it is over, whoever knows. A thread that hands on what it has waited for (a queue, a join) cannot be
// seen here, so memory that comes back asks this clock, and only the order of launches asks the thread's own.
inline Clock& over_clock() { static auto& it = *new Clock; return it; }

inline int& current_device() { static thread_local int it = 0; return it; }
inline int64_t& current_stream_id(int device_index) {
  static thread_local std::array<int64_t, DEVICES> ids{};
  return ids.at(device_index);
}
inline StreamKey current_stream(int device_index) { return key(device_index, current_stream_id(device_index)); }

// A side stream: the pool's next one, so that the 33rd is the first again.
inline c10::Stream pool_stream(c10::Device where, bool high_priority) {
  static auto& made = *new std::map<std::pair<int, bool>, int64_t>;
  Lock lock(mutex());
  int index = where.has_index() ? where.index() : current_device();
  int64_t count = made[{index, high_priority}]++;
  return c10::Stream(c10::Stream::UNSAFE, device(index), 1 + count % POOL + (high_priority ? POOL : 0));
}

// The next kernel of a stream begins: it comes after everything that the launching thread has waited for.
inline int64_t tick(StreamKey stream) {
  auto& clock = stream_clocks()[stream];
  merge(clock, host_clock());
  return ++clock[stream];
}

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

// Called with the name of each wait of a thread for the device; Python counts them. Never called under the lock: it takes the GIL.
inline std::function<void(const char*)>& on_wait() { static auto& it = *new std::function<void(const char*)>; return it; }

void settle_transfers();  // pinned.h

// This thread now knows that everything in `clock` is over.
inline void host_learns(const Clock& clock) {
  Lock lock(mutex());
  merge(host_clock(), clock);
  merge(over_clock(), clock);
  settle_transfers();
}

// This thread has stood still until everything in `clock` was over.
inline void host_waits(const Clock& clock, const char* name) {
  host_learns(clock);
  if (on_wait()) on_wait()(name);
}

inline Clock clock_of(StreamKey stream) {
  Lock lock(mutex());
  return stream_clocks()[stream];
}

}  // namespace sim
