// Numbers that are computed with at once, as wide as the machine's registers, and what becomes of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lanes {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Lanes = float __attribute__((vector_size(4 * kLanes)));
using Whole = int32_t __attribute__((vector_size(4 * kLanes)));

// bfloat16: the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

inline float number(float x) { return x; }

inline float number(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline void put(float x, float& to) { to = x; }

// Rounded to nearest, ties to even.
inline void put(float x, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

inline Lanes load(const BFloat16* from) {
  using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));
  using Wide = uint32_t __attribute__((vector_size(4 * kLanes)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Wide wide = __builtin_convertvector(halves, Wide) << 16;
  Lanes lanes;
  std::memcpy(&lanes, &wide, sizeof lanes);
  return lanes;
}

inline void store(Lanes lanes, float* to) { std::memcpy(to, &lanes, sizeof lanes); }

// The sum of 16, 8 or 4 numbers, halves first.
template <class Some>
float total(Some lanes) {
  if constexpr (sizeof lanes == 64) {
    return total(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(lanes, lanes, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (sizeof lanes == 32) {
    return total(__builtin_shufflevector(lanes, lanes, 0, 1, 2, 3) + __builtin_shufflevector(lanes, lanes, 4, 5, 6, 7));
  } else {
    const Some pairs = lanes + __builtin_shufflevector(lanes, lanes, 2, 3, 0, 1);
    return pairs[0] + pairs[1];
  }
}

// e to the power of numbers that are not above zero, to the last digit but one; zero below -87.
inline Lanes exponential(Lanes x) {
  const Whole there = x > -87.f;
  const Lanes power = x * 1.44269504f, magic = Lanes{} + 12582912.f;  // adding 1.5 * 2^23 rounds to a whole number
  const Lanes whole = (power + magic) - magic;
  const Lanes rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Lanes sum = Lanes{} + 1.9875691500e-4f;
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = sum * rest + factor;
  }
  sum = sum * rest * rest + rest + 1.f;
  const Whole exponent = (__builtin_convertvector(whole, Whole) + 127) << 23;
  Lanes scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return there ? sum * scale : Lanes{};
}

}  // namespace lanes
