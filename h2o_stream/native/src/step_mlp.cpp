// What follows the attention in a layer of a decode step.

#include "activation.h"
#include "altup.h"
#include "layer_parts.h"
#include "step.h"

namespace {

using packed::kGroup;
using packed::kRows;

}  // namespace

void Step::mlp(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Experts& experts = layer.experts;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    const bool mixes = attends(layer) || has_mixer(layer);
    if (mixes && !layer.parallel) add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
    if (layer.laurel.right.weights) {
      altup::add_laurel(model_, layer, state.normed.at(stream), laurel_delta_.at(stream * hidden), x,
                        scratch_.at(worker.index * hidden));
      scale(layer.laurel.scale, hidden, x);
    }
    apply_norm(layer.before_mlp, x, hidden, state.normed.at(stream));
    quantize_for({&layer.gate, &layer.up, &experts.gate, &experts.up, &experts.shared_gate}, state.normed, stream,
                 {0, hidden});
    if (!beside(experts)) return;
    apply_norm(experts.router_norm, x, hidden, state.router_input.at(stream));
    apply_norm(experts.input_norm, x, hidden, state.expert_input.at(stream));
    quantize_for({&experts.gate, &experts.up}, state.expert_input, stream, {0, hidden});
  });
  if (layer.down.weights) multiply_up(worker, layer);
  if (experts.router.weights) {
    const Range rows = worker.partition(experts.router.rows, kRows);
    const Vectors& input = beside(experts) ? state(worker).router_input : state(worker).normed;
    multiply_vectors(experts.router, input, {0, count_}, rows, router_logits_.data(), experts_);
    worker.barrier();
    choose_experts(worker, experts);
    multiply_experts_up(worker, layer);
  }
  prefetch(layer.down, worker.partition(layer.down.rows, kRows));
  worker.barrier();
  multiply_down(worker, layer);
  const bool last = &layer == model_.layers + model_.layer_count - 1;
  const Matrix& next = last ? model_.output : first_matrix((&layer)[1]);
  prefetch(next, worker.partition(next.rows, kRows));
  worker.barrier();
}

// Computes a range of the input of `down` and quantizes it.
void Step::multiply_up(const Worker& worker, const Layer& layer) {
  const Range columns = worker.partition(layer.down.columns, kGroup);
  const Vectors& normed = state(worker).normed;
  const bool gated = layer.gate.weights;
  const Product products[] = {{&layer.gate, gate_.data(), inner_}, {&layer.up, up_.data(), inner_}};
  multiply(worker, gated ? products : products + 1, gated ? 2 : 1, normed, kGroup);
  if (layer.cuts_gates) worker.barrier();
  for (int64_t stream = 0; stream < count_; ++stream) {
    const float* gate = gated ? gate_.at(stream * inner_) : nullptr;
    if (layer.cuts_gates) {
      cut_gates(layer, gate, columns, activated_.at(stream));
      gate = activated_.at(stream);
    }
    activate(layer, gate, up_.at(stream * inner_), columns, activated_.at(stream));
  }
  if (layer.inner_norm.kind != kNoNorm) norm_inner(worker, layer, columns);
  for (int64_t stream = 0; stream < count_; ++stream) quantize_for({&layer.down}, activated_, stream, columns);
}

// Norms this thread's columns of the input of `down`.
void Step::norm_inner(const Worker& worker, const Layer& layer, Range columns) {
  worker.barrier();
  const int64_t size = layer.down.columns;
  Moments* found = moments_.data() + worker.index * reserved_.streams;
  for (int64_t stream = 0; stream < count_; ++stream) {
    found[stream] = moments(layer.inner_norm, activated_.at(stream), size);
  }
  worker.barrier();
  for (int64_t stream = 0; stream < count_; ++stream) {
    float* from = activated_.at(stream) + columns.begin;
    apply_norm(layer.inner_norm, found[stream], columns.begin, from, columns.size(), from);
  }
}

void Step::choose_experts(const Worker& worker, const Experts& experts) {
  for (int64_t stream = 0; stream < count_; ++stream) {
    choose(experts, router_logits_.at(stream * experts_), scores_.at(worker.index * 2 * experts_),
           choices(worker) + stream * experts.chosen);
  }
}

