#include "ring.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace trims {
namespace {

constexpr size_t kPageBytes = 4096;

uint8_t* allocate_plain(size_t size) {
  const size_t whole_pages = (size + kPageBytes - 1) / kPageBytes * kPageBytes;
  return static_cast<uint8_t*>(std::aligned_alloc(kPageBytes, whole_pages));
}

}  // namespace

Status Ring::open(int device_index, size_t size, std::unique_ptr<Ring>* ring) {
  std::unique_ptr<Device> device;
  const Status status = Device::open(device_index, &device);
  if (!status.ok()) return status;
  ring->reset(new Ring(device_index, std::move(device), size));
  if ((*ring)->data_ == nullptr) return {Code::kNoMemory, 0, "aligned_alloc"};
  return {};
}

Ring::Ring(int device_index, std::unique_ptr<Device> device, size_t size)
    : device_index_(device_index), device_(std::move(device)), size_(size) {
  const Device::Current current(*device_);
  void* pinned = nullptr;
  is_pinned_ = current.status().ok() &&
               device_->driver().host_alloc(&pinned, size, kHostAllocPortable) == kCudaSuccess;
  data_ = is_pinned_ ? static_cast<uint8_t*>(pinned) : allocate_plain(size);
}

Ring::~Ring() {
  if (data_ == nullptr || !is_pinned_) {
    std::free(data_);
    return;
  }
  const Device::Current current(*device_);
  device_->driver().host_free(data_);
}

RingKeeper& RingKeeper::ours() {
  static auto* const keeper = new RingKeeper;
  return *keeper;
}

void RingKeeper::hold(size_t size) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++holders_;
  size_ = std::max(size_, size);
}

void RingKeeper::release() {
  std::unique_ptr<Ring> unwanted;  // destroyed after the lock is given up
  const std::lock_guard<std::mutex> lock(mutex_);
  if (holders_ == 0 || --holders_ > 0) return;
  size_ = 0;
  unwanted = exchange(nullptr);
}

Status RingKeeper::take(int device_index, size_t size, std::unique_ptr<Ring>* ring) {
  std::unique_ptr<Ring> kept;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    size = std::max(size, size_);
    kept = exchange(nullptr);
  }
  if (kept != nullptr && kept->fits(device_index, size)) {
    *ring = std::move(kept);
    return {};
  }
  kept.reset();  // before another one is allocated
  return Ring::open(device_index, size, ring);
}

void RingKeeper::give_back(std::unique_ptr<Ring> ring) {
  std::unique_ptr<Ring> unwanted;
  const std::lock_guard<std::mutex> lock(mutex_);
  // Plain memory is not worth keeping: the next allocation may be pinned.
  if (holders_ > 0 && ring->is_pinned()) unwanted = exchange(std::move(ring));
}

// Under mutex_. Returns the ring kept before, unless it is another process's.
std::unique_ptr<Ring> RingKeeper::exchange(std::unique_ptr<Ring> ring) {
  std::unique_ptr<Ring> before = std::move(kept_);
  if (process_ != getpid()) static_cast<void>(before.release());
  kept_ = std::move(ring);
  process_ = getpid();
  return before;
}

}  // namespace trims
