// Norms, and rotation of new queries and keys at their token index.

#pragma once

#include "abi.h"
#include "buffer.h"
#include "simd.h"
#include "simd_functions.h"

// 1 / rms(x).
inline float inverse_rms(const float* x, int64_t size, double epsilon) {
  simd::Floats sums[2] = {};
  int64_t i = 0;
  for (; i + 2 * simd::kWidth <= size; i += 2 * simd::kWidth) {
    for (int64_t j = 0; j < 2; ++j) {
      const simd::Floats values = simd::load(x + i + j * simd::kWidth);
      sums[j] += values * values;
    }
  }
  float sum = simd::reduce_add(sums[0] + sums[1]);
  for (; i < size; ++i) sum += x[i] * x[i];
  return 1 / std::sqrt(sum / float(size) + float(epsilon));
}

// What a norm subtracts from a vector and multiplies it by.
struct Moments {
  float mean, factor;
};

inline Moments moments(const Norm& norm, const float* x, int64_t size) {
  if (norm.kind != kLayerNorm) return {0, norm.kind == kNoNorm ? 1 : inverse_rms(x, size, norm.epsilon)};
  float mean = 0, sum = 0;
  for (int64_t i = 0; i < size; ++i) mean += x[i];
  mean /= float(size);
  for (int64_t i = 0; i < size; ++i) sum += (x[i] - mean) * (x[i] - mean);
  return {mean, 1 / std::sqrt(sum / float(size) + float(norm.epsilon))};
}

// out = norm(x) for elements [first, first + size) of the vector that the moments are of; may work in place.
inline void apply_norm(const Norm& norm, Moments moments, int64_t first, const float* x, int64_t size, float* out) {
  if (norm.kind == kNoNorm) {
    if (out != x) std::copy_n(x, size, out);
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    const float normed = (x[i] - moments.mean) * moments.factor * (norm.weight ? norm.weight[first + i] : 1.f);
    out[i] = norm.bias ? normed + norm.bias[first + i] : normed;
  }
}

// out = norm(x); may work in place.
inline void apply_norm(const Norm& norm, const float* x, int64_t size, float* out) {
  apply_norm(norm, moments(norm, x, size), 0, x, size, out);
}

// x += scale * norm(delta). `scratch` has room for `size` numbers.
inline void add_normed(const Norm& norm, const float* delta, int64_t size, float scale, float* x, float* scratch) {
  if (norm.kind != kNoNorm) {
    apply_norm(norm, delta, size, scratch);
    delta = scratch;
  }
  for (int64_t i = 0; i < size; ++i) x[i] += scale * delta[i];
}

// Cosines and sines of one token index, cached because most layers share their frequencies.
class Angles {
 public:
  // Allocates for all layers of a model.
  void reserve(const Model& model) {
    for (const Layer* layer = model.layers; layer < model.layers + model.layer_count; ++layer) {
      cos_sin_.reserve(layer->absolute_rotary_dims), copy_.reserve(layer->attention.head_size);
    }
    frequencies_ = nullptr;
  }

  // [rotary_dims]: cosines, then sines.
  const float* at(const float* frequencies, int64_t rotary_dims, int32_t index) {
    if (frequencies != frequencies_ || index != index_) {
      for (int64_t i = 0; i < rotary_dims / 2; ++i) {
        const float angle = float(index) * frequencies[i];
        cos_sin_[i] = std::cos(angle);
        cos_sin_[rotary_dims / 2 + i] = std::sin(angle);
      }
      frequencies_ = frequencies, index_ = index;
    }
    return cos_sin_.data();
  }

  // Puts x [size] in an order.
  void reorder(const int32_t* order, int64_t size, float* x) {
    std::copy_n(x, size, copy_.data());
    for (int64_t i = 0; i < size; ++i) x[i] = copy_[order[i]];
  }

 private:
  Buffer<float> cos_sin_, copy_;
  const float* frequencies_ = nullptr;
  int32_t index_ = -1;
};

// Rotates a query or key by `cos_sin`, in place.
inline void rotate(const Layer& layer, const float* cos_sin, float* x) {
  const int64_t half = layer.absolute_rotary_dims / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t one = layer.order ? layer.order[i] : i, other = layer.order ? layer.order[half + i] : half + i;
    const float first = x[one], second = x[other];
    x[one] = first * cos_sin[i] - second * cos_sin[half + i];
    x[other] = second * cos_sin[i] + first * cos_sin[half + i];
  }
}

// The queries or the keys of a token: head h starts at `first` + h * `stride`. The last elements of all heads may be
// the same. At last they are multiplied by `factor`.
struct Heads {
  const Norm& norm;
  const float* first;
  int64_t stride, count;
  const float* tail;
  int64_t tail_size;
  float factor;
};

// The heads of a token at this index whose vector is `qkv`.
inline Heads queries_of(const Layer& layer, const float* qkv, int32_t index) {
  float factor = 1;
  if (layer.temperature != 0) {
    const float pieces = std::floor((float(index) + float(layer.temperature_start)) / float(layer.temperature_length));
    factor += float(layer.temperature) * std::log1p(pieces);
  }
  return {layer.query_norm, qkv + layer.query_offset, layer.query_stride, layer.attention.query_heads, nullptr, 0,
          factor};
}

inline Heads keys_of(const Layer& layer, const float* qkv) {
  return {layer.key_norm,         qkv + layer.key_offset,      layer.key_stride,
          layer.attention.kv_heads, qkv + layer.key_tail_offset, layer.key_tail_size, 1};
}

// Writes a head's value, normed and scaled.
inline void prepare_value(const Layer& layer, const float* qkv, int64_t head, float* out) {
  const int64_t size = layer.attention.value_size;
  apply_norm(layer.value_norm, qkv + layer.value_offset + head * layer.value_stride, size, out);
  if (layer.value_scale == 1) return;
  for (int64_t i = 0; i < size; ++i) out[i] *= float(layer.value_scale);
}

// Norms and scales a query or key, and rotates it if the cache stores rotated keys, or else puts it in the order of its
// slots.
inline void prepare_head(const Layer& layer, const Heads& heads, int64_t head, int32_t index, Angles& angles,
                         float* out) {
  const int64_t size = layer.attention.head_size;
  const float* from = heads.first + head * heads.stride;
  if (heads.tail_size || layer.elements) {
    const int64_t own = size - heads.tail_size;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t element = layer.elements ? layer.elements[i] : i;
      out[i] = element < own ? from[element] : heads.tail[element - own];
    }
    from = out;
  }
  if (layer.norms_after_rope) {
    if (from != out) std::copy_n(from, size, out);
  } else if (layer.norms_all_heads) {
    apply_norm(heads.norm, moments(heads.norm, heads.first, heads.count * size), head * size, from, size, out);
  } else {
    apply_norm(heads.norm, from, size, out);
  }
  if (layer.rope_scale != 1) {
    const float scale = float(layer.rope_scale);
    for (int64_t i = 0; i < layer.rope_scaled_dims; ++i) out[layer.order ? layer.order[i] : i] *= scale;
  }
  if (layer.frequencies) rotate(layer, angles.at(layer.frequencies, layer.absolute_rotary_dims, index), out);
  if (layer.norms_after_rope) apply_norm(heads.norm, out, size, out);
  if (heads.factor != 1) {
    for (int64_t i = 0; i < size; ++i) out[i] *= heads.factor;
  }
  if (layer.order && layer.attention.position_mode != kAbsolute) angles.reorder(layer.order, size, out);
}
