// Storage of the keys and values of one head: in the model's dtype, or quantized except for sinks and newest tokens.
//
// The C++ counterpart of h2o_stream/cache/store.py and quantize.py: value = offset + code * scale. Keys are quantized
// per channel, with parameters that cover every key the head has cached so far. Values are quantized per token.

#pragma once

#include "abi.h"
#include "simd.h"
#include "simd_functions.h"

#include <type_traits>

namespace store {

// Number is float or a vector of floats.
template <class Number>
struct Params {
  Number offset, scale;
};

using QuantParams = Params<float>;

// Parameters for a range. With four levels clipping outliers reduces the error: `coverage` is the share of the range
// that is kept.
template <class Number>
Params<Number> range_params(Number low, Number high, int64_t bits, float coverage) {
  const Number half = (high - low) / 2 * coverage, middle = (low + high) / 2, zero{};
  return {low <= high ? middle - half : zero, low <= high ? half * 2 / float((1 << bits) - 1) : zero};
}

// Calls work(true_type, i) for each whole vector of `count` elements, and work(false_type, i) for each one that is
// left.
template <class Work>
[[gnu::always_inline]] inline void for_each_vector(int64_t count, Work work) {
  const int64_t whole = count / simd::kWidth * simd::kWidth;
  for (int64_t i = 0; i < whole; i += simd::kWidth) work(std::true_type{}, i);
  for (int64_t i = 0; i < count % simd::kWidth; ++i) work(std::false_type{}, whole + i);
}

// Quantization parameters of the key channels.
inline void key_params(const float* key_range, int64_t size, int64_t bits, float* offsets, float* scales) {
  const float coverage = bits == 2 ? 0.57f : 1.f;
  for_each_vector(size, [&](auto is_vector, int64_t i) {
    if constexpr (is_vector) {
      const auto params = range_params(simd::load(key_range + i), simd::load(key_range + size + i), bits, coverage);
      simd::store(params.offset, offsets + i), simd::store(params.scale, scales + i);
    } else {
      const QuantParams params = range_params(key_range[i], key_range[size + i], bits, coverage);
      offsets[i] = params.offset, scales[i] = params.scale;
    }
  });
}

// Rounds to the nearest code in [0, max_code], ties to even.
template <class Number>
Number nearest_code(Number x, Number offset, Number scale, Number max_code) {
  const Number zero{}, smallest = zero + std::numeric_limits<float>::min();
  const Number magic = zero + 12582912.f;  // adding 1.5 * 2^23 rounds to an integer
  Number code = (x - offset) / (scale < smallest ? smallest : scale);
  code = code < zero ? zero : code;
  return ((max_code < code ? max_code : code) + magic) - magic;
}

// Parameters per element, or shared by all.
struct ParamArray {
  const float *offsets, *scales;
  int64_t stride;  // 1 or 0

