// SIMD vectors of the native width: loads and stores for every dtype, and functions on them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <utility>

#include "compat.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define H2O_AVX2
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(H2O_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define H2O_AVX512
#endif

// Products of bytes and of 16-bit numbers are added up by one instruction.
#if defined(H2O_AVX512) || (defined(H2O_AVX2) && defined(__AVXVNNI__))
#define H2O_VNNI
#endif

// Every 64-bit Arm processor; those with products of bytes; those with products of matrices of bytes.
#if defined(__aarch64__) && defined(__ARM_NEON)
#define H2O_NEON
#include <arm_neon.h>
#endif
#if defined(H2O_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define H2O_NEON_DOT
#endif
#if defined(H2O_NEON_DOT) && defined(__ARM_FEATURE_MATMUL_INT8)
#define H2O_NEON_I8MM
#endif

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

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

// IEEE half precision.
struct Half {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(uint8_t x) { return x; }
inline float to_float(int8_t x) { return x; }

inline float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

#if defined(H2O_AVX2)
inline float to_float(Half x) { return _cvtsh_ss(x.bits); }
#elif defined(H2O_NEON)
inline float to_float(Half x) {
  __fp16 value;
  std::memcpy(&value, &x, sizeof value);
  return value;
}
#else
inline float to_float(Half x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;  // infinities and NaNs do not occur
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
#endif

inline void from_float(float x, float& to) { to = x; }

// Rounds to nearest, ties to even.
inline void from_float(float x, BFloat16& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to nearest, ties to even; values that are too large become infinity.
inline void from_float(float x, Half& to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const float magnitude = std::fabs(x);
  if (!(magnitude < 65520.f)) {
    to.bits = sign | 0x7c00;
  } else if (magnitude < 0x1p-14f) {  // subnormal: adding 0.5 rounds to the lowest bits
    const float shifted = magnitude + 0.5f;
    uint32_t rounded_bits;
    std::memcpy(&rounded_bits, &shifted, sizeof rounded_bits);
    to.bits = sign | uint16_t(rounded_bits & 0xffff);
  } else {
    bits = (bits & 0x7fffffff) - (112u << 23);
    to.bits = sign | uint16_t((bits + 0xfff + (bits >> 13 & 1)) >> 13);
  }
}

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

// Interleaves the halves of two vectors that begin at element `first`.
template <int64_t first, class Vector, size_t... i>
Vector interleave(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (first + int64_t(i) / 2 + int64_t(i) % 2 * int64_t(sizeof...(i)))...);
}

template <class Vector, size_t... i>
std::pair<Vector, Vector> separated(Vector a, Vector b, std::index_sequence<i...>) {
  return {__builtin_shufflevector(a, b, 2 * i...), __builtin_shufflevector(a, b, 2 * i + 1 ...)};
}

// The even and the odd elements of two vectors in a row.
inline std::pair<Floats, Floats> separated(Floats a, Floats b) {
  return separated(a, b, std::make_index_sequence<kWidth>());
}

// The first and the second elements of both vectors in turn.
template <class Vector>
std::pair<Vector, Vector> interleaved(Vector a, Vector b) {
  constexpr auto kIndices = std::make_index_sequence<kWidth>();
  return {interleave<0>(a, b, kIndices), interleave<kWidth / 2>(a, b, kIndices)};
}

// Transposes a square matrix of `width` vectors in place. Each stage rotates the bits of (row, column) by one.
template <class Vector, size_t width>
[[gnu::always_inline]] inline void transpose(Vector (&rows)[width]) {
  constexpr auto kIndices = std::make_index_sequence<width>();
#pragma GCC unroll 4
  for (size_t stage = 1; stage < width; stage *= 2) {
    Vector interleaved[width];
#pragma GCC unroll 8
    for (size_t i = 0; i < width / 2; ++i) {
      interleaved[2 * i] = interleave<0>(rows[i], rows[i + width / 2], kIndices);
      interleaved[2 * i + 1] = interleave<width / 2>(rows[i], rows[i + width / 2], kIndices);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < width; ++i) rows[i] = interleaved[i];
  }
}

// The elements of two vectors whose index has this bit, taken from the other place: those of a move up, of b down; or
// those of a without it, and of b with it, in their places.
template <int64_t bit, bool crossed, class Vector, size_t... i>
Vector halves(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(
      a, b, (int64_t(i) & bit ? kWidth + int64_t(i) - crossed * bit : int64_t(i) + crossed * bit)...);
}

// Adds up the elements of each of `count` vectors that are `count` apart.
template <int64_t count, class Vector>
[[gnu::always_inline]] inline Vector sums_of_rows(Vector* rows) {
  constexpr auto kIndices = std::make_index_sequence<kWidth>();
  if constexpr (count == 1) {
    return rows[0];
  } else {
    constexpr int64_t half = count / 2;
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) {
      rows[i] = halves<half, false>(rows[i], rows[i + half], kIndices) +
                halves<half, true>(rows[i], rows[i + half], kIndices);
    }
    return sums_of_rows<half>(rows);
  }
}

// Adds the elements of each of kWidth vectors. Each stage halves the number of vectors.
template <class Vector>
[[gnu::always_inline]] inline Vector sums_of_rows(const Vector* from) {
  Vector rows[kWidth];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) rows[i] = from[i];
  return sums_of_rows<kWidth>(rows);
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

// Interleaves the lower or the upper halves of each 16 bytes of two vectors.
template <bool upper, class Vector, size_t... i>
Vector interleave_bytes(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, int(i / 16 * 16 + 8 * upper + i % 16 / 2 + i % 2 * sizeof...(i))...);
}

// The bytes of two rows, 4 * kWidth of each, as pairs of numbers: element 4 * i + j of vector k is the pair of column
// 16 * i + 4 * k + j.
[[gnu::always_inline]] inline void load_pairs(const uint8_t* first, const uint8_t* second, Shorts (&pairs)[4]) {
  using Vector = uint8_t __attribute__((vector_size(4 * kWidth)));
  constexpr auto kIndices = std::make_index_sequence<4 * kWidth>();
  Vector a, b, zero{};
  std::memcpy(&a, first, sizeof a), std::memcpy(&b, second, sizeof b);
  const Vector low = interleave_bytes<false>(a, b, kIndices), high = interleave_bytes<true>(a, b, kIndices);
  pairs[0] = Shorts(interleave_bytes<false>(low, zero, kIndices));
  pairs[1] = Shorts(interleave_bytes<true>(low, zero, kIndices));
  pairs[2] = Shorts(interleave_bytes<false>(high, zero, kIndices));
  pairs[3] = Shorts(interleave_bytes<true>(high, zero, kIndices));
}

// Combines (by default, adds) the halves of 16, 8 or 4 elements until four are left.
template <class Vector, class Combine = std::plus<>>
auto fold_to_four(Vector v, Combine combine = {}) {
  if constexpr (sizeof v == 64) {
    return fold_to_four(combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)),
                        combine);
  } else if constexpr (sizeof v == 32) {
    return combine(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
  } else {
    return v;
  }
}

