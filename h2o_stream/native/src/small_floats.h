// Floating-point numbers of 16 bits, and what they are as floats.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "instruction_sets.h"

namespace simd {

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

// IEEE half precision.
struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(uint8_t x) { return x; }
inline float to_float(int8_t x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(H2O_AVX2)
inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
#elif defined(H2O_NEON)
inline float to_float(Half x) {
  __fp16 value;
  std::memcpy(&value, &x, sizeof value);
  return value;
}
#else
inline float to_float(Half x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;  // infinities and NaNs do not occur
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
#endif

inline void from_float(float x, float& to) { to = x; }

// Rounds to nearest, ties to even.
inline void from_float(float x, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest, ties to even; values that are too large become infinity.
inline void from_float(float x, Half& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.f)) {
    to.bits = sign | 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 rounds to the lowest bits
    const float shifted = magnitude + 0.5f;
    uint32_t rounded_bits;
    std::memcpy(&rounded_bits, &shifted, sizeof rounded_bits);
    to.bits = sign | uint16_t(rounded_bits & 0xffff);
  } else {
    bits = (bits & 0x7fffffff) - (112u << 23);
    to.bits = sign | uint16_t((bits + 0xfff + (bits >> 13 & 1)) >> 13);
  }
}

}  // namespace simd
