// Whole reads and writes at an offset of a descriptor that stays the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.hpp"

namespace trims {

// kFileChanged when the file ends first; `target` is then partly written.
Status read_fully(int descriptor, uint8_t* target, size_t size, uint64_t offset);

// A file that may also be open with O_DIRECT, past the page cache; -1: it is not.
struct Source {
  int descriptor = -1;
  int direct = -1;
};

// As read_fully. What cannot be read directly (unaligned, the file's end, an error) is read again
// through the page cache, which says what is wrong.
Status read_source(const Source& source, uint8_t* target, size_t size, uint64_t offset);

Status write_fully(int descriptor, const uint8_t* source, size_t size, uint64_t offset);

}  // namespace trims
