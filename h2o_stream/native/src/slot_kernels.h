// Inner loops of decode attention for every storage format: query-key dot products and probability-weighted value sums.

#pragma once

#include "rope.h"
#include "simd.h"
#include "simd_functions.h"
#include "store.h"

#include <type_traits>

namespace slot_kernels {

using simd::Floats;
using simd::kWidth;
using simd::load;

// Prefetch distance in slots.
constexpr int64_t kPrefetchSlots = 24;

// Slots per block of decode attention.
constexpr int64_t kBlockSlots = 64;

// Query heads whose accumulators fit into registers.
constexpr int64_t kMaxHeads = 4;

// Keys or values in the model's dtype, starting at slot `first`.
template <class Element>
struct DenseRows {
  static constexpr bool kAnySize = true;  // rows may end with a part of a vector
  static constexpr int64_t kFixedSize = 0;

  const Element* elements;
  int64_t row_size;

  DenseRows(const uint8_t* bytes, int64_t size, int64_t first)
      : elements(reinterpret_cast<const Element*>(bytes) + first * size), row_size(size) {}

  DenseRows(const Element* elements, int64_t size) : elements(elements), row_size(size) {}

  int64_t size() const { return row_size; }
  const Element* at(int64_t slot) const { return elements + slot * row_size; }
  Floats load(int64_t slot, int64_t i) const { return simd::load(at(slot) + i); }
  float scalar(int64_t slot, int64_t i) const { return simd::to_float(at(slot)[i]); }
  void read(int64_t slot, float* row) const {
    for (int64_t i = 0; i < row_size; ++i) row[i] = scalar(slot, i);
  }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), row_size * int64_t(sizeof(Element))); }
  bool vectorizable() const { return row_size % kWidth == 0; }
};

// A vector of bytes, as words: bits that a shift carries from byte to byte are masked.
using Codes = uint32_t __attribute__((vector_size(kWidth)));

inline Codes load_codes(const uint8_t* from) {
  Codes codes;
  std::memcpy(&codes, from, sizeof codes);
  return codes;
}

inline Codes every_byte(uint32_t byte) { return Codes{} + byte * 0x01010101u; }

// Unpacked bytes as floats. They are unpacked before, when they are a quarter as wide.
inline Floats widened(Codes codes) { return simd::to_floats(simd::Bytes(codes)); }

// Quantized rows of `fixed_size` elements, or of any number if that is 0. See store.h for the planes of a row.
template <int64_t bits, int64_t fixed_size>
struct QuantizedRows {
  static constexpr int64_t kBits = bits;
  static constexpr bool kAnySize = false;
  static constexpr int64_t kFixedSize = fixed_size;

  const uint8_t* codes;
  int64_t row_size;

  QuantizedRows(const uint8_t* codes, int64_t size, int64_t first)
      : codes(codes + first * (size * bits / 8)), row_size(size) {}

  int64_t size() const { return fixed_size ? fixed_size : row_size; }
  const uint8_t* at(int64_t slot) const { return codes + slot * (size() * bits / 8); }
  Floats load(int64_t slot, int64_t i) const {
    if constexpr (bits == 8) return simd::load(at(slot) + i);
    if constexpr (bits == 6) return widened(plane<4>(at(slot), i) | upper_two(slot, i));
    return widened(plane<bits>(at(slot), i));
  }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), size() * bits / 8); }
  bool vectorizable() const { return size() * (bits == 6 ? 2 : bits) / 8 % kWidth == 0; }

 private:
  template <int64_t width>
  Codes plane(const uint8_t* from, int64_t i) const {
    const int64_t bytes = size() * width / 8;
    return load_codes(from + i % bytes) >> uint32_t(i / bytes * width) & every_byte((1 << width) - 1);
  }

  // The upper two of 6 bits, in their place.
  Codes upper_two(int64_t slot, int64_t i) const {
    const int64_t bytes = size() / 4, shift = i / bytes * 2 - 4;
    const Codes packed = load_codes(at(slot) + size() / 2 + i % bytes);
    return (shift < 0 ? packed << uint32_t(-shift) : packed >> uint32_t(shift)) & every_byte(0x30);
  }
};

// Rows of bytes, which are prefetched only.
struct ByteRows {
  const uint8_t* bytes;
  int64_t row_size;

  ByteRows(const uint8_t* bytes, int64_t size, int64_t first) : bytes(bytes + first * size), row_size(size) {}

  void prefetch(int64_t slot) const { simd::prefetch(bytes + slot * row_size, row_size); }
};

// Quantized keys with per-channel offsets and scales.
template <class Rows>
struct QuantizedKeys : Rows {
  const float *offsets, *scales;

  QuantizedKeys(const Rows& codes, const float* offsets, const float* scales)
      : Rows(codes), offsets(offsets), scales(scales) {}

