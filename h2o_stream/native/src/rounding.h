// Rounding of vectors to 16 bits, for products with packed matrices.

#pragma once

#include "packed.h"
#include "simd.h"

namespace rounding {

constexpr float kLargestCode = 32767;

// Below this magnitude a group is rounded to zero: the inverse of its scale would overflow.
constexpr float kSmallest = 1e-33f;

using Codes = int16_t __attribute__((vector_size(2 * simd::kWidth)));

// Swaps the second and third of every four.
template <size_t... i>
Codes even_before_odd(Codes codes, std::index_sequence<i...>) {
  return __builtin_shufflevector(codes, codes, int(i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i)...);
}

// Rounds a group to `scale` times `codes`, in the order of `dot::FourColumns`; `sum` is the sum of these products. The
// largest magnitude becomes 32767 or -32767. A group that is not finite has a scale that is not finite.
inline void round_group(const float* from, int16_t* codes, float& scale, float& sum) {
  using simd::Floats;
  using simd::Ints;
  constexpr int64_t kVectors = packed::kGroup / simd::kWidth;
  Floats numbers[kVectors];
  Ints maximum{};
  for (int64_t i = 0; i < kVectors; ++i) {
    numbers[i] = simd::load(from + i * simd::kWidth);
    const Ints bits = Ints(numbers[i]) & 0x7fffffff;  // ordered like the magnitudes, NaN above all
    maximum = bits > maximum ? bits : maximum;
  }
  const auto four = simd::fold_to_four(maximum, [](auto a, auto b) { return a > b ? a : b; });
  const int32_t largest_bits = std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const Floats inverse = simd::splat(largest > kSmallest ? kLargestCode / largest : 0);
  const Floats magic = simd::splat(12582912.f);  // adding 1.5 * 2^23 rounds to integers
  Ints totals{};
  for (int64_t i = 0; i < kVectors; ++i) {
    // unsigned because of NaN; the upper bits of a NaN are dropped
    const Ints rounded = Ints((simd::Words(numbers[i] * inverse + magic) - simd::Words(magic)) << 16) >> 16;
    totals += rounded;
    const Codes ordered =
        even_before_odd(__builtin_convertvector(rounded, Codes), std::make_index_sequence<simd::kWidth>());
    std::memcpy(codes + i * simd::kWidth, &ordered, sizeof ordered);
  }
  scale = largest / kLargestCode;
  const auto partial = simd::fold_to_four(totals);
  sum = scale * float((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

}  // namespace rounding
