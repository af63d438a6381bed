// Vectors of numbers as wide as the machine's registers, loads and stores of every dtype, and functions of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "compat.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define H2O_AVX2
#include <immintrin.h>
#endif

#if defined(H2O_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define H2O_AVX512
#endif

namespace simd {

// Numbers in a vector. One of 16 that the machine does not have is made of several by the compiler.
#if defined(H2O_AVX512)
constexpr int64_t kWidth = 16;
#elif defined(H2O_AVX2)
constexpr int64_t kWidth = 8;
#else
constexpr int64_t kWidth = 4;
#endif

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kCacheLine = 64;

// `count` rounded up to a multiple of `unit`.
constexpr int64_t padded(int64_t count, int64_t unit = kWidth) { return (count + unit - 1) / unit * unit; }

// bfloat16: the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

// IEEE half precision.
struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(H2O_AVX2)
inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
#else
inline float to_float(Half x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;  // infinities and NaNs do not occur in what is held
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
#endif

inline void from_float(float x, float& to) { to = x; }

// Rounded to nearest, ties to even.
inline void from_float(float x, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounded to nearest, ties to even; too large becomes infinity.
inline void from_float(float x, Half& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.f)) {
    to.bits = sign | 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 leaves it, rounded, in the last bits
    const float shifted = magnitude + 0.5f;
    uint32_t own;
    std::memcpy(&own, &shifted, sizeof own);
    to.bits = sign | uint16_t(own & 0xffff);
  } else {
    bits = (bits & 0x7fffffff) - (112u << 23);
    to.bits = sign | uint16_t((bits + 0xfff + (bits >> 13 & 1)) >> 13);
  }
}

inline Floats splat(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

inline Floats load(const BFloat16* from) {
#if defined(H2O_AVX512)  // GCC 12 takes four instructions where there is one
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return Floats(Ints(_mm512_maskz_cvtepu16_epi32(__mmask16(-1), halves)) << 16);
#elif defined(H2O_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));
  using Wide = uint32_t __attribute__((vector_size(4 * kWidth)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Wide wide = __builtin_convertvector(halves, Wide) << 16;
  Floats floats;
  std::memcpy(&floats, &wide, sizeof floats);
  return floats;
#endif
}

inline Floats load(const uint8_t* from) {
  using Bytes = uint8_t __attribute__((vector_size(kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
}

inline Ints load(const int32_t* from) {
  Ints ints;
  std::memcpy(&ints, from, sizeof ints);
  return ints;
}

inline void store(Floats floats, float* to) { std::memcpy(to, &floats, sizeof floats); }
inline void store(Ints ints, int32_t* to) { std::memcpy(to, &ints, sizeof ints); }

inline void store(Floats floats, BFloat16* to) {
  using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));
  using Wide = uint32_t __attribute__((vector_size(4 * kWidth)));
  Wide bits;
  std::memcpy(&bits, &floats, sizeof bits);
  const Halves halves = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// The sum of 16, 8 or 4 numbers, halves first.
template <class Some>
float total(Some numbers) {
  if constexpr (sizeof numbers == 64) {
    return total(__builtin_shufflevector(numbers, numbers, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(numbers, numbers, 8, 9, 10, 11, 12, 13, 14, 15));
  } else if constexpr (sizeof numbers == 32) {
    return total(__builtin_shufflevector(numbers, numbers, 0, 1, 2, 3) +
                 __builtin_shufflevector(numbers, numbers, 4, 5, 6, 7));
  } else {
    const Some pairs = numbers + __builtin_shufflevector(numbers, numbers, 2, 3, 0, 1);
    return pairs[0] + pairs[1];
  }
}

// The largest of some numbers; minus infinity for none.
inline float largest(const float* numbers, int64_t count) {
  Floats tops = splat(kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats some = load(numbers + i);
    tops = some > tops ? some : tops;
  }
  float top = kMinusInfinity;
  for (int64_t j = 0; j < kWidth; ++j) top = std::max(top, tops[j]);
  for (; i < count; ++i) top = std::max(top, numbers[i]);
  return top;
}

// The smallest of some numbers; infinity for none.
inline float smallest(const float* numbers, int64_t count) {
  Floats least = splat(-kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats some = load(numbers + i);
    least = some < least ? some : least;
  }
  float smallest = -kMinusInfinity;
  for (int64_t j = 0; j < kWidth; ++j) smallest = std::min(smallest, least[j]);
  for (; i < count; ++i) smallest = std::min(smallest, numbers[i]);
  return smallest;
}

// e to the power of numbers that are not above zero, to the last digit but one; zero below -87, NaN of NaN.
inline Floats exp_nonpositive(Floats x) {
  const Ints vanishing = x < -87.f;
  const Floats power = x * 1.44269504f, magic = splat(12582912.f);  // adding 1.5 * 2^23 rounds to a whole number
  const Floats whole = (power + magic) - magic;
  const Floats rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Floats sum = splat(1.9875691500e-4f);
  for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    sum = sum * rest + factor;
  }
  sum = sum * rest * rest + rest + 1.f;
  const Ints exponent = (__builtin_convertvector(whole, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return vanishing ? Floats{} : sum * scale;
}

inline void prefetch(const void* from, int64_t bytes) {
  asm volatile("");  // GCC takes functions that only prefetch for pure ones, and leaves them out
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch(static_cast<const uint8_t*>(from) + i);
}

}  // namespace simd
