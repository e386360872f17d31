// Host memory for copies to and from a device, with the device's streams: pinned, or plain where
// the driver refuses to pin.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "device.hpp"

namespace trims {

class Ring {
 public:
  // With plain memory copies are correct but staged by the driver: a call returns when it has taken
  // (or delivered) the bytes, so copies do not overlap with reads in their thread.
  static Status open(int device_index, size_t size, std::unique_ptr<Ring>* ring);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  const Device& device() const { return *device_; }
  uint8_t* data() const { return data_; }
  bool is_pinned() const { return is_pinned_; }
  // Leaves the memory allocated for ever, because copies may still use it.
  void abandon() { data_ = nullptr; }
  bool fits(int device_index, size_t size) const {
    return device_index == device_index_ && size <= size_;
  }

 private:
  Ring(int device_index, std::unique_ptr<Device> device, size_t size);

  const int device_index_;
  const std::unique_ptr<Device> device_;
  const size_t size_;
  uint8_t* data_ = nullptr;
  bool is_pinned_ = false;
};

// The process's rings. Pinning takes longer than copying a small model, so while the keeper is
// held, one ring is kept for the next transfer. Thread-safe; a forked child forgets the kept ring.
class RingKeeper {
 public:
  // Never destroyed: nothing may call the driver when the process ends.
  static RingKeeper& ours();

  // Until an equal number of release() calls, rings have at least `size` bytes, and one is kept.
  void hold(size_t size);
  void release();

  Status take(int device_index, size_t size, std::unique_ptr<Ring>* ring);
  // The caller has waited for all copies that use it.
  void give_back(std::unique_ptr<Ring> ring);

 private:
  std::unique_ptr<Ring> exchange(std::unique_ptr<Ring> ring);

  std::mutex mutex_;
  unsigned holders_ = 0;
  size_t size_ = 0;
  std::unique_ptr<Ring> kept_;
  pid_t process_ = 0;  // the owner of kept_
};

}  // namespace trims
