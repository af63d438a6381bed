// Dot products of packed codes and rounded vectors. Each SIMD lane belongs to a row.

#pragma once

#include "abi.h"
#include "packed.h"
#include "simd.h"
#include "vector_group.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(H2O_NO_PRODUCTS)
#error "CMakeLists.txt does not list this source under `products`"
#endif

namespace dot {

using simd::Ints;

// Codes of four columns in each of `simd::kWidth` rows, one byte each; 16-bit elements because shifts need them.
using Bytes = uint16_t __attribute__((vector_size(4 * simd::kWidth)));

// The same as bytes.
using UnsignedBytes = uint8_t __attribute__((vector_size(4 * simd::kWidth)));

// Codes of two columns in each of `simd::kWidth` rows.
using Pairs = int16_t __attribute__((vector_size(4 * simd::kWidth)));

// Columns c and c + 2, and c + 1 and c + 3: splitting bytes into even and odd ones costs least.
struct FourColumns {
  Pairs even, odd;
};

// Keeps a vector in a register: GCC would read the operand again for each use, or reorder sums and run out of
// registers.
template <class Vector>
[[gnu::always_inline]] inline Vector in_register(Vector vector) {
#if defined(H2O_AVX512)
  asm("" : "+v"(vector));
#elif defined(__SSE2__)
  asm("" : "+x"(vector));
#endif
  return vector;
}

inline Bytes load(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return in_register(bytes);
}

#if !defined(H2O_AVX2) && !defined(H2O_NEON)
// Not inlined: a scalar load for each byte, in dozens of places, takes compilers minutes.
[[gnu::noinline]] inline Bytes look_up_bytes(Bytes codes, const uint8_t* numbers) {
  uint8_t bytes[sizeof codes];
  std::memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = numbers[byte];
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
}
#endif

// The biased numbers of codes from 0 to 15.
template <int64_t kind>
Bytes look_up(Bytes codes) {
  constexpr const uint8_t* kNumbers = packed::numbers(kind);
#if defined(H2O_AVX2)
  const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kNumbers));
#if defined(H2O_AVX512)
  return Bytes(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), __m512i(codes)));
#else
  return Bytes(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), __m256i(codes)));
#endif
#elif defined(H2O_NEON_DOT)  // without the bias: bytes are signed
  const uint8x16_t numbers = vsubq_u8(vld1q_u8(kNumbers), vdupq_n_u8(packed::code_bias(kind)));
  return Bytes(vqtbl1q_u8(numbers, uint8x16_t(codes)));
#elif defined(H2O_NEON)
  return Bytes(vqtbl1q_u8(vld1q_u8(kNumbers), uint8x16_t(codes)));
#else
  return look_up_bytes(codes, kNumbers);
#endif
}

// Moves some bits of every byte from bit `from` on to bit `to` on.
[[gnu::always_inline]] inline Bytes move_bits(Bytes bytes, int64_t bits, int64_t from, int64_t to) {
#if defined(H2O_NEON)  // bytes can be shifted; what leaves them needs no mask
  const UnsignedBytes all = UnsignedBytes(bytes);
  const UnsignedBytes moved = from < to ? all << uint8_t(to - from) : all >> uint8_t(from - to);
  const bool whole = std::min(from, to) == 0 && std::max(from, to) + bits == 8;
  return Bytes(whole ? moved : moved & uint8_t(((1 << bits) - 1) << to));
#endif
  const uint16_t mask = uint16_t(0x0101 * ((1 << bits) - 1) << to);
  return (from < to ? bytes << uint16_t(to - from) : bytes >> uint16_t(from - to)) & mask;
}

// Calls body(half, quad, row, bytes) for columns 16 * half + 4 * quad to 16 * half + 4 * quad + 3 of a group, in the
// order of memory, and `rows` registers of rows. The bytes are signed for kInt8, else unsigned with the bias of the
// kind. `lower` and `upper` are the group's low and high bits.
template <int64_t kind, int64_t rows, class Body>
[[gnu::always_inline]] inline void for_each_quad(const uint8_t* lower, const uint8_t* upper, Body body) {
  using packed::kLine;
  constexpr int64_t kLower = packed::lower_bits(kind), kUpper = packed::upper_bits(kind), kRegister = sizeof(Bytes);
  if constexpr (kind == kInt8) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) {
#pragma GCC unroll 4
      for (int64_t row = 0; row < rows; ++row) body(i / 4, i % 4, row, load(lower + i * kLine + row * kRegister));
    }
    return;
  }
  Bytes high[rows][2]{};
