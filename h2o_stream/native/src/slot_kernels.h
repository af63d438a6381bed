// Inner loops of decode attention for every storage format: query-key dot products and probability-weighted value sums.

#pragma once

#include "rope.h"
#include "simd.h"

#include <type_traits>

namespace slot_kernels {

using simd::Floats;
using simd::kWidth;
using simd::load;

// Prefetch distance in slots.
constexpr int64_t kPrefetchSlots = 8;

// Query heads whose accumulators fit into registers.
constexpr int64_t kMaxHeads = 4;

// Keys or values in the model's dtype, starting at slot `first`.
template <class Element>
struct DenseRows {
  const Element* elements;
  int64_t size;

  DenseRows(const uint8_t* bytes, int64_t size, int64_t first)
      : elements(reinterpret_cast<const Element*>(bytes) + first * size), size(size) {}

  const Element* at(int64_t slot) const { return elements + slot * size; }
  Floats load(int64_t slot, int64_t i) const { return simd::load(at(slot) + i); }
  float scalar(int64_t slot, int64_t i) const { return simd::to_float(at(slot)[i]); }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), size * int64_t(sizeof(Element))); }
  bool vectorizable() const { return size % kWidth == 0; }
};

// Quantized rows. A byte packs elements that are size * bits / 8 apart.
template <int64_t bits>
struct QuantizedRows {
  const uint8_t* codes;
  int64_t size, bytes;

  QuantizedRows(const uint8_t* codes, int64_t size, int64_t first)
      : codes(codes + first * (size * bits / 8)), size(size), bytes(size * bits / 8) {}

  const uint8_t* at(int64_t slot) const { return codes + slot * bytes; }
  Floats load(int64_t slot, int64_t i) const {
    if constexpr (bits == 8) return simd::load(at(slot) + i);
    const simd::Ints codes = simd::load_ints(at(slot) + i % bytes) >> int32_t(i / bytes * bits);
    return __builtin_convertvector(codes & ((1 << bits) - 1), Floats);
  }
  float scalar(int64_t slot, int64_t i) const {
    return float(at(slot)[i % bytes] >> (i / bytes * bits) & ((1 << bits) - 1));
  }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), bytes); }
  bool vectorizable() const { return bytes % kWidth == 0; }
};

// Quantized keys with per-channel offsets and scales.
template <int64_t bits>
struct QuantizedKeys : QuantizedRows<bits> {
  const float *offsets, *scales;

  QuantizedKeys(const QuantizedRows<bits>& codes, const float* offsets, const float* scales)
      : QuantizedRows<bits>(codes), offsets(offsets), scales(scales) {}

  Floats load(int64_t slot, int64_t i) const {
    return simd::load(offsets + i) + QuantizedRows<bits>::load(slot, i) * simd::load(scales + i);
  }
  float scalar(int64_t slot, int64_t i) const { return offsets[i] + QuantizedRows<bits>::scalar(slot, i) * scales[i]; }
};

// Calls `work` with the number of bits as a compile-time constant.
template <class Function>
void dispatch_bits(int64_t bits, Function function) {
  switch (bits) {
    case 8: return function(std::integral_constant<int64_t, 8>{});
    case 4: return function(std::integral_constant<int64_t, 4>{});
    default: return function(std::integral_constant<int64_t, 2>{});
  }
}

struct Rotation {
  const float* table;  // null for no rotation
  int64_t rotary_dims;
  const int32_t* distances;  // per slot
};

// Dot products of the queries of a group with a rotated key, held in `blocks` registers per half.
template <int64_t blocks, class Keys, class Put>
void rotated_dots(const Keys& keys, int64_t slot, const float* cos_sin, const float* queries, int64_t heads, Put put) {
  constexpr int64_t half = blocks * kWidth;
  Floats rotated[2 * blocks];
  for (int64_t i = 0; i < blocks; ++i) {
    const Floats x1 = keys.load(slot, i * kWidth), x2 = keys.load(slot, half + i * kWidth);
    const Floats cosine = load(cos_sin + i * kWidth), sine = load(cos_sin + half + i * kWidth);
    rotated[i] = x1 * cosine + x2 * sine;
    rotated[blocks + i] = x2 * cosine - x1 * sine;
  }
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums{};
    for (int64_t i = 0; i < 2 * blocks; ++i) sums += load(queries + q * 2 * half + i * kWidth) * rotated[i];
    put(q, simd::reduce_add(sums));
  }
}

// The same for keys of any size, rotated in memory. Queries are `stride` elements apart and padded with zeros.
template <class Keys, class Put>
void generic_dots(const Keys& keys, int64_t slot, const float* cos_sin, int64_t rotary_dims, float* key,
                  const float* queries, int64_t stride, int64_t heads, Put put) {
  int64_t i = 0;
  if (keys.vectorizable()) {
    for (; i < keys.size; i += kWidth) simd::store(keys.load(slot, i), key + i);
  }
  for (; i < keys.size; ++i) key[i] = keys.scalar(slot, i);
  if (cos_sin) rope::rotate_inverse(cos_sin, rotary_dims, key);
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums{};
    for (int64_t j = 0; j < keys.size; j += kWidth) sums += load(queries + q * stride + j) * load(key + j);
    put(q, simd::reduce_add(sums));
  }
}

