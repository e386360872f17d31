// Where the bytes of a file go: into device memory where a record is, to the outline elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "driver.hpp"

namespace trims {

struct Record {
  uint64_t offset;  // in the file
  uint64_t size;
  CuAddress address;  // of its first byte on the device
};

// Bytes of the file that go to one place.
struct Part {
  uint64_t offset;
  size_t size;
  bool is_record;
  CuAddress address;  // of a record's bytes
};

class Layout {
 public:
  // The records are in order of offset and disjoint; the caller has checked. Drops empty records
  // and joins neighbours that lie on the device as in the file: fewer, larger copies.
  explicit Layout(const std::vector<Record>& records);

  // Walks the parts of the file's bytes [begin, end), in order.
  class Walk {
   public:
    bool next(Part* part);

   private:
    friend class Layout;
    Walk(const std::vector<Record>& records, uint64_t begin, uint64_t end);

    const std::vector<Record>& records_;
    size_t index_;  // of the first record that ends after position_
    uint64_t position_;
    const uint64_t end_;
  };

  Walk walk(uint64_t begin, uint64_t end) const { return Walk(records_, begin, end); }

 private:
  std::vector<Record> records_;
};

}  // namespace trims