#pragma GCC unroll 4
  for (int64_t row = 0; row < rows; ++row) {
    if constexpr (kUpper) high[row][0] = load(upper + row * kRegister);
    if constexpr (kUpper == 2) high[row][1] = load(upper + kLine + row * kRegister);
  }
  const auto with_upper = [&](int64_t half, int64_t quad, int64_t row, Bytes bytes) {
    if constexpr (kUpper == 1) bytes |= move_bits(high[row][0], 1, 4 * half + quad, kLower);
    if constexpr (kUpper == 2) bytes |= move_bits(high[row][half], 2, 2 * quad, kLower);
    if constexpr (packed::has_table(kind)) bytes = look_up<kind>(bytes);
    body(half, quad, row, bytes);
  };
  constexpr int64_t kOuter = kLower == 2 ? 2 : 4;
#pragma GCC unroll 4
  for (int64_t outer = 0; outer < kOuter; ++outer) {
    Bytes loaded[rows];
#pragma GCC unroll 4
    for (int64_t row = 0; row < rows; ++row) loaded[row] = load(lower + outer * kLine + row * kRegister);
#pragma GCC unroll 4
    for (int64_t inner = 0; inner < 8 / kOuter; ++inner) {
      const int64_t half = kLower == 2 ? outer : inner, quad = kLower == 2 ? inner : outer;
#pragma GCC unroll 4
      for (int64_t row = 0; row < rows; ++row) {
        with_upper(half, quad, row, move_bits(loaded[row], kLower, kLower * inner, 0));
      }
    }
  }
}

// Bytes of `for_each_quad` as signed numbers of 16 bits.
template <int64_t kind>
FourColumns widen(Bytes bytes) {
  if constexpr (kind != kInt8 && !packed::code_bias(kind)) return {Pairs(bytes & 255), Pairs(bytes >> 8)};
  const Bytes numbers = Bytes(UnsignedBytes(bytes) - uint8_t(packed::code_bias(kind)));
  return {Pairs(numbers << 8) >> 8, Pairs(numbers) >> 8};
}

// Adds the products of two columns and of a pair of 16-bit codes, those of a vector.
[[gnu::always_inline]] inline Ints multiply_add(Ints sums, Pairs codes, const void* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
#if defined(H2O_AVX512)
  return in_register(Ints(_mm512_dpwssd_epi32(__m512i(sums), __m512i(codes), _mm512_set1_epi32(both))));
#elif defined(H2O_VNNI)
  return in_register(Ints(_mm256_dpwssd_avx_epi32(__m256i(sums), __m256i(codes), _mm256_set1_epi32(both))));
#elif defined(H2O_AVX2)
  return in_register(sums + Ints(_mm256_madd_epi16(__m256i(codes), _mm256_set1_epi32(both))));
#elif defined(__SSE2__)
  return in_register(sums + Ints(_mm_madd_epi16(__m128i(codes), _mm_set1_epi32(both))));
#elif defined(H2O_NEON)
  const int16x8_t pairs = vreinterpretq_s16_s32(vdupq_n_s32(both)), numbers = int16x8_t(codes);
  const int32x4_t low = vmull_s16(vget_low_s16(numbers), vget_low_s16(pairs)), high = vmull_high_s16(numbers, pairs);
  return sums + Ints(vpaddq_s32(low, high));
#else
  const simd::Words words = simd::Words(codes);
  return sums + (Ints(words << 16) >> 16) * int32_t(int16_t(both)) + (Ints(words) >> 16) * (both >> 16);
#endif
}

#if defined(H2O_NEON_DOT)

// Bytes of `for_each_quad` as signed numbers, without their bias.
template <int64_t kind>
int8x16_t signed_bytes(Bytes bytes) {
  return int8x16_t(UnsignedBytes(bytes) - uint8_t(packed::has_table(kind) ? 0 : packed::code_bias(kind)));
}

// Adds the products of four columns and of a vector's `number`th four bytes.
[[gnu::always_inline]] inline Ints add_products(Ints sums, int8x16_t bytes, const void* vector, int64_t number) {
  const int8x16_t sixteen = vld1q_s8(static_cast<const int8_t*>(vector) + number / 4 * 16);
  switch (number % 4) {  // lanes are constants
    case 0: return Ints(vdotq_laneq_s32(int32x4_t(sums), bytes, sixteen, 0));
    case 1: return Ints(vdotq_laneq_s32(int32x4_t(sums), bytes, sixteen, 1));
    case 2: return Ints(vdotq_laneq_s32(int32x4_t(sums), bytes, sixteen, 2));
    default: return Ints(vdotq_laneq_s32(int32x4_t(sums), bytes, sixteen, 3));
  }
}

