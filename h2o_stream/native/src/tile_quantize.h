// Quantizes groups of 16 rows to kInt8 and kInt4.

#pragma once

#include "tile_writer.h"

namespace tiles {

using packed::kGroup;

// 32 columns of 16 rows.
using Group = float[kGroup][kRows];

constexpr float kLargestHalf = 65504.f, kSmallestNormalHalf = 0x1p-14f;

// NaN becomes `low`.
inline Floats clamp(Floats x, float low, float high) {
  x = x > low ? x : simd::splat(low);
  return x < high ? x : simd::splat(high);
}

// Rounds to nearest, ties to even, leaving the integer in the low bits; valid below 2^22.
inline Words round_to_int(Floats x) {
  x += 12582912.f;
  return load<Words>(&x);
}

inline Floats round_to_half(Floats x) {
  uint16_t halves[kWidth];
  store_halves(clamp(x, -kLargestHalf, kLargestHalf), halves);
  return load_halves(halves);
}

// The largest magnitude becomes 127 or -127.
inline void quantize_int8(const Group& group, uint8_t* scales, uint8_t* codes) {
  for (int64_t r = 0; r < kRows; r += kWidth) {
    Floats largest{};
    for (const auto& column : group) {
      const Floats x = simd::load(column + r), size = x < 0.f ? -x : x;
      largest = size > largest ? size : largest;
    }
    const Floats scale = round_to_half(clamp(largest / 127.f, kSmallestNormalHalf, kLargestHalf));
    store_halves(scale, scales + 2 * r);
    for (int64_t q = 0; q < kGroup / 4; ++q) {
      Words four{};
      for (int64_t k = 0; k < 4; ++k) {
        const Floats x = simd::load(group[4 * q + k] + r);
        four |= (round_to_int(clamp(x / scale, -127.f, 127.f)) & 0xff) << uint32_t(8 * k);
      }
      store(four, codes + 4 * (q * kRows + r));
    }
  }
}

// 16 levels, `scale` apart.
struct Int4Params {
  Floats scale, offset, inverse;

  Int4Params(Floats scale, Floats offset)
      : scale(scale), offset(offset), inverse(scale != 0.f ? 1.f / scale : Floats{}) {}

  Floats code(Floats x) const { return clamp((x - offset) * inverse, 0.f, 15.f); }

  // Sum of squared errors.
  Floats error(const Group& group, int64_t row) const {
    Floats sum{};
    for (const auto& column : group) {
      const Floats x = simd::load(column + row);
      const Floats error = to_floats(round_to_int(code(x)) & 0xf) * scale + offset - x;
      sum += error * error;
    }
    return sum;
  }
};

// Chooses the better of two ranges: from minimum to maximum (Q4_1), or with an exact zero and the largest magnitude at
// its end (Q4_0). NaNs are ignored.
inline Int4Params best_int4_params(const Group& group, int64_t row) {
  Floats low = simd::splat(kLargestHalf), high = simd::splat(-kLargestHalf);
  for (const auto& column : group) {
    const Floats x = simd::load(column + row);
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  const Floats extreme = clamp(high > -low ? high : low, -kLargestHalf, kLargestHalf),
               scale = round_to_half(extreme / -8.f);
  const Int4Params asymmetric(round_to_half((high - low) / 15.f), round_to_half(low)), symmetric(scale, scale * -8.f);
  const auto better = symmetric.error(group, row) < asymmetric.error(group, row);
  return {better ? symmetric.scale : asymmetric.scale, better ? symmetric.offset : asymmetric.offset};
}

inline void quantize_int4(const Group& group, uint8_t* scales, uint8_t* codes) {
  for (int64_t r = 0; r < kRows; r += kWidth) {
    const Int4Params params = best_int4_params(group, r);
    store_halves(params.scale, scales + 2 * r);
    store_halves(params.offset, scales + 2 * (kRows + r));
    for (int64_t q = 0; q < kGroup / 8; ++q) {
      Words four{};
      for (int64_t k = 0; k < 4; ++k) {
        const Floats lower = simd::load(group[4 * q + k] + r), upper = simd::load(group[kGroup / 2 + 4 * q + k] + r);
        four |= (round_to_int(params.code(lower)) & 0xf) << uint32_t(8 * k);
        four |= (round_to_int(params.code(upper)) & 0xf) << uint32_t(8 * k + 4);
      }
      store(four, codes + 4 * (q * kRows + r));
    }
  }
}

}  // namespace tiles
