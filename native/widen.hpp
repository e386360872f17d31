// 16-bit floating-point numbers as 32-bit ones, which is exact.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trims {

// Writes `count` numbers. NaNs become quiet and keep their other bits, as in the processor's own
// conversion.
void widen_float16(const uint16_t* source, uint32_t* target, size_t count);

// Writes `count` numbers: their bits are the upper halves of those of the results.
void widen_bfloat16(const uint16_t* source, uint32_t* target, size_t count);

}  // namespace trims
