// Floating-point numbers of 32 and 16 bits as each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trims {

enum class Number { kFloat32, kFloat16, kBFloat16 };

size_t number_bytes(Number number);

// Converts `count` numbers into ones of another kind. Each is rounded to the nearest, to even where
// two are as near; too large ones become infinite. NaNs stay NaNs. Between numbers of 16 bits the
// way is by 32, which is exact.
void convert(const void* source, Number from, void* target, Number to, size_t count);

}  // namespace trims
