// Dot products of packed weights and rounded vectors, a register of bytes at a time.
//
// Sums of four neighbouring products each are left in a register; a group of 32 weights fills some of them.

#pragma once

#include "matrix.h"
#include "simd.h"

namespace dot {

// How many weights lie in a byte.
enum Packing : int64_t { kEightBits = 1, kFourBits = 2 };

// Bytes that are multiplied at once. Twice as many are no faster with AVX-512: tiles are not aligned to so much.
constexpr int64_t kBytes = 32;

// Sums of the products of every four bytes, as integers and not.
using Integers = int32_t __attribute__((vector_size(kBytes)));
using Sums = float __attribute__((vector_size(kBytes)));

constexpr int64_t kSums = kBytes / 4;

// Groups in a register of packed weights.
template <Packing packing>
constexpr int64_t kGroups = kBytes * packing / packed::kGroup;

// Where a number of a vector is put so that it meets its weight.
template <Packing packing>
int64_t place(int64_t i) {
  constexpr int64_t group_size = packed::kGroup, half_size = group_size / 2;
  if (packing == kEightBits) return i;
  const int64_t group = i / group_size, half = i % group_size / half_size;
  return (group / kGroups<packing> * 2 + half) * kBytes + group % kGroups<packing> * half_size + i % half_size;
}

inline Sums load(const float* from) {
  Sums sums;
  std::memcpy(&sums, from, sizeof sums);
  return sums;
}

// The first `count` numbers, zeros behind them.
inline Sums first(Sums numbers, int64_t count) {
  Integers places;
  for (int64_t i = 0; i < kSums; ++i) places[i] = int32_t(i);
  return places < int32_t(count) ? numbers : Sums{};
}

// What is added to weights of 8 bits before they are multiplied.
#if defined(H2O_AVX512)
constexpr int32_t kBias = 128;
#else
constexpr int32_t kBias = 0;
#endif

#if defined(H2O_AVX2)

using Bytes = __m256i;

inline Bytes load_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

// Half a register: in 4 bits a single group is left.
inline Bytes load_bytes(const void* from, int64_t) {
  return _mm256_zextsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

inline Sums load_halves(const uint8_t* from) {
  return Sums(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Fewer than eight. A tile may end behind them: without masks they are loaded with what lies in front of them.
inline Sums load_halves(const uint8_t* from, int64_t count) {
#if defined(H2O_AVX512)
  return Sums(_mm256_cvtph_ps(_mm_maskz_loadu_epi16(__mmask8((1u << count) - 1), from)));
#else
  alignas(32) static const int8_t kPlaces[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                 -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  const int64_t before = 16 - 2 * count;
  const __m128i places = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kPlaces + before));
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from - before));
  return Sums(_mm256_cvtph_ps(_mm_shuffle_epi8(halves, places)));
#endif
}

inline Sums permute(Sums sums, Integers places) {
  return Sums(_mm256_permutevar8x32_ps(__m256(sums), __m256i(places)));
}

inline Integers sums_of_pairs(Bytes pairs) { return Integers(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }

template <Packing packing>
struct Weights;

template <>
struct Weights<kFourBits> {
  Bytes lower, upper;

  explicit Weights(Bytes bytes)
      : lower(_mm256_and_si256(bytes, _mm256_set1_epi8(15))),
        upper(_mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(15))) {}

  Integers multiply(const int8_t* vector) const {
    const Bytes first = load_bytes(vector), second = load_bytes(vector + kBytes);
#if defined(H2O_AVX512)
    return Integers(_mm256_dpbusd_epi32(_mm256_dpbusd_epi32(_mm256_setzero_si256(), lower, first), upper, second));
#else
    return sums_of_pairs(_mm256_add_epi16(_mm256_maddubs_epi16(lower, first), _mm256_maddubs_epi16(upper, second)));
#endif
  }
};

// Instructions multiply unsigned bytes by signed ones. Without VNNI the products of two must fit into 16 bits: the sign
// of a weight is moved to the vector. With it, `kBias` is added to the weights, and its products taken off later.
template <>
struct Weights<kEightBits> {
  Bytes bytes;

#if defined(H2O_AVX512)
  explicit Weights(Bytes some) : bytes(_mm256_xor_si256(some, _mm256_set1_epi8(-128))) {}