// Calls put(slot, query, dot product) for all slots.
template <class Keys, class Put>
void query_key_dots(const Keys& keys, int64_t slots, const Rotation& rotation, float* scratch, const float* queries,
                    int64_t heads, Put put) {
  const int64_t stride = simd::padded(keys.size), size = keys.size, row = rotation.rotary_dims;
  const auto for_each_slot = [&](auto dots) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t prefetched = std::min(slot + kPrefetchSlots, slots - 1);
      keys.prefetch(prefetched);
      const float* cos_sin = nullptr;
      if (rotation.table) {
        cos_sin = rotation.table + rotation.distances[slot] * row;
        simd::prefetch(rotation.table + rotation.distances[prefetched] * row, row * 4);
      }
      dots(slot, cos_sin, [&](int64_t q, float dot) { put(slot, q, dot); });
    }
  };
  const auto in_registers = [&](auto blocks) {
    for_each_slot([&](int64_t slot, const float* cos_sin, auto put_dot) {
      rotated_dots<decltype(blocks)::value>(keys, slot, cos_sin, queries, heads, put_dot);
    });
  };
  if (rotation.table && row == size && keys.vectorizable()) {
    switch (size) {
      case 2 * kWidth: return in_registers(std::integral_constant<int64_t, 1>{});
      case 4 * kWidth: return in_registers(std::integral_constant<int64_t, 2>{});
      case 8 * kWidth: return in_registers(std::integral_constant<int64_t, 4>{});
      case 16 * kWidth: return in_registers(std::integral_constant<int64_t, 8>{});
      default: break;
    }
  }
  for_each_slot([&](int64_t slot, const float* cos_sin, auto put_dot) {
    generic_dots(keys, slot, cos_sin, row, scratch, queries, stride, heads, put_dot);
  });
}

// accum[q][size] += sum over slots of probs[q][slot] * value, for up to max_heads query heads.
template <int64_t max_heads, class Values>
void accumulate_heads(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads,
                      float* accum) {
  if constexpr (max_heads > 1) {
    if (heads < max_heads) return accumulate_heads<max_heads - 1>(values, slots, probs, prob_stride, heads, accum);
  }
  constexpr int64_t wide = 4;
  int64_t i = 0;
  const auto columns = [&](auto registers) {
    constexpr int64_t count = decltype(registers)::value;
    for (; i + count * kWidth <= values.size; i += count * kWidth) {
      Floats sums[max_heads][count] = {};
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t j = 0; j < count; ++j) {
          const Floats value = values.load(slot, i + j * kWidth);
          for (int64_t q = 0; q < max_heads; ++q) sums[q][j] += probs[q * prob_stride + slot] * value;
        }
      }
      for (int64_t q = 0; q < max_heads; ++q) {
        for (int64_t j = 0; j < count; ++j) {
          float* to = accum + q * values.size + i + j * kWidth;
          simd::store(load(to) + sums[q][j], to);
        }
      }
    }
  };
  if (values.vectorizable()) {
    columns(std::integral_constant<int64_t, wide>{});
    columns(std::integral_constant<int64_t, 1>{});
  }
  for (; i < values.size; ++i) {
    for (int64_t q = 0; q < max_heads; ++q) {
      float sum = 0;
      for (int64_t slot = 0; slot < slots; ++slot) sum += probs[q * prob_stride + slot] * values.scalar(slot, i);
      accum[q * values.size + i] += sum;
    }
  }
}

template <class Values>
void accumulate(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads,
                float* accum) {
  for (int64_t q = 0; q < heads; q += kMaxHeads) {
    accumulate_heads<kMaxHeads>(values, slots, probs + q * prob_stride, prob_stride, std::min(kMaxHeads, heads - q),
                                accum + q * values.size);
  }
}

// The sum of products of two arrays.
inline float dot(const float* a, const float* b, int64_t count) {
  Floats sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) sums += load(a + i) * load(b + i);
  float sum = simd::reduce_add(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Replaces logits by exp(logit - top) and returns their sum.
inline float exp_and_sum(float* logits, int64_t count, float top) {
  const float shift = top == simd::kMinusInfinity ? 0 : top;
  Floats sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats exps = simd::exp_nonpositive(load(logits + i) - shift);
    simd::store(exps, logits + i);
    sums += exps;
  }
  if (i < count) {
    float tail[kWidth];
    std::fill_n(tail, kWidth, simd::kMinusInfinity);
    std::copy(logits + i, logits + count, tail);
    const Floats exps = simd::exp_nonpositive(load(tail) - shift);
    simd::store(exps, tail);
    std::copy_n(tail, count - i, logits + i);
    sums += exps;
  }
  return simd::reduce_add(sums);
}

}  // namespace slot_kernels