// Products of a group's codes from quad `begin` on and a vector's; `code_sum` is that of the vector's codes.
template <int64_t kind>
[[gnu::always_inline]] inline Ints products(const Bytes* quads, const VectorGroup& vector, int64_t begin,
                                            int32_t code_sum) {
  constexpr int64_t kQuads = packed::kGroup / 4 / packed::scales_per_group(kind);
  constexpr int32_t kBias = packed::has_table(kind) ? 0 : packed::code_bias(kind);
  Ints sums{};
#pragma GCC unroll 2
  for (int64_t part = 0; part < 2; ++part) {
    if (part == 1) sums <<= 7;
#pragma GCC unroll 8
    for (int64_t i = begin; i < begin + kQuads; ++i) {
      sums = add_products(sums, int8x16_t(quads[i]), vector.part(part), i);
    }
  }
  return kBias ? sums - kBias * code_sum : sums;
}

#elif defined(H2O_AVX2)

// Sums of the products of a matrix's codes and a vector's.
template <int64_t kind>
class Accumulator {
 public:
  // Adds the products of four columns; `call` numbers the calls.
  [[gnu::always_inline]] void add(Bytes bytes, const VectorGroup& vector, int64_t column, int64_t call) {
    if (kind == kInt8) bytes ^= 0x8080;  // unsigned
#if defined(H2O_VNNI)
    (void)call;
    high_ = add_products(high_, bytes, vector.high(column));
    low_ = add_products(low_, bytes, vector.low(column));
#else
    // Products of column pairs are summed in 16 bits as long as they fit.
    constexpr bool kFullBytes = kind == kInt8 || kind == kIq4Nl || kind == kIq4Xs;
    constexpr int64_t kCallsPerSum = kFullBytes ? 1 : packed::scales_per_group(kind) == 2 ? 4 : 8;
    const __m256i high = _mm256_maddubs_epi16(__m256i(bytes), _mm256_set1_epi32(vector.high(column)));
    const __m256i low = _mm256_maddubs_epi16(__m256i(bytes), _mm256_set1_epi32(vector.low(column)));
    high_ = in_register(call % kCallsPerSum ? _mm256_add_epi16(high_, high) : high);
    low_ = in_register(call % kCallsPerSum ? _mm256_add_epi16(low_, low) : low);
    if (call % kCallsPerSum == kCallsPerSum - 1) {
      sums_ = in_register(sums_ + Ints(_mm256_madd_epi16(high_, _mm256_set1_epi16(128))));
      sums_ = in_register(sums_ + Ints(_mm256_madd_epi16(low_, _mm256_set1_epi16(1))));
    }
#endif
  }

  // `code_sum`: of the vector's codes that were added.
  Ints sums(int32_t code_sum) const {
    constexpr int32_t kBias = kind == kInt8 ? 128 : packed::code_bias(kind);
#if defined(H2O_VNNI)
    const Ints sums_ = (high_ << 7) + low_;
#endif
    return kBias ? sums_ - kBias * code_sum : sums_;
  }

 private:
#if defined(H2O_VNNI)
  static Ints add_products(Ints sums, Bytes bytes, int32_t four) {
#if defined(H2O_AVX512)
    return Ints(_mm512_dpbusd_epi32(__m512i(sums), __m512i(bytes), _mm512_set1_epi32(four)));
#else
    return Ints(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(bytes), _mm256_set1_epi32(four)));
#endif
  }

  Ints high_{}, low_{};
#else
  __m256i high_, low_;
  Ints sums_{};
#endif
};

#else

// Sums of the products of a matrix's codes and a vector's.
template <int64_t kind>
class Accumulator {
 public:
  // Adds the products of four columns; `call` numbers the calls.
  [[gnu::always_inline]] void add(Bytes bytes, const VectorGroup& vector, int64_t column, int64_t) {
    const FourColumns columns = widen<kind>(bytes);
    sums_ = multiply_add(multiply_add(sums_, columns.even, vector.pair(column)), columns.odd, vector.pair(column + 2));
  }

  // `code_sum`: of the vector's codes that were added.
  Ints sums(int32_t) const { return sums_; }

 private:
  Ints sums_{};
};

#endif

}  // namespace dot
