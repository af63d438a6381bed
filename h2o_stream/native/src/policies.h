// Eviction policies: the C++ counterpart of h2o_stream/cache/policies.

#pragma once

#include "abi.h"
#include "simd.h"

namespace policies {

// Tokens of one head in any order; empty entries have index -1.
struct Tokens {
  const float *scores, *long_term;  // long_term may be null
  const int32_t* index;             // token index
  int64_t count;
};

// Whether the policy scores tokens by attention.
inline bool needs_attention(const AttentionLayer& layer) {
  return layer.policy == kAccumulated || layer.policy == kTova;
}

// MurmurHash3's finalizer: a bijection on 32-bit integers.
inline uint32_t hash(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// Computes what each token is worth; the lowest is evicted first. Protected tokens get infinity, empty entries minus
// infinity. A NaN score counts as the lowest finite worth, so that no comparison depends on it. Transient tokens are
// below every score, the oldest lowest: all of them at most -2^127, where floats are 2^104 apart.
//
// `rank` counts the newer cached tokens of each. `head` is the index within the group; `seen` counts the tokens of the
// stream including the new ones. The loops are plain so that compilers vectorize them.
template <class Rank>
void compute_worth(const AttentionLayer& layer, const Slots& slots, int64_t head, int64_t seen, const Tokens& tokens,
                   const Rank* rank, float* worth) {
  const int64_t count = tokens.count;
  if (layer.policy == kRandom) {
    const uint32_t step_hash = hash(uint32_t(seen) + 0x9E3779B9u * uint32_t(layer.seed));
    const uint32_t head_hash = hash(step_hash + 0x10001u * uint32_t(layer.layer_index) + uint32_t(head));
    for (int64_t i = 0; i < count; ++i) {
      worth[i] = float(int32_t(hash(head_hash + uint32_t(tokens.index[i])) & 0xFFFFFFu)) * 0x1p-24f;
    }
  } else if (layer.policy == kRecency) {
    for (int64_t i = 0; i < count; ++i) worth[i] = -float(rank[i]);
  } else if (layer.policy == kAccumulated && tokens.long_term) {
    const float weight = float(layer.long_term);
    for (int64_t i = 0; i < count; ++i) worth[i] = tokens.scores[i] + weight * tokens.long_term[i];
  } else {
    for (int64_t i = 0; i < count; ++i) worth[i] = tokens.scores[i];
  }
  constexpr float kProtected = std::numeric_limits<float>::infinity(), kLowest = std::numeric_limits<float>::lowest();
  for (int64_t range = 0; range < slots.transient_count; ++range) {
    const int32_t first = int32_t(slots.transient[2 * range]), end = int32_t(slots.transient[2 * range + 1]);
    for (int64_t i = 0; i < count; ++i) {
      const float lowest = -0x1p127f - 0x1p104f * float(rank[i]);
      worth[i] = (tokens.index[i] >= first) & (tokens.index[i] < end) ? lowest : worth[i];
    }
  }
  for (int64_t pin = 0; pin < slots.pin_count; ++pin) {
    const int32_t first = int32_t(slots.pins[2 * pin]), end = int32_t(slots.pins[2 * pin + 1]);
    for (int64_t i = 0; i < count; ++i) {
      worth[i] = (tokens.index[i] >= first) & (tokens.index[i] < end) ? kProtected : worth[i];
    }
  }
  const int32_t recent = int32_t(slots.recent), sinks = int32_t(layer.sinks);
  for (int64_t i = 0; i < count; ++i) {
    const float finite = worth[i] == worth[i] ? worth[i] : kLowest;
    const float value = (rank[i] < recent) | (tokens.index[i] < sinks) ? kProtected : finite;
    worth[i] = tokens.index[i] < 0 ? simd::kMinusInfinity : value;
  }
}

}  // namespace policies
