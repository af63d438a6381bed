// Products of bfloat16 numbers in tiles, on units that some x86 processors have: AMX (Advanced Matrix Extensions), or
// the dot products of AVX512-BF16.
//
// Numbers are rounded to bfloat16 and multiplied exactly; sums are float32.

#pragma once

#include <algorithm>

#include "simd.h"

#if defined(H2O_AVX512) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define H2O_BFLOAT16_UNITS
#define H2O_BFLOAT16_TARGET [[gnu::target("avx512bf16")]]
#endif

namespace bfloat16_units {

// A tile of A is [kSize rows][kDepth], a tile of B is [kDepth / 2][kSize columns][2], and a tile of C [kSize][kSize].
constexpr int64_t kSize = 16, kDepth = 32, kTile = kSize * kDepth;

// Rows and columns of C multiplied at a time.
constexpr int64_t kBlock = 2 * kSize;

// Whether this library, the processor and the operating system support one of them.
bool available();

#if defined(H2O_BFLOAT16_UNITS)

// A thread multiplies while it has one: AMX's registers are in use then.
class InUse {
 public:
  InUse();
  ~InUse();
};

// C [kBlock][kBlock], with `stride` elements between rows, = A [kBlock][depth] times B [depth][kBlock], where `steps`
// is depth / kDepth. A and B are two rows or columns of `steps` tiles; `a_next` and `b_next` elements to the second.
// Only the first `rows` rows of C are needed, and those after them may be left as they are.
void multiply(const simd::BFloat16* a, int64_t a_next, const simd::BFloat16* b, int64_t b_next, int64_t steps,
              int64_t rows, float* c, int64_t stride);

// Adds rows and columns of a block [kBlock][kBlock] of C to the output, which begins with the bias, if there is one.
inline void add_block(const float* block, bool begins, const float* bias, int64_t rows, int64_t columns, float* out,
                      int64_t stride) {
  float first[kBlock] = {};
  if (bias) std::copy_n(bias, columns, first);
  for (int64_t row = 0; row < rows; ++row, block += kBlock, out += stride) {
    const float* before = begins ? first : out;
    if (columns == kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) out[i] = block[i] + before[i];
    } else {
      for (int64_t i = 0; i < columns; ++i) out[i] = block[i] + before[i];
    }
  }
}

// A register of numbers as bfloat16, rounded to nearest, ties to even.
H2O_BFLOAT16_TARGET inline simd::Halves round(simd::Floats numbers) {
  return simd::Halves(_mm512_cvtneps_pbh(__m512(numbers)));
}

// Stores two registers of numbers as pairs of bfloat16: element i of `low`, then of `high`.
H2O_BFLOAT16_TARGET inline void round_pairs(simd::Floats low, simd::Floats high, simd::BFloat16* to) {
  alignas(64) static constexpr uint16_t kPairs[2 * simd::kWidth] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                                    21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                                    11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh halves = _mm512_cvtne2ps_pbh(__m512(high), __m512(low));
  const __m512i pairs = _mm512_maskz_permutexvar_epi16(__mmask32(-1), _mm512_load_si512(kPairs), __m512i(halves));
  _mm512_storeu_si512(to, pairs);
}

// Stores a pair of each of up to `kSize` rows that are `stride` pairs apart, and zeros for missing rows.
H2O_BFLOAT16_TARGET inline void gather_pairs(const simd::BFloat16* from, int64_t rows, int64_t stride,
                                             simd::BFloat16* to) {
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i offsets = _mm512_mullo_epi32(numbers, _mm512_set1_epi32(int32_t(stride)));
  const __mmask16 present = __mmask16((1u << rows) - 1);
  _mm512_store_si512(to, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), present, offsets, from, 4));
}

#endif

}  // namespace bfloat16_units
