// Rounding of vectors to 14 bits, for products with packed matrices.

#pragma once

#include "packed.h"
#include "simd.h"
#include "simd_functions.h"

namespace rounding {

// A code is 128 times a number of 7 bits plus another, so that products with bytes fit into 16 bits (dot.h).
constexpr float kLargestCode = 63 * 128 + 63;

// Below this magnitude a group is rounded to zero: the inverse of its scale would overflow.
constexpr float kSmallest = 1e-33f;

// A register of codes.
using Codes = int16_t __attribute__((vector_size(2 * simd::kWidth)));

// What a group is multiplied by, besides its codes.
struct Scale {
  float scale, sum;      // of the group: `sum` is `scale` times the sum of the codes
  int32_t code_sums[2];  // of the first and second 16 codes

  float half_sum(int64_t half) const { return scale * float(code_sums[half]); }
};

// Rounds a group to a scale times codes; calls `store(index, codes)` for every register of codes. The largest magnitude
// becomes 8127 or -8127. A group that is not finite has a scale that is not finite.
template <class Store>
[[gnu::always_inline]] inline Scale round_group(const float* from, Store store) {
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
  Ints totals[2] = {};
  for (int64_t i = 0; i < kVectors; ++i) {
    // unsigned because of NaN; the upper bits of a NaN are dropped
    const Ints rounded = Ints((simd::Words(numbers[i] * inverse + magic) - simd::Words(magic)) << 16) >> 16;
    totals[2 * i / kVectors] += rounded;
    store(i, __builtin_convertvector(rounded, Codes));
  }
  Scale result{largest / kLargestCode, 0, {}};
  for (int64_t half = 0; half < 2; ++half) {
    const auto partial = simd::fold_to_four(totals[half]);
    result.code_sums[half] = (partial[0] + partial[1]) + (partial[2] + partial[3]);
  }
  result.sum = result.scale * float(result.code_sums[0] + result.code_sums[1]);
  return result;
}

}  // namespace rounding
