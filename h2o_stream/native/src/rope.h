// Rotary positions by distance from the newest token: h2o_stream/cache/rope.py.

#pragma once

#include "abi.h"
#include "policies.h"
#include "simd.h"

namespace rope {

// How far behind the newest token RoPE sees a key. `seen` counts the tokens of the stream, the newest included.
inline int64_t distance(const AttentionLayer& layer, const Slots& slots, int64_t seen, int64_t index, int64_t rank) {
  int64_t result = rank;
  if (layer.positions == kGap) {
    const int64_t span = policies::pinned(layer, index) ? 0 : slots.span;
    result = std::min(seen - 1 - index, rank + span);
  }
  return std::min(std::max<int64_t>(result, 0), layer.distances - 1);
}

// Rotates a query or key by minus the angles of a distance, in place; numbers past `rotary` stay.
inline void rotate_back(const AttentionLayer& layer, int64_t distance, float* x) {
  const int64_t half = layer.rotary / 2;
  const float *cosines = layer.rope + distance * layer.rotary, *sines = cosines + half;
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

}  // namespace rope
