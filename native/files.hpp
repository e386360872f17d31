// Whole reads and writes at an offset; descriptors stay the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.hpp"

namespace trims {

// Returns kFileChanged when the file ends early; `target` is then partly written.
Status read_fully(int descriptor, uint8_t* target, size_t size, uint64_t offset);

// A file that may also be open with O_DIRECT, past the page cache; -1: it is not.
struct Source {
  int descriptor = -1;
  int direct = -1;
};

// As read_fully. Bytes that cannot be read directly (unaligned, the file's end, an error) are read
// through the page cache, which gives the error.
Status read_source(const Source& source, uint8_t* target, size_t size, uint64_t offset);

Status write_fully(int descriptor, const uint8_t* source, size_t size, uint64_t offset);

}  // namespace trims
