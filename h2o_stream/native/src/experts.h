// Mixtures of experts: which experts a token goes through, and with which weights.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "tiles.h"

// An expert that a token goes through.
struct Choice {
  int64_t expert;
  float weight;
};

// Rows [first, first + count) of a matrix; `first` is a whole number of tiles.
inline Matrix rows_of(const Matrix& matrix, int64_t first, int64_t count) {
  return {tile_address(matrix, first), matrix.bias ? matrix.bias + first : nullptr, count, matrix.columns, matrix.kind,
          matrix.scale};
}

// The matrices of one expert.
struct Expert {
  Expert(const Experts& experts, int64_t index, int64_t hidden)
      : gate(experts.gate.weights ? rows_of(experts.gate, index * experts.stride, experts.inner_size) : Matrix{}),
        up(rows_of(experts.up, index * experts.stride, experts.inner_size)),
        down(rows_of(experts.down, index * hidden, hidden)) {}

  const Matrix gate, up, down;
};

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Writes the scores of all experts.
inline void compute_scores(const Experts& experts, const float* logits, float* scores) {
  const int64_t count = experts.router.rows;
  if (experts.scoring == kSigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] = sigmoid(logits[i]);
    return;
  }
  const float largest = *std::max_element(logits, logits + count);
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = std::exp(logits[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

// Writes the choices [chosen] of a token by its router logits, in the order of the experts. `scratch` has room for two
// numbers per expert.
inline void choose(const Experts& experts, const float* logits, float* scratch, Choice* choices) {
  const int64_t count = experts.router.rows, chosen = experts.chosen;
  float *scores = scratch, *worths = scratch + count;
  compute_scores(experts, logits, scores);
  for (int64_t i = 0; i < count; ++i) worths[i] = scores[i] + (experts.choice_bias ? experts.choice_bias[i] : 0.f);
  for (int64_t i = 0; i < chosen; ++i) {
    float* best = std::max_element(worths, worths + count);
    *best = -std::numeric_limits<float>::infinity();
    choices[i] = {best - worths, scores[best - worths]};
  }
  std::sort(choices, choices + chosen, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
  float factor = float(experts.scale), sum = 0;
  for (int64_t i = 0; i < chosen; ++i) sum += choices[i].weight;
  if (experts.normalized) factor /= sum;
  for (int64_t i = 0; i < chosen; ++i) choices[i].weight *= factor;
}