  Integers multiply(const int8_t* vector) const {
    return Integers(_mm256_dpbusd_epi32(_mm256_setzero_si256(), bytes, load_bytes(vector)));
  }
#else
  explicit Weights(Bytes some) : bytes(some) {}

  Integers multiply(const int8_t* vector) const {
    return sums_of_pairs(
        _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(load_bytes(vector), bytes)));
  }
#endif
};

#else

using Bytes = int8_t __attribute__((vector_size(kBytes)));

inline Bytes load_bytes(const void* from, int64_t bytes) {
  Bytes some{};
  std::memcpy(&some, from, bytes);
  return some;
}

inline Bytes load_bytes(const void* from) { return load_bytes(from, kBytes); }

inline Sums load_halves(const uint8_t* from, int64_t count) {
  Sums sums{};
  for (int64_t i = 0; i < count; ++i) {
    simd::Half half;
    std::memcpy(&half, from + 2 * i, sizeof half);
    sums[i] = simd::to_float(half);
  }
  return sums;
}

inline Sums load_halves(const uint8_t* from) { return load_halves(from, kSums); }

inline Sums permute(Sums sums, Integers places) {
  float each[kSums];
  std::memcpy(each, &sums, sizeof each);
  for (int64_t i = 0; i < kSums; ++i) sums[i] = each[places[i]];
  return sums;
}

inline Integers multiply_bytes(Bytes one, Bytes other) {
  using Products = int16_t __attribute__((vector_size(2 * kBytes)));
  using Pairs = int32_t __attribute__((vector_size(2 * kBytes)));
  const auto products = Pairs(__builtin_convertvector(one, Products) * __builtin_convertvector(other, Products));
  const Pairs sums = (products << 16 >> 16) + (products >> 16);
  return __builtin_shufflevector(sums, sums, 0, 2, 4, 6, 8, 10, 12, 14) +
         __builtin_shufflevector(sums, sums, 1, 3, 5, 7, 9, 11, 13, 15);
}

template <Packing packing>
struct Weights {
  Bytes bytes;

  explicit Weights(Bytes some) : bytes(some) {}

  Integers multiply(const int8_t* vector) const {
    const Bytes first = load_bytes(vector);
    if (packing == kEightBits) return multiply_bytes(bytes, first);
    return multiply_bytes(bytes & 15, first) + multiply_bytes(bytes >> 4 & 15, load_bytes(vector + kBytes));
  }
};

#endif

// The factors of `groups` groups from `begin` on, each for all sums of its group.
template <int64_t groups>
Sums spread(Sums factors, int64_t begin) {
  Integers places{};
  for (int64_t i = 0; i < kSums; ++i) places[i] = int32_t(i * groups / kSums);
  return permute(factors, places + int32_t(begin));
}

// The sums of four registers.
template <class Numbers>
inline void totals(const Numbers* numbers, float* to) {
  using Four = float __attribute__((vector_size(16)));
  Four four[4];
  for (int64_t i = 0; i < 4; ++i) {
    float each[sizeof(Numbers) / 4];
    std::memcpy(each, numbers + i, sizeof each);
    Four parts[sizeof(Numbers) / 16];
    std::memcpy(parts, each, sizeof each);
    constexpr int64_t count = sizeof(Numbers) / 16;
    if constexpr (count == 4) {
      four[i] = (parts[0] + parts[2]) + (parts[1] + parts[3]);
    } else if constexpr (count == 2) {
      four[i] = parts[0] + parts[1];
    } else {
      four[i] = parts[0];
    }
  }
  const auto pairs = [](Four one, Four other) {
    return __builtin_shufflevector(one, other, 0, 4, 1, 5) + __builtin_shufflevector(one, other, 2, 6, 3, 7);
  };
  const Four left = pairs(four[0], four[1]), right = pairs(four[2], four[3]);
  const Four sums = __builtin_shufflevector(left, right, 0, 1, 4, 5) + __builtin_shufflevector(left, right, 2, 3, 6, 7);
  std::memcpy(to, &sums, sizeof sums);
}

}  // namespace dot
