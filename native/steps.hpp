// The work on a chunk, for each direction. Descriptors stay the caller's and outlive the step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.hpp"
#include "files.hpp"
#include "layout.hpp"
#include "pipeline.hpp"
#include "ring.hpp"

namespace trims {

struct DeviceFile {
  int device_index = 0;  // see Device::open
  std::vector<Record> records;
  uint64_t file_bytes = 0;
  size_t chunk_bytes = 0;
  size_t ring_chunks = 0;
};

// Between a file and device memory: through a ring, one event for each slot.
class DeviceStep : public Step {
 public:
  ~DeviceStep() override;
  Window window() const override { return window_; }
  Status drain() override;

 protected:
  explicit DeviceStep(const DeviceFile& file) : layout_(file.records) {}
  Status open(const DeviceFile& file);
  Status mark(const Chunk& chunk) const;
  Status wait(size_t slot) const;
  const Device& device() const { return ring_->device(); }
  CuStream stream(const Chunk& chunk) const { return device().stream(chunk.number); }

  const Layout layout_;

 private:
  std::unique_ptr<Ring> ring_;
  Window window_;
  std::vector<CuEvent> events_;  // by slot: complete when its copies are done
  bool is_lost_ = false;         // the wait failed, and copies may still run
};

// Records to the device, the rest to `outline` (-1: nowhere).
class FileToDevice : public DeviceStep {
 public:
  static Status open(const DeviceFile& file, Source source, int outline,
                     std::unique_ptr<Step>* step);
  Status process(const Chunk& chunk) override;

 private:
  FileToDevice(const DeviceFile& file, Source source, int outline)
      : DeviceStep(file), source_(source), outline_(outline) {}
  Status scatter(const Chunk& chunk) const;

  const Source source_;
  const int outline_;
};

// Records from the device, the rest from `outline`, all of it to `target`.
class DeviceToFile : public DeviceStep {
 public:
  static Status open(const DeviceFile& file, int outline, int target, std::unique_ptr<Step>* step);
  Status process(const Chunk& chunk) override;

 private:
  DeviceToFile(const DeviceFile& file, int outline, int target)
      : DeviceStep(file), outline_(outline), target_(target) {}
  Status gather(const Chunk& chunk) const;

  const int outline_;
  const int target_;
};

}  // namespace trims