  Floats load(int64_t slot, int64_t i) const {
    return simd::load(offsets + i) + Rows::load(slot, i) * simd::load(scales + i);
  }
  void read(int64_t slot, float* row) const {
    store::dequantize(Rows::at(slot), Rows::size(), Rows::kBits, {offsets, scales, 1}, row);
  }
};

// Calls function(rows) with the quantized rows of a head, the number of bits known to the compiler, and common sizes if
// `common_size`.
template <class Function>
void with_rows(int64_t bits, const uint8_t* codes, int64_t size, int64_t first, bool common_size, Function function) {
  const auto of_size = [&](auto bits) {
    if (common_size && size == 64) return function(QuantizedRows<bits, 64>(codes, size, first));
    if (common_size && size == 128) return function(QuantizedRows<bits, 128>(codes, size, first));
    function(QuantizedRows<bits, 0>(codes, size, first));
  };
  switch (bits) {
    case 8: return of_size(std::integral_constant<int64_t, 8>{});
    case 6: return of_size(std::integral_constant<int64_t, 6>{});
    case 4: return of_size(std::integral_constant<int64_t, 4>{});
    default: return of_size(std::integral_constant<int64_t, 2>{});
  }
}

// The rotations of keys by their distances from the newest token. A rotation is composed of one by a multiple of
// kFineRows and one by the rest, whose rows stay in a cache close to the processor; all rows together do not.
struct Rotation {
  const float* table;  // [distances][rotary_dims]: cosines, then sines; null for no rotation
  int64_t rotary_dims;
  const int32_t* distances;  // per slot

  const float* row(int64_t slot) const { return table + distances[slot] * rotary_dims; }
  const float* coarse(int64_t slot) const {
    return table + distances[slot] / kFineRows * kFineRows * rotary_dims;
  }
  const float* fine(int64_t slot) const { return table + distances[slot] % kFineRows * rotary_dims; }
  float scale() const { return table[0]; }  // of every row, so that a composed rotation has its square
};

// Products of the queries of a group with `count` rotated keys in a row, which are held in `blocks` registers per half:
// vectors whose elements are still to be summed, kWidth vectors apart for a query, next to each other for a key.
template <int64_t blocks, int64_t count, class Keys>
[[gnu::always_inline]] inline void rotated_products(const Keys& keys, int64_t slot, const Rotation& rotation,
                                                    const float* queries, int64_t heads, Floats* products) {
  constexpr int64_t half = blocks * kWidth;
  Floats rotated[count][2 * blocks];
  for (int64_t k = 0; k < count; ++k) {
    const float *coarse = rotation.coarse(slot + k), *fine = rotation.fine(slot + k);
    for (int64_t i = 0; i < blocks; ++i) {
      const Floats x1 = keys.load(slot + k, i * kWidth), x2 = keys.load(slot + k, half + i * kWidth);
      const Floats cos1 = load(coarse + i * kWidth), sin1 = load(coarse + half + i * kWidth);
      const Floats cos2 = load(fine + i * kWidth), sin2 = load(fine + half + i * kWidth);
      const Floats cosine = cos1 * cos2 - sin1 * sin2, sine = sin1 * cos2 + cos1 * sin2;
      rotated[k][i] = x1 * cosine + x2 * sine;
      rotated[k][blocks + i] = x2 * cosine - x1 * sine;
    }
  }
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums[count] = {};
    for (int64_t i = 0; i < 2 * blocks; ++i) {
      const Floats query = load(queries + q * 2 * half + i * kWidth);
      for (int64_t k = 0; k < count; ++k) sums[k] += query * rotated[k][i];
    }
    for (int64_t k = 0; k < count; ++k) products[q * kWidth + k] = sums[k];
  }
}

// The same for keys of any size, rotated in memory. Queries are padded with zeros.
template <class Keys>
void generic_products(const Keys& keys, int64_t slot, const Rotation& rotation, float* key, const float* queries,
                      int64_t heads, Floats* products) {
  const int64_t size = keys.size(), stride = simd::padded(size);
  keys.read(slot, key);
  if (rotation.table) rope::rotate_inverse(rotation.row(slot), rotation.rotary_dims, key);
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums{};
    for (int64_t j = 0; j < size; j += kWidth) sums += load(queries + q * stride + j) * load(key + j);
    products[q * kWidth] = sums;
  }
}

