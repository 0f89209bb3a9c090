// What torch asks of a device: streams, events, and which device is the current one.
#pragma once
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "pinned.h"

namespace sim {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return device(current_device()); }
  void setDevice(c10::Device to) const override {
    TORCH_CHECK(to.index() < DEVICES, "there are ", DEVICES, " simulated devices, not ", to);
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(c10::Device to) const noexcept override {
    if (to.has_index()) current_device() = to.index();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }  // every dtype
  c10::Device exchangeDevice(c10::Device to) const override {
    auto before = getDevice();
    setDevice(to);
    return before;
  }

  c10::Stream getStream(c10::Device of) const override {
    int index = of.has_index() ? of.index() : current_device();
    return c10::Stream(c10::Stream::UNSAFE, device(index), current_stream_id(index));
  }
  c10::Stream getDefaultStream(c10::Device of) const override { return c10::Stream(c10::Stream::DEFAULT, of); }
  c10::Stream getNewStream(c10::Device of, int priority) const override { return pool_stream(of, priority < 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool high_priority) const override { return pool_stream(of, high_priority); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream_id(to.device_index()) = to.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {  // the device is fast: whoever asks hears that it is done
    host_learns(clock_of(key(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(clock_of(key(stream)), "stream.synchronize"); }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    Clock all;
    {
      Lock lock(mutex());
      for (auto& [stream, clock] : stream_clocks())
        if (stream / 128 == index) merge(all, clock);
    }
    host_waits(all, "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { allocator().recordStream(data, stream); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    Lock lock(mutex());
    *static_cast<Event*>(*event) = {clock_of(key(stream)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(mutex());
    if (event) merge(stream_clocks()[key(stream)], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) host_learns(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock, "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->time - static_cast<Event*>(from)->time).count();
  }
};

}  // namespace sim
