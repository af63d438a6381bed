// Decode attention over keys and values of 8 bits in fixed point: products of 16-bit numbers take half as many
// instructions as those of floats, and codes need no conversion. Logits, the softmax and scores stay float32.
//
// Both elements of a pair that RoPE turns are multiples of the pair's unit, the largest length that the pair can have
// divided by kLargest, so that no turned key overflows. Queries absorb the units.

#pragma once

#include "buffer.h"
#include "simd_functions.h"
#include "slot_kernels.h"

namespace fixed_point {

using simd::Floats;
using simd::Ints;
using simd::kShorts;
using simd::kWidth;
using simd::Shorts;
using slot_kernels::ByteRows;
using slot_kernels::kBlockSlots;
using slot_kernels::kPrefetchSlots;

using Four = float __attribute__((vector_size(16)));

constexpr float kLargest = 32600;         // of a key, which is rounded a few times
constexpr float kLargestSum = 65000;      // of the magnitudes of a query: no product with a key overflows
constexpr float kLargestFactor = 0x7fff;  // of a query, of a probability, and of a cosine

inline Shorts load(const int16_t* from) {
  Shorts shorts;
  std::memcpy(&shorts, from, sizeof shorts);
  return shorts;
}

inline int16_t rounded(float x) { return int16_t(int32_t(x + (x < 0 ? -0.5f : 0.5f))); }

// Whether the keys of a layer are whole vectors, and turned as a whole.
inline bool fits(const AttentionLayer& layer) {
  const int64_t blocks = layer.head_size / (2 * kShorts);
  return layer.kv_bits == 8 && layer.rope_codes && layer.rotary_dims == layer.head_size && blocks > 0 && blocks <= 16 &&
         layer.head_size == 2 * kShorts * blocks && (blocks & (blocks - 1)) == 0;
}

// The grid of a head's keys, and its queries. A key is middles + scales * (code - 128) / 128 units, and a logit the
// product of a query and a turned key times the query's factor.
struct Rounded {
  Buffer<float> units, factors;
  Buffer<int16_t> scales, middles, queries;  // [size], [size], [heads][size]
  Buffer<Ints> products;

  void reserve(const AttentionLayer& layer) {
    const int64_t size = layer.head_size, heads = layer.query_heads / layer.kv_heads;
    units.reserve(size), scales.reserve(size), middles.reserve(size);
    queries.reserve(heads * size), factors.reserve(heads), products.reserve(heads * kWidth);
  }

  // `grid` holds the offsets and the scales of the keys.
  void round(const AttentionLayer& layer, const float* grid, const float* from, int64_t heads) {
    const int64_t size = layer.head_size, half = size / 2;
    const float *offset = grid, *scale = grid + size;
    const auto largest = [&](int64_t i) {
      return std::max(std::fabs(offset[i]), std::fabs(offset[i] + 255 * scale[i]));
    };
    for (int64_t i = 0; i < half; ++i) {
      const float first = largest(i), second = largest(half + i);
      units[i] = units[half + i] = std::max(std::sqrt(first * first + second * second), 1e-20f) / kLargest;
    }
    for (int64_t i = 0; i < size; ++i) {
      scales[i] = rounded(scale[i] * 128 / units[i]);
      middles[i] = rounded((offset[i] + 128 * scale[i]) / units[i]);
    }
    // A turn multiplies by two cosines in units of 1 / kLargestFactor, but shifts by 15 bits each time.
    const float turns = layer.rope[0] * 0x1p30f / (kLargestFactor * kLargestFactor);
    for (int64_t q = 0; q < heads; ++q, from += size) {
      Floats sums{}, maxima{};
      for (int64_t i = 0; i < size; i += kWidth) {
        const Floats number = simd::load(from + i) * simd::load(units.at(i)), magnitude = number < 0.f ? -number : number;
        sums += magnitude, maxima = magnitude > maxima ? magnitude : maxima;
      }
      const float sum = simd::reduce_add(sums);
      const float maximum = simd::reduce(maxima, [](auto a, auto b) { return a > b ? a : b; });
      const float unit = std::max({sum / kLargestSum, maximum / kLargestFactor, 1e-30f}), inverse = 1 / unit;
      for (int64_t i = 0; i < size; ++i) queries[q * size + i] = rounded(from[i] * units[i] * inverse);
      factors[q] = unit * turns;
    }
  }
};

// What all keys of a head share, where registers have room for it: `heads` is 0 where they have not.
template <int64_t blocks, int64_t heads>
struct Held {
  static constexpr int64_t kCount = heads ? 2 * blocks : 0;
  Shorts scales[kCount + 1], middles[kCount + 1], queries[heads + 1][kCount + 1];

