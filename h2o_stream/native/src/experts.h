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

// The matrices of one expert; unless gates are apart, `gate` has the rows of `up`, too.
struct Expert {
  Expert(const Experts& experts, int64_t index, int64_t hidden)
      : gate(part(experts.gate, index * experts.stride,
                  experts.gate_layout == kApart ? experts.inner_size : 2 * experts.inner_size)),
        up(part(experts.up, index * experts.stride, experts.inner_size)),
        down(rows_of(experts.down, index * hidden, hidden)) {}

  static Matrix part(const Matrix& matrix, int64_t first, int64_t count) {
    return matrix.weights ? rows_of(matrix, first, count) : Matrix{};
  }

  const Matrix gate, up, down;
};

inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Writes the scores of all experts.
inline void compute_scores(const Experts& experts, const float* logits, float* scores) {
  const int64_t count = experts.router.rows;
  if (experts.scoring == kSparseMixer) return;
  if (experts.scoring == kSigmoid) {
    for (int64_t i = 0; i < count; ++i) scores[i] = sigmoid(logits[i]);
    return;
  }
  const float largest = *std::max_element(logits, logits + count);
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scores[i] = std::exp(logits[i] - largest);
  for (int64_t i = 0; i < count; ++i) scores[i] /= sum;
}

// A number by which experts are compared: also those of NaN can be chosen, each once.
inline float comparable(float x) { return std::max(std::numeric_limits<float>::lowest(), x); }

// Writes the choices [chosen] of a token, see `kSparseMixer`. `left` has room for the logits of all experts.
inline void mix_sparsely(const Experts& experts, const float* logits, float* left, Choice* choices) {
  const int64_t count = experts.router.rows;
  std::transform(logits, logits + count, left, comparable);
  for (int64_t i = 0; i < experts.chosen; ++i) {
    float* best = std::max_element(left, left + count);
    const float highest = *best;
    float sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      const float size = std::max(std::abs(logits[j]), highest);
      if (left[j] == -std::numeric_limits<float>::infinity()) continue;
      if ((highest - logits[j]) / size <= 2 * float(experts.jitter)) sum += std::exp(logits[j] - highest);
    }
    *best = -std::numeric_limits<float>::infinity();
    choices[i] = {best - left, 1 / sum};
  }
}

// Makes the experts of all but the best groups worthless.
inline void drop_groups(const Experts& experts, float* worths) {
  constexpr float kWorthless = -std::numeric_limits<float>::infinity();
  const int64_t size = experts.router.rows / experts.groups;
  const auto worth = [&](int64_t group) {
    float first = kWorthless, second = kWorthless;
    for (const float* x = worths + group * size; x < worths + (group + 1) * size; ++x) {
      second = std::max(second, std::min(first, *x)), first = std::max(first, *x);
    }
    return experts.group_worth == kBestTwo ? first + second : first;
  };
  for (int64_t dropped = experts.chosen_groups; dropped < experts.groups; ++dropped) {
    int64_t worst = -1;
    float least = std::numeric_limits<float>::infinity();
    for (int64_t group = 0; group < experts.groups; ++group) {
      const float x = worth(group);
      if (x > kWorthless && x <= least) worst = group, least = x;
    }
    if (worst >= 0) std::fill_n(worths + worst * size, size, kWorthless);
  }
}

// Writes the choices [chosen] of a token by its router logits, in the order of the experts. `scratch` has room for two
// numbers per expert.
inline void choose(const Experts& experts, const float* logits, float* scratch, Choice* choices) {
  const int64_t count = experts.router.rows, chosen = experts.chosen;
  float *scores = scratch, *worths = scratch + count;
  compute_scores(experts, logits, scores);
  if (experts.scoring == kSparseMixer) {
    mix_sparsely(experts, logits, worths, choices);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      worths[i] = comparable(scores[i] + (experts.choice_bias ? experts.choice_bias[i] : 0.f));
    }
    if (experts.groups) drop_groups(experts, worths);
    for (int64_t i = 0; i < chosen; ++i) {
      float* best = std::max_element(worths, worths + count);
      *best = -std::numeric_limits<float>::infinity();
      choices[i] = {best - worths, scores[best - worths]};
    }
  }
  std::sort(choices, choices + chosen, [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
  float factor = float(experts.scale), sum = 0;
  for (int64_t i = 0; i < chosen; ++i) sum += choices[i].weight;
  if (experts.normalized) factor /= sum;
  for (int64_t i = 0; i < chosen; ++i) {
    choices[i].weight *= experts.factors ? factor * experts.factors[choices[i].expert] : factor;
  }
}
