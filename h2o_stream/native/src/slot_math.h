// A query's products with the keys of some slots, and the values of some slots by its probabilities: the inner loops of
// the attention of one token, whatever keys and values are held in.

#pragma once

#include "rope.h"
#include "simd.h"

#include <type_traits>

namespace slot_math {

using simd::Floats;
using simd::kWidth;
using simd::load;

// Slots that are read ahead.
constexpr int64_t kAhead = 8;

// Query heads whose sums fit into registers at once.
constexpr int64_t kTogether = 4;

// Keys or values in the dtype of the model, from slot `first` on.
template <class Number>
struct Exact {
  const Number* numbers;
  int64_t size;

  Exact(const uint8_t* bytes, int64_t size, int64_t first)
      : numbers(reinterpret_cast<const Number*>(bytes) + first * size), size(size) {}

  const Number* at(int64_t slot) const { return numbers + slot * size; }
  Floats load(int64_t slot, int64_t i) const { return simd::load(at(slot) + i); }
  float one(int64_t slot, int64_t i) const { return simd::to_float(at(slot)[i]); }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), size * int64_t(sizeof(Number))); }
  bool whole() const { return size % kWidth == 0; }
};

// Codes of a few bits. A byte holds numbers that lie size * bits / 8 apart.
template <int64_t bits>
struct Codes {
  const uint8_t* codes;
  int64_t size, bytes;

  Codes(const uint8_t* codes, int64_t size, int64_t first)
      : codes(codes + first * (size * bits / 8)), size(size), bytes(size * bits / 8) {}

  const uint8_t* at(int64_t slot) const { return codes + slot * bytes; }
  Floats load(int64_t slot, int64_t i) const {
    if constexpr (bits == 8) return simd::load(at(slot) + i);
    using Bytes = uint8_t __attribute__((vector_size(kWidth)));
    Bytes some;
    std::memcpy(&some, at(slot) + i % bytes, sizeof some);
    const auto wide = __builtin_convertvector(some, simd::Ints) >> int32_t(i / bytes * bits);
    return __builtin_convertvector(wide & ((1 << bits) - 1), Floats);
  }
  float one(int64_t slot, int64_t i) const {
    return float(at(slot)[i % bytes] >> (i / bytes * bits) & ((1 << bits) - 1));
  }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), bytes); }
  bool whole() const { return bytes % kWidth == 0; }
};

// Codes of keys, on the grids of their channels.
template <int64_t bits>
struct KeyCodes : Codes<bits> {
  const float *offsets, *steps;

  KeyCodes(const Codes<bits>& codes, const float* offsets, const float* steps)
      : Codes<bits>(codes), offsets(offsets), steps(steps) {}

  Floats load(int64_t slot, int64_t i) const {
    return simd::load(offsets + i) + Codes<bits>::load(slot, i) * simd::load(steps + i);
  }
  float one(int64_t slot, int64_t i) const { return offsets[i] + Codes<bits>::one(slot, i) * steps[i]; }
};

// Calls `work` with the number of bits, known to the compiler.
template <class Work>
void with_bits(int64_t bits, Work work) {
  switch (bits) {
    case 8: return work(std::integral_constant<int64_t, 8>{});
    case 4: return work(std::integral_constant<int64_t, 4>{});
    default: return work(std::integral_constant<int64_t, 2>{});
  }
}

struct Rotation {
  const float* table;  // null for none
  int64_t rotary;
  const int32_t* distances;  // of the slots from the first one on
};

// The products of a rotated key, `blocks` registers to each half, with the queries of a group.
template <int64_t blocks, class Keys, class Put>
void rotated_products(const Keys& keys, int64_t slot, const float* turn, const float* queries, int64_t heads, Put put) {
  constexpr int64_t half = blocks * kWidth;
  Floats pieces[2 * blocks];
  for (int64_t i = 0; i < blocks; ++i) {
    const Floats one = keys.load(slot, i * kWidth), other = keys.load(slot, half + i * kWidth);
    const Floats cosine = load(turn + i * kWidth), sine = load(turn + half + i * kWidth);
    pieces[i] = one * cosine + other * sine;
    pieces[blocks + i] = other * cosine - one * sine;
  }
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums{};
    for (int64_t i = 0; i < 2 * blocks; ++i) sums += load(queries + q * 2 * half + i * kWidth) * pieces[i];
    put(q, simd::total(sums));
  }
}

// The same for a key of any size, rotated in memory; `stride` numbers lie between two queries, zeros behind each.
template <class Keys, class Put>
void any_products(const Keys& keys, int64_t slot, const float* turn, int64_t rotary, float* key, const float* queries,
                  int64_t stride, int64_t heads, Put put) {
  int64_t i = 0;
  if (keys.whole()) {
    for (; i < keys.size; i += kWidth) simd::store(keys.load(slot, i), key + i);
  }
  for (; i < keys.size; ++i) key[i] = keys.one(slot, i);
  if (turn) rope::rotate_back(turn, rotary, key);
  for (int64_t q = 0; q < heads; ++q) {
    Floats sums{};
    for (int64_t j = 0; j < keys.size; j += kWidth) sums += load(queries + q * stride + j) * load(key + j);
    put(q, simd::total(sums));
  }
}