// The same as `multiply_up` for this thread's share of the rows of all chosen experts.
void Step::multiply_experts_up(const Worker& worker, const Layer& layer) {
  const Experts& experts = layer.experts;
  const int64_t inner = experts.inner_size, size = simd::padded(inner, kGroup);
  const Range share = worker.partition(count_ * experts.chosen * size, kGroup);
  for (int64_t choice = share.begin / size; choice * size < share.end; ++choice) {
    const Range rows{std::max<int64_t>(share.begin - choice * size, 0), std::min(share.end - choice * size, inner)};
    const int64_t stream = choice / experts.chosen;
    const Expert expert(experts, choices(worker)[choice].expert, model_.hidden_size);
    const Vectors& normed = beside(experts) ? state(worker).expert_input : state(worker).normed;
    float *gate = gate_.at(2 * choice * inner), *up = gate + inner, *activated = expert_activated_.at(choice);
    if (experts.gate_layout == kInTurns) {
      multiply_rows(expert.gate, normed, stream, {2 * rows.begin, 2 * rows.end}, gate, 2 * inner);
      activate_in_turns(layer, gate, rows, activated);
    } else {
      const bool gated = expert.gate.weights;
      if (gated) multiply_rows(expert.gate, normed, stream, rows, gate, inner);
      if (experts.gate_layout == kApart) {
        multiply_rows(expert.up, normed, stream, rows, up, inner);
      } else {
        multiply_rows(expert.gate, normed, stream, {inner + rows.begin, inner + rows.end}, gate, 2 * inner);
      }
      if (experts.weighs_inputs) {  // there are no biases then
        scale(choices(worker)[choice].weight, rows.size(), gate + rows.begin);
        scale(choices(worker)[choice].weight, rows.size(), up + rows.begin);
      }
      activate(layer, gated ? gate : nullptr, up, rows, activated);
    }
    quantize_for({&expert.down}, expert_activated_, choice, rows);
  }
}

void Step::multiply_down(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Range rows = worker.partition(hidden, kRows);
  if (layer.down.weights) multiply(worker, {&layer.down, mlp_delta_.data(), hidden}, activated_);
  if (!layer.experts.router.weights) return;
  for (int64_t stream = 0; stream < count_; ++stream) {
    float factor = layer.down.weights ? 1 : 0;
    if (const Matrix& gate = layer.experts.shared_gate; gate.weights) {
      skinny_gemm(gate, state(worker).normed, Range{stream, stream + 1}, {0, 1}, &factor, 1);
      factor = sigmoid(factor);
    }
    if (beside(layer.experts)) factor = 0;
    float* delta = (beside(layer.experts) ? expert_delta_ : mlp_delta_).at(stream * hidden);
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] = factor ? factor * delta[i] : 0;
    add_experts(worker, layer.experts, stream, rows);
  }
}

// Adds a range of the outputs of a stream's experts.
void Step::add_experts(const Worker& worker, const Experts& experts, int64_t stream, Range rows) {
  const int64_t hidden = model_.hidden_size;
  float* delta = (beside(experts) ? expert_delta_ : mlp_delta_).at(stream * hidden);
  float* output = scratch_.at(worker.index * hidden);
  for (int64_t choice = stream * experts.chosen; choice < (stream + 1) * experts.chosen; ++choice) {
    const auto [index, weight] = choices(worker)[choice];
    const Expert expert(experts, index, hidden);
    multiply_rows(expert.down, expert_activated_, choice, rows, output, hidden);
    const float factor = experts.weighs_inputs ? 1 : weight;
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] += factor * output[i];
  }
}

// Adds what a layer makes of the token's embedding for it.
void Step::add_embedding(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size, size = layer.embedding_gate.rows;
  const int64_t first = (&layer - model_.layers) * size;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    add_mlp(layer, x, stream, worker);
    if (model_.versions) altup::correct(model_, layer, state.versions.at(stream * model_.versions * hidden), x);
    std::copy_n(x, hidden, state.normed.at(stream));
    quantize_for({&layer.embedding_gate}, state.normed, stream, {0, hidden});
  });
  const Range columns = worker.partition(size, kGroup);
  multiply_vectors(layer.embedding_gate, state(worker).normed, {0, count_}, columns, up_.data(), inner_);
  for (int64_t stream = 0; stream < count_; ++stream) {
    const int64_t place = stream * model_.layer_embedding.columns + first;
    float* activated = activated_.at(stream);
    activate(layer, nullptr, up_.at(stream * inner_), columns, activated);
    multiply_by_embedding(model_, layer_embeddings_.at(place), layer_projections_.at(place), size, columns, activated);
    quantize_for({&layer.embedding_out}, activated_, stream, columns);
  }
  worker.barrier();
  multiply_vectors(layer.embedding_out, activated_, {0, count_}, worker.partition(hidden, kRows), mlp_delta_.data(),
                hidden);
  worker.barrier();
}
