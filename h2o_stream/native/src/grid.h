// What the codes of a block of a packed matrix are multiplied by; see `MatrixKind` in abi.h.

#pragma once

#include <type_traits>

#include "packed.h"
#include "simd.h"

namespace packed {

// As many halves or bytes as `Floats` holds: a register of them, or a single one.
template <class Floats>
Floats load_halves(const uint8_t* from);

template <>
inline float load_halves(const uint8_t* from) {
  simd::Half half;
  std::memcpy(&half, from, sizeof half);
  return simd::to_float(half);
}

template <>
inline simd::Floats load_halves(const uint8_t* from) {
#if defined(H2O_AVX512)
  return simd::Floats(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(H2O_AVX2)
  return simd::Floats(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  using Halves = uint16_t __attribute__((vector_size(2 * simd::kWidth)));
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  const simd::Ints bits = __builtin_convertvector(halves, simd::Ints);
  const simd::Floats magnitudes = simd::Floats((bits & 0x7fff) << 13) * 0x1p112f;
  return simd::Floats(simd::Ints(magnitudes) | (bits & 0x8000) << 16);
#endif
}

// GCC 12 converts bytes one by one.
template <class Floats, class Byte>
Floats load_bytes(const uint8_t* from) {
  if constexpr (std::is_same_v<Floats, float>) {
    return float(Byte(*from));
  } else {
#if defined(H2O_AVX512)
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return Floats(_mm512_cvtepi32_ps(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes)
                                                            : _mm512_cvtepu8_epi32(bytes)));
#elif defined(H2O_AVX2)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return Floats(_mm256_cvtepi32_ps(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes)
                                                            : _mm256_cvtepu8_epi32(bytes)));
#else
    Floats floats;
    for (int64_t i = 0; i < simd::kWidth; ++i) floats[i] = float(Byte(from[i]));
    return floats;
#endif
  }
}

// The grid of some rows of a tile, as many as `Floats` holds: a number is scale * (code - kBias) + offset.
template <int64_t kind, class Floats>
class Grid {
 public:
  static constexpr bool kHasOffsets = kind == kInt4 || kind == kQ4K;
  static constexpr int64_t kScales = kind == kQ6K ? 2 : 1;  // of a group
  static constexpr int32_t kBias = kind == kQ6K ? 32 : 0;

  // Of a block of some groups, from a row of the tile on.
  Grid(const uint8_t* block, int64_t groups, int64_t row) : groups_(groups) {
    constexpr int64_t kHalves = 2 * kRows;
    if constexpr (kind == kInt8 || kind == kInt4) {
      at_ = block + 2 * row;
    } else {
      scale_ = load_halves<Floats>(block + 2 * row);
      if (kind == kQ4K) offset_ = -load_halves<Floats>(block + kHalves + 2 * row);
      at_ = block + (kind == kQ4K ? 2 : 1) * kHalves + row;
    }
  }

  // Of a half of a group.
  Floats scale(int64_t group, int64_t half) const {
    if constexpr (kind == kInt8 || kind == kInt4) {
      return load_halves<Floats>(at_ + group * (kind == kInt4 ? 4 : 2) * kRows);
    } else if constexpr (kind == kQ4K) {
      return scale_ * load_bytes<Floats, uint8_t>(at_ + group * kRows);
    } else {
      return scale_ * load_bytes<Floats, int8_t>(at_ + (2 * group + half) * kRows);
    }
  }

  Floats offset(int64_t group) const {
    if constexpr (kind == kInt4) {
      return load_halves<Floats>(at_ + (2 * group + 1) * 2 * kRows);
    } else if constexpr (kind == kQ4K) {
      return offset_ * load_bytes<Floats, uint8_t>(at_ + (groups_ + group) * kRows);
    } else {
      return Floats{};
    }
  }

 private:
  const uint8_t* at_;
  const int64_t groups_;
  Floats scale_{}, offset_{};
};

}  // namespace packed
