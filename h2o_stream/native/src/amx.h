// Products of bfloat16 numbers in tiles, which AMX (Advanced Matrix Extensions) of some x86 processors multiplies.
//
// Numbers are rounded to bfloat16 and multiplied exactly; sums are float32.

#pragma once

#include "simd.h"

#if defined(H2O_AVX512) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#define H2O_AMX
#define H2O_AMX_TARGET [[gnu::target("amx-tile,amx-bf16,avx512bf16")]]
#endif

namespace amx {

// A tile of A is [kSize rows][kDepth], a tile of B is [kDepth / 2][kSize columns][2], and a tile of C [kSize][kSize].
constexpr int64_t kSize = 16, kDepth = 32, kTile = kSize * kDepth;

// Rows and columns of C multiplied at a time.
constexpr int64_t kBlock = 2 * kSize;

// Whether this library, the processor and the operating system support it.
bool available();

#if defined(H2O_AMX)

// Tiles of a thread are in use while it exists.
class Tiles {
 public:
  H2O_AMX_TARGET Tiles();
  H2O_AMX_TARGET ~Tiles();
};

// C [kBlock][kBlock], with `stride` elements between rows, = A [kBlock][depth] times B [depth][kBlock], where `steps` is
// depth / kDepth. A and B are two rows or columns of `steps` tiles; `a_next` and `b_next` elements to the second.
H2O_AMX_TARGET inline void multiply(const simd::BFloat16* a, int64_t a_next, const simd::BFloat16* b, int64_t b_next,
                                    int64_t steps, float* c, int64_t stride) {
  constexpr int64_t kRowBytes = 64;
  asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; ++i, a += kTile, b += kTile) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + b_next, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_next, kRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride * sizeof(float));
  _tile_stored(1, c + kSize, stride * sizeof(float));
  _tile_stored(2, c + kSize * stride, stride * sizeof(float));
  _tile_stored(3, c + kSize * stride + kSize, stride * sizeof(float));
}

// A register of numbers as bfloat16, rounded to nearest, ties to even.
H2O_AMX_TARGET inline simd::Halves round(simd::Floats numbers) {
  return simd::Halves(_mm512_cvtneps_pbh(__m512(numbers)));
}

// Two registers of numbers as pairs of bfloat16: element i of `low`, then of `high`.
H2O_AMX_TARGET inline __m512i round_pairs(simd::Floats low, simd::Floats high) {
  alignas(64) static constexpr uint16_t kPairs[2 * simd::kWidth] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh halves = _mm512_cvtne2ps_pbh(__m512(high), __m512(low));
  return _mm512_maskz_permutexvar_epi16(__mmask32(-1), _mm512_load_si512(kPairs), __m512i(halves));
}

#endif

}  // namespace amx
