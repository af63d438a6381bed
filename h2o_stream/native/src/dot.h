// Integer dot products of packed codes and quantized vectors. Each SIMD lane belongs to a row.

#pragma once

#include "simd.h"

namespace dot {

using simd::Ints;

// Codes of four columns in each of `simd::kWidth` rows, one byte each; 16-bit elements because shifts need them.
using Codes = uint16_t __attribute__((vector_size(4 * simd::kWidth)));

inline Codes load(const uint8_t* from) {
  Codes codes;
  std::memcpy(&codes, from, sizeof codes);
  return codes;
}

inline Codes low_nibbles(Codes bytes) { return bytes & 0x0f0f; }
inline Codes high_nibbles(Codes bytes) { return bytes >> 4 & 0x0f0f; }

// Bits 2 * index and 2 * index + 1 of each byte, moved to bits 4 and 5.
inline Codes upper_bits(Codes bytes, int64_t index) {
  return (index < 2 ? bytes << (4 - 2 * index) : bytes >> (2 * index - 4)) & 0x3030;
}

#if defined(H2O_AVX512)
constexpr bool kUnsigned = true;  // 8-bit codes are multiplied as unsigned numbers with 128 added
#else
constexpr bool kUnsigned = false;
#endif

// 8-bit codes in the form that `Accumulator` takes.
inline Codes from_signed(Codes bytes) { return kUnsigned ? bytes ^ 0x8080 : bytes; }

// Accumulates dot products for a register of rows. Codes have 4 or 6 bits, or 8 with a sign.
template <int64_t bits>
class Accumulator {
 public:
  explicit Accumulator(int32_t begin = 0) : sums_(Ints{} + begin) {}

  // Adds the products of four columns. `index` counts the calls.
  [[gnu::always_inline]] void add(Codes codes, const int8_t* vector, int64_t index) {
    int32_t four;
    std::memcpy(&four, vector, sizeof four);
#if defined(H2O_AVX512)
    (void)index;
    sums_ = Ints(_mm512_dpbusd_epi32(__m512i(sums_), __m512i(codes), _mm512_set1_epi32(four)));
#elif defined(H2O_AVX2)
    // Products of column pairs are summed in 16 bits as long as they fit. The sign moves from the codes to the vector.
    constexpr int64_t kPairsPerSum = bits == 4 ? 8 : bits == 6 ? 2 : 1;
    __m256i left = __m256i(codes), right = _mm256_set1_epi32(four);
    if (bits == 8) right = _mm256_sign_epi8(right, left), left = _mm256_abs_epi8(left);
    const __m256i products = _mm256_maddubs_epi16(left, right);
    pairs_ = index % kPairsPerSum ? _mm256_add_epi16(pairs_, products) : products;
    if (index % kPairsPerSum == kPairsPerSum - 1) sums_ += Ints(_mm256_madd_epi16(pairs_, _mm256_set1_epi16(1)));
#else
    (void)index;
    using Bytes = int8_t __attribute__((vector_size(4 * simd::kWidth)));
    using Int16s = int16_t __attribute__((vector_size(8 * simd::kWidth)));
    using Pairs = int32_t __attribute__((vector_size(8 * simd::kWidth)));
    const auto wide = [](auto bytes) { return __builtin_convertvector(Bytes(bytes), Int16s); };
    const Pairs products = Pairs(wide(codes) * wide(Ints{} + four));
    const Pairs pairs = (products << 16 >> 16) + (products >> 16);
    sums_ += __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6) + __builtin_shufflevector(pairs, pairs, 1, 3, 5, 7);
#endif
  }

  simd::Floats floats() const { return __builtin_convertvector(sums_, simd::Floats); }

 private:
  Ints sums_;
#if defined(H2O_AVX2) && !defined(H2O_AVX512)
  __m256i pairs_;
#endif
};

}  // namespace dot
