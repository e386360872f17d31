// A device's primary context, retained, with two streams between which copies alternate.
#pragma once

#include <cstdint>
#include <memory>

#include "driver.hpp"

namespace trims {

class Device {
 public:
  static constexpr unsigned kStreams = 2;

  // `index` is the driver's, under this process's CUDA_VISIBLE_DEVICES.
  static Status open(int index, std::unique_ptr<Device>* device);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Driver& driver() const { return driver_; }
  CuStream stream(uint64_t number) const { return streams_[number % kStreams]; }

  // Waits until both streams are empty; returns the first error of a copy on them.
  Status drain() const;

  // Makes the context current in a thread for the life of the object.
  class Current {
   public:
    explicit Current(const Device& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const Driver& driver_;
    Status status_;
  };

 private:
  Device(const Driver& driver, CuDevice device, CuContext context)
      : driver_(driver), device_(device), context_(context) {}

  const Driver& driver_;
  const CuDevice device_;
  const CuContext context_;
  CuStream streams_[kStreams] = {};
};

}  // namespace trims
