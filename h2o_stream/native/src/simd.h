// SIMD vectors of the native width: loads and stores for every dtype, and what takes an instruction of its own.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "compat.h"
#include "instruction_sets.h"
#include "small_floats.h"

namespace simd {

// Elements per vector, and vectors in registers. Compilers emulate wider vectors than the machine has.
#if defined(H2O_AVX512)
constexpr int64_t kWidth = 16, kRegisters = 32;
#elif defined(H2O_AVX2)
constexpr int64_t kWidth = 8, kRegisters = 16;
#elif defined(H2O_NEON)
constexpr int64_t kWidth = 4, kRegisters = 32;
#else
constexpr int64_t kWidth = 4, kRegisters = 16;
#endif

using Floats = float __attribute__((vector_size(4 * kWidth)));
using Ints = int32_t __attribute__((vector_size(4 * kWidth)));
using Words = uint32_t __attribute__((vector_size(4 * kWidth)));
using Halves = uint16_t __attribute__((vector_size(2 * kWidth)));
using Bytes = uint8_t __attribute__((vector_size(kWidth)));
using SignedBytes = int8_t __attribute__((vector_size(kWidth)));
constexpr int64_t kShorts = 2 * kWidth;
using Shorts = int16_t __attribute__((vector_size(2 * kShorts)));

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr int64_t kCacheLine = 64;

// Rounds `count` up to a multiple of `unit`.
constexpr int64_t padded(int64_t count, int64_t unit = kWidth) { return (count + unit - 1) / unit * unit; }

inline Floats splat(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats floats;
  std::memcpy(&floats, from, sizeof floats);
  return floats;
}

inline Floats load(const BFloat16* from) {
#if defined(H2O_AVX512)  // GCC 12 emits four instructions otherwise
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return Floats(Ints(_mm512_maskz_cvtepu16_epi32(__mmask16(-1), halves)) << 16);
#elif defined(H2O_AVX2)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#elif defined(H2O_NEON)
  return Floats(vshll_n_u16(vld1_u16(&from->bits), 16));
#else
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  return Floats(__builtin_convertvector(halves, Words) << 16);
#endif
}

// 32 bytes at most: a single stream of memory is read faster that way than by 64.
#if defined(H2O_AVX512)
using Narrow = float __attribute__((vector_size(32)));
inline Narrow load_narrow(const float* from) { return Narrow(_mm256_loadu_ps(from)); }
inline Narrow load_narrow(const BFloat16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Narrow(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
#else
using Narrow = Floats;
template <class Element>
Narrow load_narrow(const Element* from) {
  return load(from);
}
#endif

inline Floats load(const Half* from) {
#if defined(H2O_AVX512)  // GCC 12 warns about the variant without a mask
  return Floats(_mm512_maskz_cvtph_ps(__mmask16(-1), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(H2O_AVX2)
  return Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(H2O_NEON)
  return Floats(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
#else
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const Ints bits = __builtin_convertvector(halves, Ints);
  const Floats magnitudes = Floats((bits & 0x7fff) << 13) * 0x1p112f;
  return Floats(Ints(magnitudes) | (bits & 0x8000) << 16);
#endif
}

#if defined(H2O_NEON)
// Four bytes as the lowest or the highest of each lane; other bytes are zero.
template <bool highest, class Byte>
int32x4_t load_four(const Byte* from) {
  constexpr uint8_t kNone = 255;
  alignas(16) static constexpr uint8_t kPlaces[] = {
      0,     kNone, kNone, kNone, 1,     kNone, kNone, kNone, 2,     kNone, kNone, kNone, 3,     kNone, kNone, kNone,
      kNone, kNone, kNone, 0,     kNone, kNone, kNone, 1,     kNone, kNone, kNone, 2,     kNone, kNone, kNone, 3};
  uint32_t four;
  std::memcpy(&four, from, sizeof four);
#if defined(__clang__)
  const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(four));
#else
  uint8x16_t bytes;
  asm("" : "=w"(bytes) : "0"(vcreate_u8(four)));  // it would clear the upper half, which is not read
#endif
  return vreinterpretq_s32_u8(vqtbl1q_u8(bytes, vld1q_u8(kPlaces + 16 * highest)));
}
#endif

// GCC 12 converts bytes one by one without intrinsics, and warns about variants without a mask.
inline Ints load_ints(const uint8_t* from) {
#if defined(H2O_AVX512)
  return Ints(_mm512_maskz_cvtepu8_epi32(__mmask16(-1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(H2O_AVX2)
  return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(H2O_NEON)
  return Ints(load_four<false>(from));
#else
  Ints ints;
  for (int64_t i = 0; i < kWidth; ++i) ints[i] = from[i];
  return ints;
#endif
}

inline Floats to_floats(Bytes bytes) {
#if defined(H2O_AVX512)
  return Floats(_mm512_cvtepi32_ps(_mm512_maskz_cvtepu8_epi32(__mmask16(-1), __m128i(bytes))));
#elif defined(H2O_AVX2)
  int64_t bits;
  std::memcpy(&bits, &bytes, sizeof bits);
  return Floats(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits))));
#else
  return __builtin_convertvector(bytes, Floats);
#endif
}

template <class Byte, class = std::enable_if_t<sizeof(Byte) == 1>>
Floats load(const Byte* from) {
#if defined(H2O_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Floats(_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes)));
#elif defined(H2O_AVX2)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return Floats(_mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes)));
#elif defined(H2O_NEON)
  if constexpr (!std::is_signed_v<Byte>) return Floats(vcvtq_f32_u32(uint32x4_t(load_ints(from))));
  return Floats(vcvtq_n_f32_s32(load_four<true>(from), 24));
#else
  Floats floats;
  for (int64_t i = 0; i < kWidth; ++i) floats[i] = float(from[i]);
  return floats;
#endif
}

inline Ints load(const int32_t* from) {
  Ints ints;
  std::memcpy(&ints, from, sizeof ints);
  return ints;
}

// The lowest byte of each number.
inline void store_bytes(Ints ints, uint8_t* to) {
#if defined(H2O_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(__mmask16(-1), __m512i(ints)));
#elif defined(H2O_NEON)
  const uint16x4_t halves = vmovn_u32(uint32x4_t(ints));
  const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
  std::memcpy(to, &four, sizeof four);
#else
  for (int64_t i = 0; i < kWidth; ++i) to[i] = uint8_t(ints[i]);
#endif
}

inline void store(Floats floats, float* to) { std::memcpy(to, &floats, sizeof floats); }
inline void store(Ints ints, int32_t* to) { std::memcpy(to, &ints, sizeof ints); }

inline void store(Floats floats, BFloat16* to) {
  const Words bits = Words(floats);
  const Halves halves = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
  std::memcpy(to, &halves, sizeof halves);
}

// Rounds to nearest, ties to even; values that are too large become infinity.
inline void store(Floats floats, Half* to) {
#if defined(H2O_AVX512)
  const __m256i halves = _mm512_maskz_cvtps_ph(__mmask16(-1), __m512(floats), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(H2O_AVX2)
  const __m128i halves = _mm256_cvtps_ph(__m256(floats), _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, sizeof halves);
#elif defined(H2O_NEON)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(floats))));
#else
  for (int64_t i = 0; i < kWidth; ++i) from_float(floats[i], to[i]);
#endif
}

// a * b / 2^15, rounded to nearest.
[[gnu::always_inline]] inline Shorts multiply_high(Shorts a, Shorts b) {
#if defined(H2O_AVX512)
  return Shorts(_mm512_mulhrs_epi16(__m512i(a), __m512i(b)));
#elif defined(H2O_AVX2)
  return Shorts(_mm256_mulhrs_epi16(__m256i(a), __m256i(b)));
#elif defined(H2O_NEON)
  return Shorts(vqrdmulhq_s16(int16x8_t(a), int16x8_t(b)));
#elif defined(__SSE2__)
  using Unsigned = uint16_t __attribute__((vector_size(2 * kShorts)));
  const Unsigned rest = Unsigned(a * b) >> 14;
  return Shorts((Unsigned(_mm_mulhi_epi16(__m128i(a), __m128i(b))) << 1) + ((rest + 1) >> 1));
#else
  Shorts product;
  for (int64_t i = 0; i < kShorts; ++i) product[i] = int16_t((int32_t(a[i]) * b[i] + 0x4000) >> 15);
  return product;
#endif
}

// Adds the sums of products of two numbers in a row.
[[gnu::always_inline]] inline Ints add_products(Ints sums, Shorts a, Shorts b) {
#if defined(H2O_AVX512)
  return Ints(_mm512_dpwssd_epi32(__m512i(sums), __m512i(a), __m512i(b)));
#elif defined(H2O_VNNI)
  return Ints(_mm256_dpwssd_avx_epi32(__m256i(sums), __m256i(a), __m256i(b)));
#elif defined(H2O_AVX2)
  return sums + Ints(_mm256_madd_epi16(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
  return sums + Ints(_mm_madd_epi16(__m128i(a), __m128i(b)));
#elif defined(H2O_NEON)
  const int32x4_t low = vmull_s16(vget_low_s16(int16x8_t(a)), vget_low_s16(int16x8_t(b)));
  return sums + Ints(vpaddq_s32(low, vmull_high_s16(int16x8_t(a), int16x8_t(b))));
#else
  const Ints x = Ints(a), y = Ints(b);
  return sums + (x << 16 >> 16) * (y << 16 >> 16) + (x >> 16) * (y >> 16);
#endif
}

// Bytes less 128, times 256.
[[gnu::always_inline]] inline Shorts load_centered(const uint8_t* from) {
#if defined(H2O_AVX512)
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const Shorts shorts = Shorts(_mm512_maskz_cvtepu8_epi16(__mmask32(-1), bytes));
#elif defined(H2O_AVX2)
  const Shorts shorts = Shorts(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(H2O_NEON)
  const Shorts shorts = Shorts(vmovl_u8(vld1_u8(from)));
#else
  Shorts shorts;
  for (int64_t i = 0; i < kShorts; ++i) shorts[i] = from[i];
#endif
  return (shorts << 8) ^ int16_t(-0x8000);
}

}  // namespace simd
