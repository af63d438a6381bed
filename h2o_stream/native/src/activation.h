// What is applied to the results of products: the activation of an MLP, scale and softcap of logits.

#pragma once

#include "abi.h"
#include "simd.h"
#include "threads.h"

inline simd::Floats silu(simd::Floats x) {
  const simd::Floats power = simd::exp_nonpositive(x < 0.f ? x : -x);
  return (x < 0.f ? x * power : x) / (1.f + power);
}

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

inline float activate(int64_t activation, float x) {
  switch (activation) {
    case kGeluTanh: return 0.5f * x * (1 + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kGeluErf: return 0.5f * x * (1 + std::erf(x * 0.7071067811865476f));
    case kRelu: return std::max(x, 0.f);
    case kReluSquared: return std::max(x, 0.f) * std::max(x, 0.f);
    default: return x / (1 + std::exp(-x));
  }
}

// to = act(gate) * up in a range, or act(up) where gate is null.
inline void activate(int64_t activation, const float* gate, const float* up, Range range, float* to) {
  const float* from = gate ? gate : up;
  int64_t i = range.begin;
  if (activation == kSilu) {
    for (; i + simd::kWidth <= range.end; i += simd::kWidth) {
      const simd::Floats activated = silu(simd::load(from + i));
      simd::store(gate ? activated * simd::load(up + i) : activated, to + i);
    }
  }
  for (; i < range.end; ++i) to[i] = activate(activation, from[i]) * (gate ? up[i] : 1.f);
}

// Scales and caps logits in a range.
inline void scale_logits(const Model& model, Range range, float* logits) {
  const float scale = float(model.logit_scale), cap = float(model.logit_softcap);
  if (scale == 1 && cap == 0) return;
  for (int64_t i = range.begin; i < range.end; ++i) {
    logits[i] *= scale;
    if (cap > 0) logits[i] = std::tanh(logits[i] / cap) * cap;
  }
}
