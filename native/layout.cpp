#include "layout.hpp"

#include <algorithm>

namespace trims {
namespace {

bool continues(const Record& first, const Record& second) {
  return first.offset + first.size == second.offset && first.address + first.size == second.address;
}

}  // namespace

Layout::Layout(const std::vector<Record>& records) {
  for (const Record& record : records) {
    if (record.size == 0) continue;
    if (!records_.empty() && continues(records_.back(), record)) {
      records_.back().size += record.size;
    } else {
      records_.push_back(record);
    }
  }
}

Layout::Walk::Walk(const std::vector<Record>& records, uint64_t begin, uint64_t end)
    : records_(records), position_(begin), end_(end) {
  const auto ends_before = [](const Record& record, uint64_t position) {
    return record.offset + record.size <= position;
  };
  const auto found = std::lower_bound(records.begin(), records.end(), begin, ends_before);
  index_ = static_cast<size_t>(found - records.begin());
}

bool Layout::Walk::next(Part* part) {
  if (position_ >= end_) return false;
  part->offset = position_;
  part->is_record = index_ < records_.size() && records_[index_].offset <= position_;
  uint64_t part_end = end_;
  if (part->is_record) {
    const Record& record = records_[index_];
    part->address = record.address + (position_ - record.offset);
    part_end = std::min(end_, record.offset + record.size);
    if (part_end == record.offset + record.size) ++index_;
  } else {
    part->address = 0;
    if (index_ < records_.size()) part_end = std::min(end_, records_[index_].offset);
  }
  part->size = static_cast<size_t>(part_end - position_);
  position_ = part_end;
  return true;
}

}  // namespace trims