  explicit Held(const Rounded& rounded) {
    for (int64_t i = 0; i < kCount; ++i) {
      scales[i] = load(rounded.scales.at(i * kShorts)), middles[i] = load(rounded.middles.at(i * kShorts));
      for (int64_t q = 0; q < heads; ++q) queries[q][i] = load(rounded.queries.at((q * kCount + i) * kShorts));
    }
  }
};

// Products of the queries with a turned key (see slot_kernels::Rotation): vectors whose elements are still to be
// summed, kWidth vectors apart for a query.
template <int64_t blocks, int64_t fixed_heads>
[[gnu::always_inline]] inline void multiply_key(const uint8_t* codes, const int16_t* coarse, const int16_t* fine,
                                                const Rounded& rounded, const Held<blocks, fixed_heads>& held,
                                                int64_t heads, Ints* products) {
  using simd::multiply_high;
  constexpr int64_t half = blocks * kShorts;
  const auto key = [&](int64_t i) {
    const Shorts scale = fixed_heads ? held.scales[i / kShorts] : load(rounded.scales.at(i));
    const Shorts middle = fixed_heads ? held.middles[i / kShorts] : load(rounded.middles.at(i));
    return multiply_high(simd::load_centered(codes + i), scale) + middle;
  };
  Shorts turned[2 * blocks];
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t i = b * kShorts;
    const Shorts cos1 = load(coarse + i), sin1 = load(coarse + half + i);
    const Shorts cos2 = load(fine + i), sin2 = load(fine + half + i);
    const Shorts cosine = multiply_high(cos1, cos2) - multiply_high(sin1, sin2);
    const Shorts sine = multiply_high(sin1, cos2) + multiply_high(cos1, sin2);
    const Shorts first = key(i), second = key(half + i);
    turned[b] = multiply_high(first, cosine) + multiply_high(second, sine);
    turned[blocks + b] = multiply_high(second, cosine) - multiply_high(first, sine);
  }
  for (int64_t q = 0; q < (fixed_heads ? fixed_heads : heads); ++q) {
    Ints sums{};
    for (int64_t i = 0; i < 2 * blocks; ++i) {
      const Shorts query = fixed_heads ? held.queries[q][i] : load(rounded.queries.at(q * 2 * half + i * kShorts));
      sums = simd::add_products(sums, turned[i], query);
    }
    products[q * kWidth] = sums;
  }
}

