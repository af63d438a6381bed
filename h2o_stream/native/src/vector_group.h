// Groups of 32 numbers of a vector, rounded, in the order that products with packed matrices read them in (dot.h).

#pragma once

#include "packed.h"
#include "rounding.h"
#include "simd.h"

namespace dot {

// Orders codes as `simd::add_pair_products` takes them: swaps the second and third of every four.
template <size_t... i>
rounding::Codes even_before_odd(rounding::Codes codes, std::index_sequence<i...>) {
  return __builtin_shufflevector(codes, codes, int(i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i)...);
}

inline void store_pairs(int16_t* to, rounding::Codes codes) {
  codes = even_before_odd(codes, std::make_index_sequence<simd::kWidth>());
  std::memcpy(to, &codes, sizeof codes);
}

// The codes of a group of a vector, in pairs.
class PairGroup {
 public:
  void store(int64_t index, rounding::Codes codes) { store_pairs(codes_ + index * simd::kWidth, codes); }
  const int16_t* pair(int64_t column) const { return codes_ + column; }
  const int16_t* part(int64_t) const { return codes_; }

 private:
  int16_t codes_[packed::kGroup];
};

#if defined(H2O_AVX2) || defined(H2O_NEON_DOT)

// The codes of a group of a vector, split into bytes: products of bytes need no unpacking of the matrix's codes.
class VectorGroup {
 public:
  void store(int64_t index, rounding::Codes codes) {
    const rounding::Codes high = (codes + 64) >> 7, low = codes - (high << 7);
    const auto high_bytes = __builtin_convertvector(high, simd::SignedBytes);
    const auto low_bytes = __builtin_convertvector(low, simd::SignedBytes);
    std::memcpy(high_ + index * simd::kWidth, &high_bytes, sizeof high_bytes);
    std::memcpy(low_ + index * simd::kWidth, &low_bytes, sizeof low_bytes);
  }

  // The upper or the lower bytes of all codes.
  const int8_t* part(int64_t index) const { return index ? low_ : high_; }

 private:
  int8_t high_[packed::kGroup], low_[packed::kGroup];
};

#else

using VectorGroup = PairGroup;

#endif

}  // namespace dot