  float offset(int64_t i) const { return offsets[i * stride]; }
  float scale(int64_t i) const { return scales[i * stride]; }
  simd::Floats vector_offset(int64_t i) const { return stride ? simd::load(offsets + i) : simd::splat(*offsets); }
  simd::Floats vector_scale(int64_t i) const { return stride ? simd::load(scales + i) : simd::splat(*scales); }
};

// A row of codes is one plane, or for 6 bits two: the lower four bits of all codes, then the upper two. A byte of a
// plane packs elements that are size * width / 8 apart.
constexpr int64_t lower_bits(int64_t bits) { return bits == 6 ? 4 : bits; }

// Calls work(width, shift, plane) for each plane of a row: its bits per code, and which bits of a code they are.
template <class Byte, class Work>
void for_each_plane(Byte* row, int64_t size, int64_t bits, Work work) {
  const int64_t lower = lower_bits(bits);
  work(int32_t(lower), int32_t(0), row);
  if (lower < bits) work(int32_t(bits - lower), int32_t(lower), row + size * lower / 8);
}

inline void quantize(const float* x, int64_t size, int64_t bits, ParamArray params, uint8_t* codes) {
  const float max_code = float((1 << bits) - 1);
  for_each_plane(codes, size, bits, [&](int32_t width, int32_t shift, uint8_t* plane) {
    const int64_t bytes = size * width / 8;
    const int32_t mask = (1 << width) - 1;
    for (int32_t part = 0; part < 8 / width; ++part) {
      const int64_t first = part * bytes;
      for_each_vector(bytes, [&](auto is_vector, int64_t i) {
        const int64_t at = first + i;
        if constexpr (is_vector) {
          const simd::Floats nearest = nearest_code(simd::load(x + at), params.vector_offset(at),
                                                    params.vector_scale(at), simd::splat(max_code));
          const simd::Ints code = __builtin_convertvector(nearest, simd::Ints);
          const simd::Ints packed = (code >> shift & mask) << part * width;
          simd::store_bytes(part ? packed | simd::load_ints(plane + i) : packed, plane + i);
        } else {
          const int32_t code = int32_t(nearest_code(x[at], params.offset(at), params.scale(at), max_code));
          const int32_t packed = (code >> shift & mask) << part * width;
          plane[i] = uint8_t(part ? packed | plane[i] : packed);
        }
      });
    }
  });
}

inline void dequantize(const uint8_t* codes, int64_t size, int64_t bits, ParamArray params, float* x) {
  for_each_plane(codes, size, bits, [&](int32_t width, int32_t shift, const uint8_t* plane) {
    const int64_t bytes = size * width / 8;
    const int32_t mask = (1 << width) - 1;
    const float weight = float(1 << shift);
    for (int32_t part = 0; part < 8 / width; ++part) {
      float* part_values = x + part * bytes;
      for_each_vector(bytes, [&](auto is_vector, int64_t i) {
        if constexpr (is_vector) {
          const simd::Ints code = simd::load_ints(plane + i) >> part * width & mask;
          const simd::Floats value = __builtin_convertvector(code, simd::Floats) * weight;
          simd::store(shift ? simd::load(part_values + i) + value : value, part_values + i);
        } else {
          const float value = float(int32_t(plane[i]) >> part * width & mask) * weight;
          part_values[i] = shift ? part_values[i] + value : value;
        }
      });
    }
  });
  for (int64_t i = 0; i < size; ++i) x[i] = params.offset(i) + x[i] * params.scale(i);
}

// Parts of a key range: by which it is widened beyond a key that lies outside, and by which one may lie outside; see
// quantized_store.py.
constexpr float kMargin = 0.1f, kSlack = 0x1p-16f;

// Parameters with the least squared error among several coverages of the range.
inline QuantParams best_params(const float* x, int64_t size, int64_t bits) {
  constexpr float kCoverages[] = {1.f, 0.9f, 0.8f, 0.7f, 0.6f, 0.5f, 0.4f};
  const float low = simd::reduce_min(x, size), high = simd::reduce_max(x, size);
  QuantParams best = range_params(low, high, bits, 1.f);
  if (bits > 4) return best;
  const float max_code = float((1 << bits) - 1);
  float best_error = std::numeric_limits<float>::infinity();
  for (const float coverage : kCoverages) {
    const QuantParams params = range_params(low, high, bits, coverage);
    float sums[16] = {}, squared_error = 0;
    for (int64_t i = 0; i < size; ++i) {
      const float error =
          nearest_code(x[i], params.offset, params.scale, max_code) * params.scale + params.offset - x[i];
      sums[i % 16] += error * error;
    }
    for (const float sum : sums) squared_error += sum;
    if (squared_error < best_error) best = params, best_error = squared_error;
  }
  return best;
}

// The slot of a new token in a quantized store: sinks have fixed slots, newer tokens share a ring buffer.
inline int64_t exact_slot(const AttentionLayer& layer, int64_t index) {
  if (index < layer.exact_sinks) return index;
  return layer.exact_sinks + (index - layer.exact_sinks) % layer.residual;
}

// Reads `count` elements of a bfloat16 or float32 array, starting at `first`.
inline void read(const void* array, bool is_bfloat16, int64_t first, int64_t count, float* x) {
  if (is_bfloat16) {
    const auto* from = static_cast<const simd::BFloat16*>(array) + first;
    for (int64_t i = 0; i < count; ++i) x[i] = simd::to_float(from[i]);
  } else {
    std::memcpy(x, static_cast<const float*>(array) + first, count * sizeof(float));
  }
}

inline void write(const float* x, bool is_bfloat16, int64_t first, int64_t count, void* array) {
  if (is_bfloat16) {
    auto* to = static_cast<simd::BFloat16*>(array) + first;
    for (int64_t i = 0; i < count; ++i) simd::from_float(x[i], to[i]);
  } else {
    std::memcpy(static_cast<float*>(array) + first, x, count * sizeof(float));
  }
}

// The keys and values of one head. Slots below `exact` are in the model's dtype, the others are quantized.
class HeadStore {
 public:
  HeadStore() = default;

  // `head` is the index within the group.
  HeadStore(const AttentionLayer& layer, const Slots& slots, int64_t head)
      : key_size(layer.head_size), value_size(layer.value_size), bits(layer.kv_bits), in_bfloat16(layer.in_bfloat16) {
    exact = bits == 16 ? slots.slot_count : layer.exact_sinks + layer.residual;
    const int64_t bytes = in_bfloat16 ? 2 : 4;
    keys = static_cast<uint8_t*>(slots.keys) + head * exact * key_size * bytes;
    values = static_cast<uint8_t*>(slots.values) + head * exact * value_size * bytes;
    if (bits == 16) return;
    const int64_t quantized_slots = slots.slot_count - exact;
    key_codes = slots.key_codes + head * quantized_slots * (key_size * bits / 8);
    value_codes = slots.value_codes + head * quantized_slots * (value_size * bits / 8);
    key_range = slots.key_range + head * 2 * key_size;
    value_grid = reinterpret_cast<simd::Half*>(slots.value_grid) + head * quantized_slots * 2;
  }

