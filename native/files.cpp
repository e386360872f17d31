#include "files.hpp"

#include <errno.h>
#include <unistd.h>

namespace trims {
namespace {

// The largest alignment that O_DIRECT needs on today's disks; where it needs more, the read fails
// and goes through the page cache.
constexpr size_t kDirectAlignment = 4096;

// Returns how many bytes could be read.
size_t read_directly(int descriptor, uint8_t* target, size_t size, uint64_t offset) {
  size_t done = 0;
  const size_t whole_blocks = size / kDirectAlignment * kDirectAlignment;
  while (done < whole_blocks && done % kDirectAlignment == 0) {
    const ssize_t count =
        pread(descriptor, target + done, whole_blocks - done, static_cast<off_t>(offset + done));
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  return done;
}

}  // namespace

Status read_fully(int descriptor, uint8_t* target, size_t size, uint64_t offset) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count =
        pread(descriptor, target + done, size - done, static_cast<off_t>(offset + done));
    if (count == 0) return {Code::kFileChanged, 0, "pread"};
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      return {Code::kReadFailed, errno, "pread"};
    }
  }
  return {};
}

Status read_source(const Source& source, uint8_t* target, size_t size, uint64_t offset) {
  size_t done = 0;
  if (source.direct >= 0) done = read_directly(source.direct, target, size, offset);
  return read_fully(source.descriptor, target + done, size - done, offset + done);
}

Status write_fully(int descriptor, const uint8_t* source, size_t size, uint64_t offset) {
  size_t done = 0;
  while (done < size) {
    const ssize_t count =
        pwrite(descriptor, source + done, size - done, static_cast<off_t>(offset + done));
    if (count > 0) {
      done += static_cast<size_t>(count);
    } else if (count == 0) {
      return {Code::kWriteFailed, ENOSPC, "pwrite"};
    } else if (errno != EINTR) {
      return {Code::kWriteFailed, errno, "pwrite"};
    }
  }
  return {};
}

}  // namespace trims
