// RoPE by distance from the newest token; see h2o_stream/cache/rope.py.

#pragma once

#include "abi.h"
#include "simd.h"

namespace rope {

// RoPE distances of some keys from the newest token.
template <class Rank>
void distances(const AttentionLayer& layer, const Slots& slots, int32_t newest, const int32_t* index, const Rank* rank,
               int64_t count, int32_t* out) {
  const int32_t last = int32_t(layer.rope_rows) - 1;
  const int32_t span = int32_t(std::min<int64_t>(slots.span, INT32_MAX / 2));  // no stream is longer (check.cpp)
  if (layer.position_mode == kRolling) {
    for (int64_t i = 0; i < count; ++i) out[i] = rank[i];
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = std::min(newest - index[i], span + int32_t(rank[i]));
    for (int64_t pin = 0; pin < slots.pin_count; ++pin) {  // pinned tokens have no gap in front of them
      const int32_t first = int32_t(slots.pins[2 * pin]), end = int32_t(slots.pins[2 * pin + 1]);
      for (int64_t i = 0; i < count; ++i) {
        const bool pinned = (index[i] >= first) & (index[i] < end);
        out[i] = pinned ? std::min(out[i], int32_t(rank[i])) : out[i];
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) out[i] = std::max(0, std::min(out[i], last));
}

// Rotates a query or key by the negative angles of `cos_sin` [rotary_dims] in place; other elements stay unchanged.
inline void rotate_inverse(const float* cos_sin, int64_t rotary_dims, float* x) {
  const int64_t half = rotary_dims / 2;
  const float *cosines = cos_sin, *sines = cos_sin + half;
  int64_t i = 0;
  for (; i + simd::kWidth <= half; i += simd::kWidth) {
    const simd::Floats first = simd::load(x + i), second = simd::load(x + half + i);
    const simd::Floats cosine = simd::load(cosines + i), sine = simd::load(sines + i);
    simd::store(first * cosine + second * sine, x + i);
    simd::store(second * cosine - first * sine, x + half + i);
  }
  for (; i < half; ++i) {
    const float first = x[i], second = x[half + i];
    x[i] = first * cosines[i] + second * sines[i];
    x[half + i] = second * cosines[i] - first * sines[i];
  }
}

inline void rotate_inverse(const AttentionLayer& layer, int64_t distance, float* x) {
  rotate_inverse(layer.rope + distance * layer.rotary_dims, layer.rotary_dims, x);
}

}  // namespace rope