  // `offsets` and `scales` are the key parameters, used for quantized slots.
  void read_key(int64_t slot, const float* offsets, const float* scales, float* key) const {
    if (slot < exact) return read(keys, in_bfloat16, slot * key_size, key_size, key);
    dequantize(key_codes_of(slot), key_size, bits, {offsets, scales, 1}, key);
  }

  void read_value(int64_t slot, float* value) const {
    if (slot < exact) return read(values, in_bfloat16, slot * value_size, value_size, value);
    const simd::Half* params = value_grid + (slot - exact) * 2;
    const float offset = simd::to_float(params[0]), scale = simd::to_float(params[1]);
    dequantize(value_codes_of(slot), value_size, bits, {&offset, &scale, 0}, value);
  }

  // Writes a token to an exact slot.
  void write(int64_t slot, const float* key, const float* value) const {
    store::write(key, in_bfloat16, slot * key_size, key_size, keys);
    store::write(value, in_bfloat16, slot * value_size, value_size, values);
  }

  // Calls `visit(memory, bytes)` for all that changes when a token is written to an exact slot; with few bits another
  // one goes to the quantized slot `free`. Keys that are quantized anew are not among it.
  template <class Visit>
  void for_each_change(int64_t slot, int64_t free, Visit visit) const {
    const int64_t width = in_bfloat16 ? 2 : 4;
    visit(keys + slot * key_size * width, key_size * width);
    visit(values + slot * value_size * width, value_size * width);
    if (bits == 16) return;
    visit(key_codes_of(free), key_size * bits / 8);
    visit(key_range, 2 * key_size * int64_t(sizeof *key_range));
    visit(value_codes_of(free), value_size * bits / 8);
    visit(value_grid + (free - exact) * 2, 2 * int64_t(sizeof *value_grid));
  }

  // Writes a token to a quantized slot.
  void write_quantized(int64_t slot, const float* offsets, const float* scales, const float* key,
                       const float* value) const {
    quantize(key, key_size, bits, {offsets, scales, 1}, key_codes_of(slot));
    simd::Half* stored = value_grid + (slot - exact) * 2;
    const QuantParams params = best_params(value, value_size, bits);
    simd::from_float(params.offset, stored[0]);
    simd::from_float(params.scale, stored[1]);
    const float offset = simd::to_float(stored[0]), scale = simd::to_float(stored[1]);
    quantize(value, value_size, bits, {&offset, &scale, 0}, value_codes_of(slot));
  }

  // Widens the key ranges to include all keys between `low` and `high`, and a margin; returns whether they changed.
  bool extend_range(const float* low, const float* high) const {
    float *stored_low = key_range, *stored_high = key_range + key_size;
    const auto below = [&](int64_t i) {
      return !(low[i] >= stored_low[i] - (stored_high[i] - stored_low[i]) * kSlack);  // also if it is NaN
    };
    const auto above = [&](int64_t i) {
      return !(high[i] <= stored_high[i] + (stored_high[i] - stored_low[i]) * kSlack);
    };
    int32_t outside = 0;
    for (int64_t i = 0; i < key_size; ++i) outside += below(i) | above(i);
    if (!outside) return false;
    for (int64_t i = 0; i < key_size; ++i) {
      const float margin = (std::max(stored_high[i], high[i]) - std::min(stored_low[i], low[i])) * kMargin;
      const bool widen_low = below(i), widen_high = above(i);
      if (widen_low) stored_low[i] = low[i] - margin;
      if (widen_high) stored_high[i] = high[i] + margin;
    }
    return true;
  }

  // Requantizes the key of a slot with new parameters; `key` is scratch.
  void requantize_key(int64_t slot, ParamArray old_params, ParamArray new_params, float* key) const {
    dequantize(key_codes_of(slot), key_size, bits, old_params, key);
    quantize(key, key_size, bits, new_params, key_codes_of(slot));
  }

  // Of `count` slots.
  int64_t key_code_bytes(int64_t count) const { return (count - exact) * (key_size * bits / 8); }

  int64_t exact = 0, key_size = 0, value_size = 0, bits = 16;
  bool in_bfloat16 = false;
  uint8_t *keys = nullptr, *values = nullptr, *key_codes = nullptr, *value_codes = nullptr;
  float* key_range = nullptr;
  simd::Half* value_grid = nullptr;

 private:
  uint8_t* key_codes_of(int64_t slot) const { return key_codes + (slot - exact) * (key_size * bits / 8); }
  uint8_t* value_codes_of(int64_t slot) const { return value_codes + (slot - exact) * (value_size * bits / 8); }
};

}  // namespace store
