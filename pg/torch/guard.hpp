// What c10's futures ask of a device that torch_tpu's device guard doesn't answer.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace podring::device {

// torch_tpu's guard, with a pool of streams. Future::then takes a stream of the pool for its callback when the future
// ends, where nobody hears of a failure: the future that then() gave would never end. A TPU has one stream, so the pool
// is that one.
//
// Every virtual function of the interface (torch 2.14 and 2.15 have the same) is handed on.
class GuardWithPool final : public c10::impl::DeviceGuardImplInterface {
 public:
  // Puts one in the place of torch_tpu's guard, if that has no pool: torch_tpu 0.2.0. Once; `device` is a device "tpu".
  static void install(const c10::Device& device) {
    [[maybe_unused]] static const bool once = [&device] {
      const auto* const own = c10::impl::getDeviceGuardImpl(c10::DeviceType::PrivateUse1);
      if (has_pool(*own, device)) return false;
      // Never freed, like every guard: whoever asked for it keeps it.
      c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new GuardWithPool(*own));
      return true;
    }();
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*isHighPriority*/) const override {
    return own_.getStream(device);
  }

  c10::DeviceType type() const override { return own_.type(); }
  c10::Device exchangeDevice(c10::Device device) const override { return own_.exchangeDevice(device); }
  c10::Device getDevice() const override { return own_.getDevice(); }
  void setDevice(c10::Device device) const override { own_.setDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { own_.uncheckedSetDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return own_.deviceCount(); }
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override {
    return own_.getDeviceCapability(device);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { own_.synchronizeDevice(index); }

  c10::Stream getStream(c10::Device device) const override { return own_.getStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return own_.getDefaultStream(device); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return own_.getNewStream(device, priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return own_.exchangeStream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return own_.getStreamNativeHandle(stream); }
  bool queryStream(const c10::Stream& stream) const override { return own_.queryStream(stream); }
  void synchronizeStream(const c10::Stream& stream) const override { own_.synchronizeStream(stream); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return own_.isStreamCapturing(stream); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    own_.recordDataPtrOnStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex index,
              const c10::EventFlag flag) const override {
    own_.record(event, stream, index, flag);
  }
  void block(void* event, const c10::Stream& stream) const override { own_.block(event, stream); }
  bool queryEvent(void* event) const override { return own_.queryEvent(event); }
  void synchronizeEvent(void* event) const override { own_.synchronizeEvent(event); }
  void destroyEvent(void* event, const c10::DeviceIndex index) const noexcept override {
    own_.destroyEvent(event, index);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex index) const override {
    return own_.elapsedTime(from, to, index);
  }

 private:
  explicit GuardWithPool(const DeviceGuardImplInterface& own) : own_(own) {}

  static bool has_pool(const DeviceGuardImplInterface& guard, const c10::Device& device) {
    try {
      guard.getStreamFromGlobalPool(device);
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }

  const DeviceGuardImplInterface& own_;
};

}  // namespace podring::device