// dots[q][slot] = product of a query and a key; keys of a fixed size are rotated as a whole. Prefetches `values` too,
// which are read next.
template <class Keys, class Values>
void query_key_dots(const Keys& keys, const Values& values, int64_t slots, const Rotation& rotation, float* scratch,
                    Floats* products, const float* queries, int64_t heads, float* dots, int64_t stride) {
  constexpr std::integral_constant<int64_t, 1> kOne;
  // multiply(number, slot, products) takes `together` slots, or one.
  const auto for_each_slot = [&](float scale, auto together, auto multiply) {
    constexpr int64_t most = decltype(together)::value;
    for (int64_t first = 0; first < slots; first += kWidth) {
      const int64_t count = std::min(kWidth, slots - first);
      for (int64_t i = 0; i < count; ++i) {
        keys.prefetch(first + i + kPrefetchSlots);
        values.prefetch(first + i);
        if (i % most == 0 && i + most <= count) multiply(together, first + i, products + i);
        if (i >= count / most * most) multiply(kOne, first + i, products + i);
      }
      for (int64_t q = 0; q < heads; ++q) {
        const Floats sums = simd::sums_of_rows(products + q * kWidth) * scale;
        if (count == kWidth) {
          simd::store(sums, dots + q * stride + first);
        } else {
          std::memcpy(dots + q * stride + first, &sums, count * sizeof(float));
        }
      }
    }
  };
  const auto in_registers = [&](auto blocks) {
    // Quantized keys of these sizes have rows of a fixed size.
    constexpr int64_t elements = 2 * kWidth * decltype(blocks)::value;
    if constexpr (!Keys::kAnySize && !Keys::kFixedSize && (elements == 64 || elements == 128)) return;
    constexpr int64_t size = decltype(blocks)::value, fitting = simd::kRegisters / 2 / (2 * size);
    const std::integral_constant<int64_t, fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1> together;
    for_each_slot(1 / rotation.scale(), together, [&](auto count, int64_t slot, Floats* to) {
      rotated_products<size, decltype(count)::value>(keys, slot, rotation, queries, heads, to);
    });
  };
  if constexpr (Keys::kFixedSize) {
    in_registers(std::integral_constant<int64_t, Keys::kFixedSize / (2 * kWidth)>{});
  } else {
    if (rotation.table && rotation.rotary_dims == keys.size() && keys.vectorizable()) {
      switch (keys.size()) {
        case 2 * kWidth: return in_registers(std::integral_constant<int64_t, 1>{});
        case 4 * kWidth: return in_registers(std::integral_constant<int64_t, 2>{});
        case 8 * kWidth: return in_registers(std::integral_constant<int64_t, 4>{});
        case 16 * kWidth: return in_registers(std::integral_constant<int64_t, 8>{});
        case 32 * kWidth: return in_registers(std::integral_constant<int64_t, 16>{});
        default: break;
      }
    }
    for_each_slot(1, kOne, [&](auto, int64_t slot, Floats* to) {
      generic_products(keys, slot, rotation, scratch, queries, heads, to);
    });
  }
}

// accum[q][size] += sum over slots of probs[q][slot] * value, for up to max_heads query heads.
template <int64_t max_heads, class Values>
void accumulate_heads(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads,
                      float* accum) {
  if constexpr (max_heads > 1) {
    if (heads < max_heads) return accumulate_heads<max_heads - 1>(values, slots, probs, prob_stride, heads, accum);
  }
  constexpr int64_t wide = 4 * max_heads < simd::kRegisters ? 4 : 2;
  int64_t i = 0;
  const auto columns = [&](auto registers) {
    constexpr int64_t count = decltype(registers)::value;
    for (; i + count * kWidth <= values.size(); i += count * kWidth) {
      Floats sums[max_heads][count] = {};
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t j = 0; j < count; ++j) {
          const Floats value = values.load(slot, i + j * kWidth);
          for (int64_t q = 0; q < max_heads; ++q) sums[q][j] += probs[q * prob_stride + slot] * value;
        }
      }
      for (int64_t q = 0; q < max_heads; ++q) {
        for (int64_t j = 0; j < count; ++j) {
          float* to = accum + q * values.size() + i + j * kWidth;
          simd::store(load(to) + sums[q][j], to);
        }
      }
    }
  };
  columns(std::integral_constant<int64_t, wide>{});
  columns(std::integral_constant<int64_t, 1>{});
  if constexpr (Values::kAnySize) {
    for (; i < values.size(); ++i) {
      for (int64_t q = 0; q < max_heads; ++q) {
        float sum = 0;
        for (int64_t slot = 0; slot < slots; ++slot) sum += probs[q * prob_stride + slot] * values.scalar(slot, i);
        accum[q * values.size() + i] += sum;
      }
    }
  }
}

template <class Values>
void accumulate(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads,
                float* accum) {
  for (int64_t q = 0; q < heads; q += kMaxHeads) {
    accumulate_heads<kMaxHeads>(values, slots, probs + q * prob_stride, prob_stride, std::min(kMaxHeads, heads - q),
                                accum + q * values.size());
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
