// Dot products of packed codes and rounded vectors. Each SIMD lane belongs to a row.

#pragma once

#include "abi.h"
#include "packed.h"
#include "simd.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace dot {

using simd::Ints;

// Codes of two columns in each of `simd::kWidth` rows.
using Pairs = int16_t __attribute__((vector_size(4 * simd::kWidth)));

// Columns c and c + 2, and c + 1 and c + 3. Vectors are stored in this order, because splitting bytes into even and odd
// ones costs least.
struct FourColumns {
  Pairs even, odd;
};

// Keeps a vector in a register: GCC would read the operand again for each use, or reorder sums and run out of registers.
template <class Vector>
[[gnu::always_inline]] inline Vector in_register(Vector vector) {
#if defined(H2O_AVX512)
  asm("" : "+v"(vector));
#elif defined(__SSE2__)
  asm("" : "+x"(vector));
#endif
  return vector;
}

// Adds the products of two columns and of a pair of 16-bit codes, those of a vector.
[[gnu::always_inline]] inline Ints multiply_add(Ints sums, Pairs codes, const void* pair) {
  int32_t both;
  std::memcpy(&both, pair, sizeof both);
#if defined(H2O_AVX512)
  return in_register(Ints(_mm512_dpwssd_epi32(__m512i(sums), __m512i(codes), _mm512_set1_epi32(both))));
#elif defined(H2O_AVX2)
  return in_register(sums + Ints(_mm256_madd_epi16(__m256i(codes), _mm256_set1_epi32(both))));
#elif defined(__SSE2__)
  return in_register(sums + Ints(_mm_madd_epi16(__m128i(codes), _mm_set1_epi32(both))));
#else
  const simd::Words words = simd::Words(codes);
  return sums + (Ints(words << 16) >> 16) * int32_t(int16_t(both)) + (Ints(words) >> 16) * (both >> 16);
#endif
}

using Bits = uint16_t __attribute__((vector_size(4 * simd::kWidth)));

inline Bits load_bits(const uint8_t* from) {
  Bits bits;
  std::memcpy(&bits, from, sizeof bits);
  return in_register(bits);
}

// Signed bytes.
inline FourColumns split(Bits bytes) { return {Pairs(bytes << 8) >> 8, Pairs(bytes) >> 8}; }

// Calls body(half, quad, columns) for columns 16 * half + 4 * quad to 16 * half + 4 * quad + 3 of a group, in the order of
// memory; `lower` and `upper` are the group's low and high bits (upper is used by kQ6K only).
template <int64_t kind, class Body>
[[gnu::always_inline]] inline void for_each_quad(const uint8_t* lower, const uint8_t* upper, Body body) {
  using packed::kLine;
  if constexpr (kind == kInt8) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) body(i / 4, i % 4, split(load_bits(lower + i * kLine)));
  } else if constexpr (kind == kQ6K) {
    const Bits high[2] = {load_bits(upper), load_bits(upper + kLine)};
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < 4; ++quad) {
      const Bits low = load_bits(lower + quad * kLine);
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; ++half) {
        const Bits four = half ? low >> 4 & 0x0f0f : low & 0x0f0f;
        const Bits two = (quad < 2 ? high[half] << (4 - 2 * quad) : high[half] >> (2 * quad - 4)) & 0x3030;
        using Bytes = int8_t __attribute__((vector_size(4 * simd::kWidth)));
        body(half, quad, split(Bits(Bytes(four | two) - packed::code_bias(kind))));
      }
    }
  } else {
#pragma GCC unroll 4
    for (int64_t quad = 0; quad < 4; ++quad) {
      const Bits nibbles = load_bits(lower + quad * kLine);
      body(0, quad, FourColumns{Pairs(nibbles & 15), Pairs(nibbles >> 8 & 15)});
      body(1, quad, FourColumns{Pairs(nibbles >> 4 & 15), Pairs(nibbles >> 12)});
    }
  }
}

}  // namespace dot