// dots[q][slot] = product of a query and a key. Prefetches `values` too, which are read next.
inline void query_key_dots(const AttentionLayer& layer, const uint8_t* keys, const ByteRows& values, int64_t slots,
                           const int32_t* distances, const Rounded& rounded, int64_t heads, float* dots,
                           int64_t stride) {
  const auto of_heads = [&](auto blocks, auto fixed_heads) {
    constexpr int64_t size = 2 * kShorts * decltype(blocks)::value;
    const Held<decltype(blocks)::value, decltype(fixed_heads)::value> held(rounded);
    const int16_t *fine = layer.rope_codes, *coarse = fine + kFineRows * size;
    Ints* products = rounded.products.data();
    for (int64_t first = 0; first < slots; first += kWidth) {
      const int64_t count = std::min(kWidth, slots - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t slot = first + i;
        const uint32_t distance = uint32_t(distances[slot]);
        simd::prefetch(keys + (slot + kPrefetchSlots) * size, size);
        values.prefetch(slot);
        multiply_key(keys + slot * size, coarse + distance / kFineRows * size, fine + distance % kFineRows * size,
                     rounded, held, heads, products + i);
      }
      for (int64_t q = 0; q < heads; ++q) {
        const Ints sums = simd::sums_of_rows(products + q * kWidth);
        const Floats logits = __builtin_convertvector(sums, Floats) * rounded.factors[q];
        float* to = dots + q * stride + first;
        count == kWidth ? simd::store(logits, to) : void(std::memcpy(to, &logits, count * sizeof(float)));
      }
    }
  };
  const auto of_blocks = [&](auto blocks) {
    if constexpr (decltype(blocks)::value == 1 && simd::kRegisters >= 32) {
      if (heads == 3) return of_heads(blocks, std::integral_constant<int64_t, 3>{});
    }
    of_heads(blocks, std::integral_constant<int64_t, 0>{});
  };
  switch (layer.head_size / (2 * kShorts)) {
    case 1: return of_blocks(std::integral_constant<int64_t, 1>{});
    case 2: return of_blocks(std::integral_constant<int64_t, 2>{});
    case 4: return of_blocks(std::integral_constant<int64_t, 4>{});
    case 8: return of_blocks(std::integral_constant<int64_t, 8>{});
    default: return of_blocks(std::integral_constant<int64_t, 16>{});
  }
}

// accum[q][size] += sum over slots of weights[q][slot] * code; the weights, [heads][stride], are not below zero.
template <int64_t max_heads = simd::kRegisters < 32 ? 3 : 4>
void accumulate(const uint8_t* codes, int64_t size, int64_t slots, const float* weights, int64_t stride, int64_t heads,
                float* accum) {
  if constexpr (max_heads > 1) {
    if (heads < max_heads) return accumulate<max_heads - 1>(codes, size, slots, weights, stride, heads, accum);
  }
  if (heads > max_heads) {
    const float* others = weights + max_heads * stride;
    accumulate(codes, size, slots, others, stride, heads - max_heads, accum + max_heads * size);
  }
  int16_t rounded_weights[max_heads][kBlockSlots + 1];
  float units[max_heads];
  for (int64_t q = 0; q < max_heads; ++q) {
    const float largest = std::max(simd::reduce_max(weights + q * stride, slots), 1e-30f);
    units[q] = largest / kLargestFactor;
    const float inverse = kLargestFactor / largest;
    for (int64_t i = 0; i < slots; ++i) rounded_weights[q][i] = rounded(weights[q * stride + i] * inverse);
    rounded_weights[q][slots] = 0;
  }
  for (int64_t i = 0; i < size; i += 4 * kWidth) {
    Ints sums[max_heads][4] = {};
    for (int64_t slot = 0; slot < slots; slot += 2) {
      const uint8_t* first = codes + slot * size + i;
      Shorts pairs[4];
      simd::load_pairs(first, slot + 1 < slots ? first + size : first, pairs);
      for (int64_t q = 0; q < max_heads; ++q) {
        int32_t both;
        std::memcpy(&both, &rounded_weights[q][slot], sizeof both);
        const Shorts factor = Shorts(Ints{} + both);
        for (int64_t k = 0; k < 4; ++k) sums[q][k] = simd::add_products(sums[q][k], pairs[k], factor);
      }
    }
    for (int64_t q = 0; q < max_heads; ++q) {
      float* to = accum + q * size + i;
      for (int64_t k = 0; k < 4; ++k) {
        const Floats x = __builtin_convertvector(sums[q][k], Floats) * units[q];
        for (int64_t j = 0; j < kWidth; j += 4) {
          Four four, columns;
          std::memcpy(&four, to + 4 * j + 4 * k, sizeof four);
          std::memcpy(&columns, reinterpret_cast<const float*>(&x) + j, sizeof columns);
          four += columns;
          std::memcpy(to + 4 * j + 4 * k, &four, sizeof four);
        }
      }
    }
  }
}

}  // namespace fixed_point
