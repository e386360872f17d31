#include "convert.hpp"

#include <algorithm>
#include <cstring>

// The loops have no branches, so that the compiler can take several numbers at once.
#define TRIMS_VECTORIZED __attribute__((optimize("O3")))

namespace trims {

namespace {

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7f800000;

// Of binary16.
constexpr uint32_t kSign16 = 0x8000;
constexpr uint32_t kExponent16 = 0x7c00;
constexpr uint32_t kMantissa16 = 0x03ff;
constexpr uint32_t kQuiet16 = 0x0200;
// Bits of the mantissa that binary32 has more, and how much larger its bias is.
constexpr int kMoreBits = 13;
constexpr uint32_t kBias = 112u << 23;
// The unit of binary16 without exponent, and the binary32 whose last bit is worth as much.
constexpr float kUnit16 = 0x1p-24f;
constexpr float kRounder16 = 0x1p-1f;
// The smallest binary32 with an exponent in binary16.
constexpr uint32_t kNormal16 = 113u << 23;

constexpr uint32_t kNanBFloat16 = 0x7fc0;

// Of what passes through binary32. It stays in the first-level cache.
constexpr size_t kBlock = 1024;

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float value_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

TRIMS_VECTORIZED void from_float16(const uint16_t* source, uint32_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = source[i];
    const uint32_t exponent = bits & kExponent16;
    const uint32_t mantissa = bits & kMantissa16;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(mantissa)) * kUnit16);
    const uint32_t normal = ((bits & (kExponent16 | kMantissa16)) << kMoreBits) + kBias;
    // NaNs become quiet and keep their other bits, as in the processor's own conversion.
    const uint32_t special = kInfinity | (mantissa | (mantissa != 0 ? kQuiet16 : 0)) << kMoreBits;
    uint32_t found = exponent == 0 ? subnormal : normal;
    found = exponent == kExponent16 ? special : found;
    target[i] = found | (bits & kSign16) << 16;
  }
}

TRIMS_VECTORIZED void from_bfloat16(const uint16_t* source, uint32_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = static_cast<uint32_t>(source[i]) << 16;
}

TRIMS_VECTORIZED void to_float16(const uint32_t* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = source[i] & ~kSign;
    // The sum is rounded to the last bit of kRounder16; the difference is the number of units.
    const uint32_t subnormal = bits_of(value_of(bits) + kRounder16) - bits_of(kRounder16);
    const uint32_t odd = bits >> kMoreBits & 1;
    // A mantissa that is rounded up carries into the exponent, as it should.
    const uint32_t normal = (bits - kBias + (1u << (kMoreBits - 1)) - 1 + odd) >> kMoreBits;
    const uint32_t special = kExponent16 | kQuiet16 | (bits >> kMoreBits & kMantissa16);
    uint32_t found = bits < kNormal16 ? subnormal : normal;
    found = found > kExponent16 ? kExponent16 : found;
    found = bits > kInfinity ? special : found;
    target[i] = static_cast<uint16_t>(found | (source[i] & kSign) >> 16);
  }
}

TRIMS_VECTORIZED void to_bfloat16(const uint32_t* source, uint16_t* target, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = source[i];
    const uint32_t odd = bits >> 16 & 1;
    const uint32_t rounded = (bits + 0x7fff + odd) >> 16;
    target[i] = static_cast<uint16_t>((bits & ~kSign) > kInfinity ? kNanBFloat16 : rounded);
  }
}

void widen(const void* source, Number from, size_t start, size_t count, uint32_t* target) {
  const auto* const numbers = static_cast<const uint16_t*>(source) + start;
  (from == Number::kFloat16 ? from_float16 : from_bfloat16)(numbers, target, count);
}

void narrow(const uint32_t* source, Number to, size_t start, size_t count, void* target) {
  auto* const numbers = static_cast<uint16_t*>(target) + start;
  (to == Number::kFloat16 ? to_float16 : to_bfloat16)(source, numbers, count);
}

}  // namespace

size_t number_bytes(Number number) { return number == Number::kFloat32 ? 4 : 2; }

void convert(const void* source, Number from, void* target, Number to, size_t count) {
  if (to == Number::kFloat32) return widen(source, from, 0, count, static_cast<uint32_t*>(target));
  if (from == Number::kFloat32)
    return narrow(static_cast<const uint32_t*>(source), to, 0, count, target);
  uint32_t block[kBlock];
  for (size_t start = 0; start < count; start += kBlock) {
    const size_t some = std::min(kBlock, count - start);
    widen(source, from, start, some, block);
    narrow(block, to, start, some, target);
  }
}

}  // namespace trims
