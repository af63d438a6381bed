// SIMD on four bytes, or two numbers of 16 bits, of every lane: tables and products.

#pragma once

#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace simd {

// 16-bit elements because shifts need them.
using Quads = uint16_t __attribute__((vector_size(4 * kWidth)));
using QuadBytes = uint8_t __attribute__((vector_size(4 * kWidth)));
using Pairs = int16_t __attribute__((vector_size(4 * kWidth)));

// Whether `add_quad_products` takes signed bytes of a matrix.
#if defined(H2O_NEON_DOT)
constexpr bool kSignedProducts = true;
#else
constexpr bool kSignedProducts = false;
#endif

// Keeps a vector in a register: GCC would read the operand again for each use, or reorder sums and run out of
// registers.
template <class Vector>
[[gnu::always_inline]] inline Vector in_register(Vector vector) {
#if defined(H2O_AVX512)
  asm("" : "+v"(vector));
#elif defined(__SSE2__)
  asm("" : "+x"(vector));
#elif defined(H2O_NEON)
  asm("" : "+w"(vector));
#endif
  return vector;
}

inline Quads load_quads(const uint8_t* from) {
  Quads quads;
  std::memcpy(&quads, from, sizeof quads);
  return in_register(quads);
}

#if defined(H2O_NEON)
// Replaces what is below bit 4 by the low, or the high, four bits of other bytes. The first also moves the rest up.
inline Quads insert_low_nibbles(Quads upper, Quads bytes) {
  return Quads(vsliq_n_u8(uint8x16_t(bytes), uint8x16_t(upper), 4));
}
inline Quads insert_high_nibbles(Quads upper, Quads bytes) {
  return Quads(vsriq_n_u8(uint8x16_t(upper), uint8x16_t(bytes), 4));
}
#endif

#if !defined(H2O_AVX2) && !defined(H2O_NEON)
// Not inlined: a scalar load for each byte, in dozens of places, takes compilers minutes.
[[gnu::noinline]] inline Quads look_up(Quads codes, const uint8_t* numbers, uint8_t bias) {
  uint8_t bytes[sizeof codes];
  std::memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = uint8_t(numbers[byte] - bias);
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
}
#else
// The numbers of codes from 0 to 15, less a bias.
inline Quads look_up(Quads codes, const uint8_t* numbers, uint8_t bias) {
  using Table = uint8_t __attribute__((vector_size(16)));
  Table table;
  std::memcpy(&table, numbers, sizeof table);
  table -= bias;
#if defined(H2O_AVX512)
  return Quads(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(__m128i(table)), __m512i(codes)));
#elif defined(H2O_AVX2)
  return Quads(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(__m128i(table)), __m256i(codes)));
#else
  return Quads(vqtbl1q_u8(table, uint8x16_t(codes)));
#endif
}
#endif

// Adds the products of pairs and of one pair in memory.
[[gnu::always_inline]] inline Ints add_pair_products(Ints sums, Pairs pairs, const void* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
#if defined(H2O_AVX512)
  return in_register(Ints(_mm512_dpwssd_epi32(__m512i(sums), __m512i(pairs), _mm512_set1_epi32(both))));
#elif defined(H2O_VNNI)
  return in_register(Ints(_mm256_dpwssd_avx_epi32(__m256i(sums), __m256i(pairs), _mm256_set1_epi32(both))));
#elif defined(H2O_AVX2)
  return in_register(sums + Ints(_mm256_madd_epi16(__m256i(pairs), _mm256_set1_epi32(both))));
#elif defined(__SSE2__)
  return in_register(sums + Ints(_mm_madd_epi16(__m128i(pairs), _mm_set1_epi32(both))));
#elif defined(H2O_NEON)
  const int16x8_t repeated = vreinterpretq_s16_s32(vdupq_n_s32(both)), numbers = int16x8_t(pairs);
  const int32x4_t low = vmull_s16(vget_low_s16(numbers), vget_low_s16(repeated));
  return sums + Ints(vpaddq_s32(low, vmull_high_s16(numbers, repeated)));
#else
  const Words words = Words(pairs);
  return sums + (Ints(words << 16) >> 16) * int32_t(int16_t(both)) + (Ints(words) >> 16) * (both >> 16);
#endif
}

#if defined(H2O_NEON_DOT)

// Adds the products of bytes and of the `number`th four of a vector of bytes.
[[gnu::always_inline]] inline Ints add_quad_products(Ints sums, Quads bytes, const int8_t* vector, int64_t number) {
  const int8x16_t factors = int8x16_t(bytes), sixteen = vld1q_s8(vector + number / 4 * 16);
  switch (number % 4) {  // lanes are constants
    case 0: return Ints(vdotq_laneq_s32(int32x4_t(sums), factors, sixteen, 0));
    case 1: return Ints(vdotq_laneq_s32(int32x4_t(sums), factors, sixteen, 1));
    case 2: return Ints(vdotq_laneq_s32(int32x4_t(sums), factors, sixteen, 2));
    default: return Ints(vdotq_laneq_s32(int32x4_t(sums), factors, sixteen, 3));
  }
}

#elif defined(H2O_AVX2)

// The `number`th four of a vector of bytes, in every lane.
inline Ints repeated_quad(const int8_t* vector, int64_t number) {
  int32_t four;
  std::memcpy(&four, vector + 4 * number, sizeof four);
  return Ints{} + four;
}

#if defined(H2O_VNNI)
// Adds the products of bytes and of the `number`th four of a vector of bytes.
inline Ints add_quad_products(Ints sums, Quads bytes, const int8_t* vector, int64_t number) {
  const Ints four = repeated_quad(vector, number);
#if defined(H2O_AVX512)
  return Ints(_mm512_dpbusd_epi32(__m512i(sums), __m512i(bytes), __m512i(four)));
#else
  return Ints(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(bytes), __m256i(four)));
#endif
}
#else
// The products of pairs of bytes and of those of the `number`th four of a vector, added up in 16 bits.
inline Pairs quad_products(Quads bytes, const int8_t* vector, int64_t number) {
  return Pairs(_mm256_maddubs_epi16(__m256i(bytes), __m256i(repeated_quad(vector, number))));
}

// Adds both numbers of each pair, times a factor.
inline Ints add_pairs(Ints sums, Pairs pairs, int16_t factor) {
  return in_register(sums + Ints(_mm256_madd_epi16(__m256i(pairs), _mm256_set1_epi16(factor))));
}
#endif

#endif

#if defined(H2O_NEON_I8MM)
// Adds the products of two rows and two columns of eight bytes each.
inline Ints add_products_of_eight(Ints sums, Quads rows, const void* columns) {
  return Ints(vmmlaq_s32(int32x4_t(sums), int8x16_t(rows), vld1q_s8(static_cast<const int8_t*>(columns))));
}
#endif

}  // namespace simd
