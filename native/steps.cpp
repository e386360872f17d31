#include "steps.hpp"

#include <algorithm>
#include <utility>

namespace trims {

Status DeviceStep::open(const DeviceFile& file) {
  const size_t size = file.chunk_bytes * file.ring_chunks;
  Status status = RingKeeper::ours().take(file.device_index, size, &ring_);
  if (!status.ok()) return status;
  const size_t batch = std::max<size_t>(1, file.ring_chunks / 4);
  window_ = {ring_->data(), file.file_bytes, file.chunk_bytes, file.ring_chunks, batch};
  const Device::Current current(device());
  status = current.status();
  events_.resize(file.ring_chunks);
  for (CuEvent& event : events_) {
    if (!status.ok()) return status;
    status = Driver::check(device().driver().event_create(&event, kEventFlags), "cuEventCreate");
  }
  return status;
}

Status DeviceStep::drain() {
  const Status status = device().drain();
  is_lost_ = !status.ok();
  return status;
}

DeviceStep::~DeviceStep() {
  if (ring_ == nullptr) return;
  {
    const Device::Current current(device());
    for (CuEvent event : events_) {
      if (event != nullptr) device().driver().event_destroy(event);
    }
  }
  if (is_lost_) {
    // The device is broken, so the process ends soon.
    ring_->abandon();
  } else {
    RingKeeper::ours().give_back(std::move(ring_));
  }
}

// Marks the chunk's slot as in use until its stream reaches this point.
Status DeviceStep::mark(const Chunk& chunk) const {
  const CuResult result = device().driver().event_record(events_[chunk.slot], stream(chunk));
  return Driver::check(result, "cuEventRecord");
}

// An event that was never recorded is complete.
Status DeviceStep::wait(size_t slot) const {
  const CuResult result = device().driver().event_synchronize(events_[slot]);
  return Driver::check(result, "cuEventSynchronize");
}

Status FileToDevice::open(const DeviceFile& file, Source source, int outline,
                          std::unique_ptr<Step>* step) {
  std::unique_ptr<FileToDevice> made(new FileToDevice(file, source, outline));
  const Status status = made->DeviceStep::open(file);
  if (status.ok()) *step = std::move(made);
  return status;
}

Status FileToDevice::process(const Chunk& chunk) {
  const Device::Current current(device());
  Status status = current.status();
  if (status.ok()) status = wait(chunk.slot);
  if (status.ok()) status = read_source(source_, chunk.data, chunk.size, chunk.offset);
  if (status.ok()) status = scatter(chunk);
  if (status.ok()) status = mark(chunk);
  return status;
}

Status FileToDevice::scatter(const Chunk& chunk) const {
  Layout::Walk walk = layout_.walk(chunk.offset, chunk.offset + chunk.size);
  Status status;
  Part part;
  while (status.ok() && walk.next(&part)) {
    const uint8_t* data = chunk.data + (part.offset - chunk.offset);
    if (part.is_record) {
      const CuResult result =
          device().driver().copy_to_device(part.address, data, part.size, stream(chunk));
      status = Driver::check(result, "cuMemcpyHtoDAsync");
    } else if (outline_ >= 0) {
      status = write_fully(outline_, data, part.size, part.offset);
    }
  }
  return status;
}

Status DeviceToFile::open(const DeviceFile& file, int outline, int target,
                          std::unique_ptr<Step>* step) {
  std::unique_ptr<DeviceToFile> made(new DeviceToFile(file, outline, target));
  const Status status = made->DeviceStep::open(file);
  if (status.ok()) *step = std::move(made);
  return status;
}

Status DeviceToFile::process(const Chunk& chunk) {
  const Device::Current current(device());
  Status status = current.status();
  if (status.ok()) status = gather(chunk);
  if (status.ok()) status = mark(chunk);
  if (status.ok()) status = wait(chunk.slot);
  if (status.ok()) status = write_fully(target_, chunk.data, chunk.size, chunk.offset);
  return status;
}

Status DeviceToFile::gather(const Chunk& chunk) const {
  Layout::Walk walk = layout_.walk(chunk.offset, chunk.offset + chunk.size);
  Status status;
  Part part;
  while (status.ok() && walk.next(&part)) {
    uint8_t* data = chunk.data + (part.offset - chunk.offset);
    if (part.is_record) {
      const CuResult result =
          device().driver().copy_to_host(data, part.address, part.size, stream(chunk));
      status = Driver::check(result, "cuMemcpyDtoHAsync");
    } else {
      status = read_fully(outline_, data, part.size, part.offset);
    }
  }
  return status;
}

}  // namespace trims