// Combines all elements.
template <class Vector, class Combine>
float reduce(Vector v, Combine combine) {
  const auto four = fold_to_four(v, combine);
  const auto pairs = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return combine(pairs[0], pairs[1]);
}

template <class Vector>
float reduce_add(Vector v) {
  return reduce(v, std::plus<>{});
}

// Minus infinity for an empty array.
inline float reduce_max(const float* values, int64_t count) {
  Floats maxima = splat(kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats vector = load(values + i);
    maxima = vector > maxima ? vector : maxima;
  }
  float maximum = reduce(maxima, [](auto a, auto b) { return a > b ? a : b; });
  for (; i < count; ++i) maximum = std::max(maximum, values[i]);
  return maximum;
}

// Infinity for an empty array.
inline float reduce_min(const float* values, int64_t count) {
  Floats minima = splat(-kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats vector = load(values + i);
    minima = vector < minima ? vector : minima;
  }
  float minimum = reduce(minima, [](auto a, auto b) { return a < b ? a : b; });
  for (; i < count; ++i) minimum = std::min(minimum, values[i]);
  return minimum;
}

// exp(x) for x <= 0, accurate to about 1 ulp; zero below -87, NaN for NaN.
inline Floats exp_nonpositive(Floats x) {
  const Ints underflow = x < -87.f;
  const Floats scaled = x * 1.44269504f, magic = splat(12582912.f);  // adding 1.5 * 2^23 rounds to an integer
  const Floats rounded = (scaled + magic) - magic;
  const Floats remainder = (x - rounded * 0.693359375f) + rounded * 2.12194440e-4f;
  Floats polynomial = splat(1.9875691500e-4f);
  for (const float coefficient :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    polynomial = polynomial * remainder + coefficient;
  }
  polynomial = polynomial * remainder * remainder + remainder + 1.f;
  const Ints exponent = (__builtin_convertvector(rounded, Ints) + 127) << 23;
  return underflow ? Floats{} : polynomial * Floats(exponent);
}

// Into all levels of the cache, or into the second one, which has room for what is read later.
template <int level = 1>
void prefetch(const void* from, int64_t bytes) {
  asm volatile("");  // GCC treats functions that only prefetch as pure and removes the calls
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    __builtin_prefetch(static_cast<const uint8_t*>(from) + i, 0, level == 1 ? 3 : 2);
  }
}

}  // namespace simd
