// What follows the attention in a layer of a prompt.

#include <algorithm>

#include "activation.h"
#include "altup.h"
#include "layer_parts.h"
#include "prompt.h"

// Writes the MLP's outputs for a block of tokens, zeros if there is none.
void Prompt::feed_mlp(const Layer& layer, int64_t size) {
  const int64_t hidden = model_.hidden_size, inner = layer.down.columns;
  if (!layer.down.weights) {
    std::fill_n(mlp_delta_.data(), size * hidden, 0.f);
    return;
  }
  const bool gated = layer.gate.weights;
  if (gated) multiply(layer.gate, normed_.data(), size, gate_.data(), inner, in_bfloat16_, threads_);
  multiply(layer.up, normed_.data(), size, up_.data(), inner, in_bfloat16_, threads_);
  for_each_token(size, [&](int64_t i, const Worker&) {
    float* up = up_.at(i * inner);
    if (layer.cuts_gates) cut_gates(layer, gate_.at(i * inner), {0, inner}, gate_.at(i * inner));
    activate(layer, gated ? gate_.at(i * inner) : nullptr, up, {0, inner}, up);
    apply_norm(layer.inner_norm, up, inner, up);
  });
  multiply(layer.down, up_.data(), size, mlp_delta_.data(), hidden, in_bfloat16_, threads_);
  const Matrix& gate = layer.experts.shared_gate;
  if (!gate.weights) return;
  multiply(gate, normed_.data(), size, gate_.data(), 1, false, threads_);
  for_each_token(size, [&](int64_t i, const Worker&) {
    float* delta = mlp_delta_.at(i * hidden);
    for (int64_t k = 0; k < hidden; ++k) delta[k] *= sigmoid(gate_[i]);
  });
}

// Adds the outputs of the experts for a block of tokens.
void Prompt::feed_experts(const Layer& layer, int64_t first, int64_t size) {
  if (layer.experts.output_norm.kind != kNoNorm) return feed_experts_beside(layer, first, size);
  group_by_expert(layer.experts, size);
  add_experts(layer, mlp_delta_.data());
}

// The same for experts beside the MLP.
void Prompt::feed_experts_beside(const Layer& layer, int64_t first, int64_t size) {
  const Experts& experts = layer.experts;
  const int64_t hidden = model_.hidden_size;
  const auto norm_with = [&](const Norm& norm) {
    for_each_token(size, [&](int64_t i, const Worker&) {
      apply_norm(norm, x_.at((first + i) * hidden), hidden, normed_.at(i * hidden));
    });
  };
  norm_with(experts.router_norm);
  group_by_expert(experts, size);
  norm_with(experts.input_norm);
  std::fill_n(expert_sums_.data(), size * hidden, 0.f);
  add_experts(layer, expert_sums_.data());
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    float* delta = mlp_delta_.at(i * hidden);
    apply_norm(experts.mlp_norm, delta, hidden, delta);
    add_normed(experts.output_norm, expert_sums_.at(i * hidden), hidden, 1, delta, scratch_.at(worker.index * hidden));
  });
}

// Adds the outputs of the experts that the tokens of a block were grouped by, which are in `normed_`.
void Prompt::add_experts(const Layer& layer, float* sums) {
  const Experts& experts = layer.experts;
  const int64_t hidden = model_.hidden_size;
  for (int64_t index = 0; index < experts.router.rows; ++index) {
    const std::vector<int64_t>& choices = tokens_by_expert_[index];
    const int64_t count = int64_t(choices.size());
    if (!count) continue;
    const Expert expert(experts, index, hidden);
    for_each_token(count, [&](int64_t i, const Worker&) {
      float* x = gathered_.at(i * hidden);
      std::copy_n(normed_.at(choices[i] / experts.chosen * hidden), hidden, x);
      if (experts.weighs_inputs) ::scale(choices_[choices[i]].weight, hidden, x);
    });
    feed_expert(layer, expert, count);
    for_each_token(count, [&](int64_t i, const Worker&) {
      float* delta = sums + choices[i] / experts.chosen * hidden;
      const float *output = expert_delta_.at(i * hidden), weight = choices_[choices[i]].weight;
      const float factor = experts.weighs_inputs ? 1 : weight;
      for (int64_t k = 0; k < hidden; ++k) delta[k] += factor * output[k];
    });
  }
}

// Takes the gathered tokens through an expert.
void Prompt::feed_expert(const Layer& layer, const Expert& expert, int64_t count) {
  const int64_t inner = layer.experts.inner_size, layout = layer.experts.gate_layout;
  const bool gated = expert.gate.weights;
  if (gated) multiply(expert.gate, gathered_.data(), count, gate_.data(), expert.gate.rows, in_bfloat16_, threads_);
  if (layout == kApart) multiply(expert.up, gathered_.data(), count, up_.data(), inner, in_bfloat16_, threads_);
  for_each_token(count, [&](int64_t i, const Worker&) {
    const float* gate = gate_.at(i * expert.gate.rows);
    float* up = up_.at(i * inner);
    if (layout == kInTurns) return activate_in_turns(layer, gate, {0, inner}, up);
    activate(layer, gated ? gate : nullptr, layout == kHalves ? gate + inner : up, {0, inner}, up);
  });
  multiply(expert.down, up_.data(), count, expert_delta_.data(), model_.hidden_size, in_bfloat16_, threads_);
}

// Chooses experts for a block of tokens.
void Prompt::group_by_expert(const Experts& experts, int64_t size) {
  multiply(experts.router, normed_.data(), size, router_logits_.data(), experts_, false, threads_);
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    choose(experts, router_logits_.at(i * experts_), scores_.at(worker.index * 2 * experts_),
           choices_.at(i * experts.chosen));
  });
  for (std::vector<int64_t>& choices : tokens_by_expert_) choices.clear();
  for (int64_t i = 0; i < size * experts.chosen; ++i) tokens_by_expert_[choices_[i].expert].push_back(i);
}

// Adds what a layer makes of the embeddings of a block of tokens for it.
void Prompt::add_embedding(const Layer& layer, int64_t first, int64_t size) {
  const int64_t hidden = model_.hidden_size, count = layer.embedding_gate.rows, n = model_.versions;
  const auto versions = [&](int64_t i) { return versions_.at((first + i) * n * hidden); };
  if (n) {
    for_each_token(size, [&](int64_t i, const Worker&) {
      altup::correct(model_, layer, versions(i), x_.at((first + i) * hidden));
    });
  }
  multiply(layer.embedding_gate, x_.at(first * hidden), size, up_.data(), count, in_bfloat16_, threads_);
  for_each_token(size, [&](int64_t i, const Worker&) {
    const int64_t place = (first + i) * model_.layer_embedding.columns + index_of(layer) * count;
    float* up = up_.at(i * count);
    activate(layer, nullptr, up, {0, count}, up);
    multiply_by_embedding(model_, layer_embeddings_.at(place), layer_projections_.at(place), count, {0, count}, up);
  });
  multiply(layer.embedding_out, up_.data(), size, mlp_delta_.data(), hidden, in_bfloat16_, threads_);
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    float *delta = mlp_delta_.at(i * hidden), *scratch = scratch_.at(worker.index * hidden);
    if (n) return altup::add_embedding(model_, layer, delta, versions(i), scratch);
    add_normed(layer.after_embedding, delta, hidden, 1, x_.at((first + i) * hidden), scratch);
  });
}
