// What is applied to the results of products: the activation of an MLP, scale and softcap of logits.

#pragma once

#include "abi.h"
#include "simd.h"
#include "simd_functions.h"
#include "threads.h"

// x * sigmoid(y).
inline simd::Floats times_sigmoid(simd::Floats x, simd::Floats y) {
  const simd::Floats power = simd::exp_nonpositive(y < 0.f ? y : -y);
  return (y < 0.f ? x * power : x) / (1.f + power);
}

inline simd::Floats silu(simd::Floats x) { return times_sigmoid(x, x); }

// (1 + tanh(y)) / 2 is sigmoid(2 * y).
inline simd::Floats gelu_tanh(simd::Floats x) {
  return times_sigmoid(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

inline float activate(int64_t activation, const double* p, float x) {
  switch (activation) {
    case kXielu: {
      const float slope = float(p[2]) * x;
      return (x > 0 ? float(p[0]) * x * x : float(p[1]) * (std::expm1(std::min(x, float(p[3]))) - x)) + slope;
    }
    case kGeluTanh: return 0.5f * x * (1 + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kGeluErf: return 0.5f * x * (1 + std::erf(x * 0.7071067811865476f));
    case kRelu: return std::max(x, 0.f);
    case kReluSquared: return std::max(x, 0.f) * std::max(x, 0.f);
    default: return x / (1 + std::exp(-x));
  }
}

// See `kClampedSwiglu`.
template <class Float>
Float clamped_swiglu(const double* parameters, Float gate, Float up, Float (*silu_of)(Float)) {
  const float slope = float(parameters[0]), limit = float(parameters[1]), offset = float(parameters[2]);
  const Float most = Float{} + limit, least = Float{} - limit;
  gate = gate < most ? gate : most;
  up = up < most ? up : most;
  up = up > least ? up : least;
  return silu_of(gate * slope) / slope * (up + offset);
}

// to = act(gate) * up in a range, or act(up) where gate is null; p are parameters.
inline void activate(int64_t activation, const double* p, const float* gate, const float* up, Range range, float* to) {
  const float* from = gate ? gate : up;
  int64_t i = range.begin;
  if (activation == kClampedSwiglu) {
    for (; i + simd::kWidth <= range.end; i += simd::kWidth) {
      simd::store(clamped_swiglu<simd::Floats>(p, simd::load(gate + i), simd::load(up + i), silu), to + i);
    }
    const auto silu_of = [](float x) { return x / (1 + std::exp(-x)); };
    for (; i < range.end; ++i) to[i] = clamped_swiglu<float>(p, gate[i], up[i], silu_of);
    return;
  }
  const auto in_vectors = [&](simd::Floats (*activation_of)(simd::Floats)) {
    for (; i + simd::kWidth <= range.end; i += simd::kWidth) {
      const simd::Floats activated = activation_of(simd::load(from + i));
      simd::store(gate ? activated * simd::load(up + i) : activated, to + i);
    }
  };
  if (activation == kSilu) in_vectors(silu);
  if (activation == kGeluTanh) in_vectors(gelu_tanh);
  for (; i < range.end; ++i) to[i] = activate(activation, p, from[i]) * (gate ? up[i] : 1.f);
}

inline void activate(const Layer& layer, const float* gate, const float* up, Range range, float* to) {
  activate(layer.activation, layer.activation_parameters, gate, up, range, to);
}

// Writes a range of what is above a threshold in the gates of an MLP, see `Layer::cuts_gates`.
inline void cut_gates(const Layer& layer, const float* gates, Range range, float* to) {
  const int64_t size = layer.down.columns;
  const auto mean_of = [&](auto&& value) {
    simd::Floats sums{};
    int64_t i = 0;
    for (; i + simd::kWidth <= size; i += simd::kWidth) sums += value(simd::load(gates + i));
    float sum = simd::reduce_add(sums);
    for (; i < size; ++i) sum += value(gates[i]);
    return sum / float(size);
  };
  const float mean = mean_of([](auto x) { return x; });
  const float variance = mean_of([mean](auto x) { return (x - mean) * (x - mean); });
  const float threshold = mean + float(layer.gate_deviations) * std::sqrt(variance);
  for (int64_t i = range.begin; i < range.end; ++i) to[i] = std::max(gates[i] - threshold, 0.f);
}

// `activate` where `both` holds a gate, then what it is for, and so on.
inline void activate_in_turns(const Layer& layer, const float* both, Range range, float* to) {
  constexpr int64_t kPiece = 16;
  float gate[kPiece], up[kPiece];
  for (int64_t first = range.begin; first < range.end; first += kPiece) {
    const int64_t count = std::min(kPiece, range.end - first);
    for (int64_t i = 0; i < count; ++i) gate[i] = both[2 * (first + i)], up[i] = both[2 * (first + i) + 1];
    activate(layer, gate, up, {0, count}, to + first);
  }
}

// Multiplies the output of a layer's attention by its gate, whose values are in `qkv`.
inline void apply_gate(const Layer& layer, const float* qkv, float* attended) {
  if (layer.gate_kind == kNoGate) return;
  const int64_t size = layer.attention.value_size;
  for (int64_t head = 0; head < layer.attention.query_heads; ++head) {
    const float* values = qkv + layer.gate_offset + head * layer.gate_stride;
    for (int64_t i = 0; i < size; ++i) {
      const float x = values[layer.gate_size == 1 ? 0 : i];
      const float factor = layer.gate_kind == kSigmoidGate ? 1 / (1 + std::exp(-x)) : softplus(x);
      attended[head * size + i] *= factor;
    }
  }
}

// bound * tanh(x / bound), with an error below 1e-7 * bound.
inline void soft_cap(float bound, float* x, int64_t count) {
  int64_t i = 0;
  for (; i + simd::kWidth <= count; i += simd::kWidth) {
    const simd::Floats value = simd::load(x + i), size = value < 0.f ? -value : value;
    const simd::Floats exp_term = simd::exp_nonpositive(size * (-2.f / bound));
    const simd::Floats tanh_term = (1.f - exp_term) / (1.f + exp_term) * bound;
    simd::store(value < 0.f ? -tanh_term : tanh_term, x + i);
  }
  for (; i < count; ++i) x[i] = std::tanh(x[i] / bound) * bound;
}

// Scales and caps logits in a range.
inline void scale_logits(const Model& model, Range range, float* logits) {
  const float scale = float(model.logit_scale), cap = float(model.logit_softcap);
  if (scale != 1) {
    for (int64_t i = range.begin; i < range.end; ++i) logits[i] *= scale;
  }
  if (cap > 0) soft_cap(cap, logits + range.begin, range.size());
}
