// Norms, and rotation of new queries and keys at their token index.

#pragma once

#include "abi.h"
#include "buffer.h"
#include "simd.h"

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

// out = norm(x); may work in place.
inline void apply_norm(const Norm& norm, const float* x, int64_t size, float* out) {
  if (norm.kind == kNoNorm) {
    if (out != x) std::copy_n(x, size, out);
    return;
  }
  float mean = 0, factor;
  if (norm.kind == kLayerNorm) {
    for (int64_t i = 0; i < size; ++i) mean += x[i];
    mean /= float(size);
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += (x[i] - mean) * (x[i] - mean);
    factor = 1 / std::sqrt(sum / float(size) + float(norm.epsilon));
  } else {
    factor = inverse_rms(x, size, norm.epsilon);
  }
  for (int64_t i = 0; i < size; ++i) {
    const float normed = (x[i] - mean) * factor * (norm.weight ? norm.weight[i] : 1.f);
    out[i] = norm.bias ? normed + norm.bias[i] : normed;
  }
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
  // [rotary_dims]: cosines, then sines.
  const float* at(const float* frequencies, int64_t rotary_dims, int32_t index) {
    if (frequencies != frequencies_ || index != index_) {
      cos_sin_.reserve(rotary_dims);
      for (int64_t i = 0; i < rotary_dims / 2; ++i) {
        const float angle = float(index) * frequencies[i];
        cos_sin_[i] = std::cos(angle);
        cos_sin_[rotary_dims / 2 + i] = std::sin(angle);
      }
      frequencies_ = frequencies, index_ = index;
    }
    return cos_sin_.data();
  }

 private:
  Buffer<float> cos_sin_;
  const float* frequencies_ = nullptr;
  int32_t index_ = -1;
};

// Norms and scales a query or key, and rotates it if the cache stores rotated keys.
inline void prepare_head(const Layer& layer, const Norm& norm, const float* from, int32_t index, Angles& angles,
                         float* out) {
  apply_norm(norm, from, layer.attention.head_size, out);
  if (layer.rope_scale != 1) {
    for (int64_t i = 0; i < layer.rope_scaled_dims; ++i) out[i] *= float(layer.rope_scale);
  }
  if (!layer.frequencies) return;
  const int64_t half = layer.absolute_rotary_dims / 2;
  const float* cos_sin = angles.at(layer.frequencies, layer.absolute_rotary_dims, index);
  for (int64_t i = 0; i < half; ++i) {
    const float first = out[i], second = out[half + i];
    out[i] = first * cos_sin[i] - second * cos_sin[half + i];
    out[half + i] = second * cos_sin[i] + first * cos_sin[half + i];
  }
}