// Calls put(slot, query, product) for all slots, counted from the first.
template <class Keys, class Put>
void products(const Keys& keys, int64_t slots, const Rotation& rotation, float* scratch, const float* queries,
              int64_t heads, Put put) {
  const int64_t stride = simd::padded(keys.size), size = keys.size, row = rotation.rotary;
  const auto each = [&](auto multiply) {
    for (int64_t slot = 0; slot < slots; ++slot) {
      const int64_t later = std::min(slot + kAhead, slots - 1);
      keys.prefetch(later);
      const float* turn = nullptr;
      if (rotation.table) {
        turn = rotation.table + rotation.distances[slot] * row;
        simd::prefetch(rotation.table + rotation.distances[later] * row, row * 4);
      }
      multiply(slot, turn, [&](int64_t q, float product) { put(slot, q, product); });
    }
  };
  const auto in_registers = [&](auto blocks) {
    each([&](int64_t slot, const float* turn, auto put_one) {
      rotated_products<decltype(blocks)::value>(keys, slot, turn, queries, heads, put_one);
    });
  };
  if (rotation.table && row == size && keys.whole()) {
    switch (size) {
      case 2 * kWidth: return in_registers(std::integral_constant<int64_t, 1>{});
      case 4 * kWidth: return in_registers(std::integral_constant<int64_t, 2>{});
      case 8 * kWidth: return in_registers(std::integral_constant<int64_t, 4>{});
      case 16 * kWidth: return in_registers(std::integral_constant<int64_t, 8>{});
      default: break;
    }
  }
  each([&](int64_t slot, const float* turn, auto put_one) {
    any_products(keys, slot, turn, row, scratch, queries, stride, heads, put_one);
  });
}

// mixed[q][size] += sum over slots of probs[q][slot] * value, for `heads` <= most query heads.
template <int64_t most, class Values>
void mix_some(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads,
              float* mixed) {
  if constexpr (most > 1) {
    if (heads < most) return mix_some<most - 1>(values, slots, probs, prob_stride, heads, mixed);
  }
  constexpr int64_t wide = 4;
  int64_t i = 0;
  const auto columns = [&](auto registers) {
    constexpr int64_t count = decltype(registers)::value;
    for (; i + count * kWidth <= values.size; i += count * kWidth) {
      Floats sums[most][count] = {};
      for (int64_t slot = 0; slot < slots; ++slot) {
        for (int64_t j = 0; j < count; ++j) {
          const Floats some = values.load(slot, i + j * kWidth);
          for (int64_t q = 0; q < most; ++q) sums[q][j] += probs[q * prob_stride + slot] * some;
        }
      }
      for (int64_t q = 0; q < most; ++q) {
        for (int64_t j = 0; j < count; ++j) {
          float* to = mixed + q * values.size + i + j * kWidth;
          simd::store(load(to) + sums[q][j], to);
        }
      }
    }
  };
  if (values.whole()) {
    columns(std::integral_constant<int64_t, wide>{});
    columns(std::integral_constant<int64_t, 1>{});
  }
  for (; i < values.size; ++i) {
    for (int64_t q = 0; q < most; ++q) {
      float sum = 0;
      for (int64_t slot = 0; slot < slots; ++slot) sum += probs[q * prob_stride + slot] * values.one(slot, i);
      mixed[q * values.size + i] += sum;
    }
  }
}

template <class Values>
void mix(const Values& values, int64_t slots, const float* probs, int64_t prob_stride, int64_t heads, float* mixed) {
  for (int64_t q = 0; q < heads; q += kTogether) {
    mix_some<kTogether>(values, slots, probs + q * prob_stride, prob_stride, std::min(kTogether, heads - q),
                        mixed + q * values.size);
  }
}

// Leaves exponentials, and gives their sum.
inline float exponentials(float* logits, int64_t count, float top) {
  const float least = top == simd::kMinusInfinity ? 0 : top;
  Floats sums{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats powers = simd::exp_nonpositive(load(logits + i) - least);
    simd::store(powers, logits + i);
    sums += powers;
  }
  if (i < count) {
    float rest[kWidth];
    std::fill_n(rest, kWidth, simd::kMinusInfinity);
    std::copy(logits + i, logits + count, rest);
    const Floats powers = simd::exp_nonpositive(load(rest) - least);
    simd::store(powers, rest);
    std::copy_n(rest, count - i, logits + i);
    sums += powers;
  }
  return simd::total(sums);
}

}  // namespace slot_math
