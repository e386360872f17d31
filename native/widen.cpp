#include "widen.hpp"

#include <cstring>

namespace trims {

namespace {

constexpr uint32_t kSign = 0x8000;
constexpr uint32_t kExponent = 0x7c00;
constexpr uint32_t kMantissa = 0x03ff;
// Bits of the mantissa that binary32 has more, and how much larger its bias is.
constexpr int kMoreBits = 13;
constexpr uint32_t kBias = 112u << 23;
constexpr uint32_t kInfinity = 0x7f800000;
constexpr uint32_t kQuiet = 0x00400000;
// The unit of numbers without exponent.
constexpr float kSubnormalUnit = 0x1p-24f;

}  // namespace

// Without branches, so that the compiler can take several at once.
__attribute__((optimize("O3"))) void widen_float16(const uint16_t* source, uint32_t* target,
                                                   size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = source[i];
    const uint32_t exponent = bits & kExponent;
    const uint32_t mantissa = bits & kMantissa;
    const float tiny = static_cast<float>(static_cast<int32_t>(mantissa)) * kSubnormalUnit;
    uint32_t subnormal;
    std::memcpy(&subnormal, &tiny, sizeof subnormal);
    const uint32_t normal = ((bits & (kExponent | kMantissa)) << kMoreBits) + kBias;
    const uint32_t special = kInfinity | mantissa << kMoreBits | (mantissa != 0 ? kQuiet : 0);
    uint32_t found = exponent == 0 ? subnormal : normal;
    found = exponent == kExponent ? special : found;
    target[i] = found | (bits & kSign) << 16;
  }
}

__attribute__((optimize("O3"))) void widen_bfloat16(const uint16_t* source, uint32_t* target,
                                                    size_t count) {
  for (size_t i = 0; i < count; ++i) target[i] = static_cast<uint32_t>(source[i]) << 16;
}

}  // namespace trims
