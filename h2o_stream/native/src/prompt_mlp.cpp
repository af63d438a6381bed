// What follows the attention in a layer of a prompt.

#include <algorithm>
#include <atomic>
#include <new>

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
  add_experts(layer, size, mlp_delta_.data());
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
  add_experts(layer, size, expert_sums_.data());
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    float* delta = mlp_delta_.at(i * hidden);
    apply_norm(experts.mlp_norm, delta, hidden, delta);
    add_normed(experts.output_norm, expert_sums_.at(i * hidden), hidden, 1, delta, scratch_.at(worker.index * hidden));
  });
}

// Adds the outputs of the experts that the tokens of a block were grouped by, which are in `normed_`: of as many experts
// at a time as have room for their tokens.
void Prompt::add_experts(const Layer& layer, int64_t size, float* sums) {
  const int64_t all = layer.experts.router.rows;
  for (Range experts{0, 0}; experts.begin < all; experts.begin = experts.end) {
    int64_t rows = 0, used = 0;
    for (; experts.end < all; ++experts.end) {
      const int64_t count = int64_t(tokens_by_expert_[experts.end].size());
      if (rows + count > kExpertRows) break;
      first_rows_[experts.end] = rows, rows += count, used += count > 0;
    }
    run_experts(layer, experts, used);
    add_outputs(layer.experts, experts, size, sums);
  }
}

// Takes their tokens through `used` of some experts. Of many experts each thread takes whole ones, of few some rows of
// each.
void Prompt::run_experts(const Layer& layer, Range experts, int64_t used) {
  if (used < kMinExpertsPerThread * threads_) {
    for (int64_t index = experts.begin; index < experts.end; ++index) feed_expert(layer, index, threads_);
    return;
  }
  std::atomic<int64_t> next{experts.begin};
  std::atomic<bool> failed{false};
  parallel(threads_, [&](const Worker&) {
    try {
      for (int64_t index; (index = next++) < experts.end;) feed_expert(layer, index, 1);
    } catch (const std::bad_alloc&) {
      failed = true;
    }
  });
  if (failed) throw std::bad_alloc();
}

// Takes its tokens through an expert.
void Prompt::feed_expert(const Layer& layer, int64_t index, int64_t threads) {
  const Experts& experts = layer.experts;
  const std::vector<int64_t>& choices = tokens_by_expert_[index];
  const int64_t hidden = model_.hidden_size, inner = experts.inner_size, layout = experts.gate_layout;
  const int64_t count = int64_t(choices.size()), row = first_rows_[index];
  if (!count) return;
  const Expert expert(experts, index, hidden);
  const bool gated = expert.gate.weights;
  float *inputs = gathered_.at(row * hidden), *gates = gate_.at(row * 2 * inner), *ups = up_.at(row * inner);
  for_each_token(count, threads, [&](int64_t i, const Worker&) {
    float* x = inputs + i * hidden;
    std::copy_n(normed_.at(choices[i] / experts.chosen * hidden), hidden, x);
    if (experts.weighs_inputs) ::scale(choices_[choices[i]].weight, hidden, x);
    rows_[choices[i]] = row + i;
  });
  if (gated) multiply(expert.gate, inputs, count, gates, expert.gate.rows, in_bfloat16_, threads);
  if (layout == kApart) multiply(expert.up, inputs, count, ups, inner, in_bfloat16_, threads);
  for_each_token(count, threads, [&](int64_t i, const Worker&) {
    float *gate = gates + i * expert.gate.rows, *up = ups + i * inner;
    if (layout == kInTurns) return activate_in_turns(layer, gate, {0, inner}, up);
    activate(layer, gated ? gate : nullptr, layout == kHalves ? gate + inner : up, {0, inner}, up);
  });
  multiply(expert.down, ups, count, expert_delta_.at(row * hidden), hidden, in_bfloat16_, threads);
}

// Adds the outputs of some experts to the sums of a block of tokens, in the order of the experts.
void Prompt::add_outputs(const Experts& experts, Range added, int64_t size, float* sums) {
  const int64_t hidden = model_.hidden_size;
  for_each_token(size, threads_, [&](int64_t i, const Worker&) {
    for (int64_t choice = i * experts.chosen; choice < (i + 1) * experts.chosen; ++choice) {
      const auto [expert, weight] = choices_[choice];
      if (expert < added.begin || expert >= added.end) continue;
      const float *output = expert_delta_.at(rows_[choice] * hidden), factor = experts.weighs_inputs ? 1 : weight;
      for (int64_t k = 0; k < hidden; ++k) sums[i * hidden + k] += factor * output[k];
    }
  });
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
