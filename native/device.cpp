#include "device.hpp"

namespace trims {

Status Device::open(int index, std::unique_ptr<Device>* device) {
  const Driver* driver = nullptr;
  Status status = Driver::load(&driver);
  if (!status.ok()) return status;
  CuDevice number = 0;
  status = Driver::check(driver->device_get(&number, index), "cuDeviceGet");
  if (!status.ok()) return status;
  CuContext context = nullptr;
  status = Driver::check(driver->context_retain(&context, number), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  device->reset(new Device(*driver, number, context));
  const Current current(**device);
  status = current.status();
  for (CuStream& stream : (*device)->streams_) {
    if (!status.ok()) return status;
    status = Driver::check(driver->stream_create(&stream, kStreamNonBlocking), "cuStreamCreate");
  }
  return status;
}

Device::~Device() {
  {
    const Current current(*this);
    for (CuStream stream : streams_) {
      if (stream != nullptr) driver_.stream_destroy(stream);
    }
  }
  driver_.context_release(device_);
}

Status Device::drain() const {
  const Current current(*this);
  Status first = current.status();
  for (CuStream stream : streams_) {
    // Wait for every stream, even after an error of an earlier one: memory is freed after this.
    const Status status = Driver::check(driver_.stream_synchronize(stream), "cuStreamSynchronize");
    if (first.ok()) first = status;
  }
  return first;
}

Device::Current::Current(const Device& device)
    : driver_(device.driver_),
      status_(Driver::check(driver_.context_push(device.context_), "cuCtxPushCurrent")) {}

Device::Current::~Current() {
  CuContext popped = nullptr;
  if (status_.ok()) driver_.context_pop(&popped);
}

}  // namespace trims
