#include "step.h"

#include <chrono>
#include <exception>

#include "activation.h"

namespace {

using packed::kGroup;
using packed::kRows;  // units of work per thread: the results of 16 rows share a cache line

// The first matrix that a layer reads.
const Matrix& first_matrix(const Layer& layer) {
  if (attends(layer)) return layer.qkv[0];
  if (has_mixer(layer)) return layer.mixer.in[0];
  return layer.gate.weights ? layer.gate : layer.up;
}

}  // namespace

void Step::run(const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  streams_ = streams, count_ = count, logits_ = logits, trace_ = trace;
  slots_.resize(count), token_indices_.resize(count);
  for (int64_t stream = 0; stream < count; ++stream) token_indices_[stream] = int32_t(*streams[stream].slots->seen);
  reserve(threads);
  const auto start = std::chrono::steady_clock::now();
  parallel(threads > 1 ? tuner_.choose(threads) : 1, [this](const Worker& worker) { run_worker(worker); });
  if (threads > 1) tuner_.record(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
}

void Step::reserve(int64_t threads) {
  int64_t slots = 0, query_size = 0, qkv = 0, inner = 0, query_heads = 0, value_size = 0, expert_inner = 0;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    for (int64_t stream = 0; stream < count_; ++stream) {
      for (int64_t group = 0; group < layer.group_count; ++group) {
        slots = std::max(slots, streams_[stream].slots[layer.first_group + group].slot_count);
      }
    }
    int64_t rows = 0;
    for (int64_t i = 0; i < layer.qkv_count; ++i) rows += layer.qkv[i].rows;
    qkv = std::max(qkv, rows), inner = std::max(inner, layer.down.columns);
    query_heads = std::max(query_heads, layer.attention.query_heads);
    value_size = std::max(value_size, layer.attention.value_size);
    query_size = std::max(query_size, layer.out.columns);
    projected_ = std::max(projected_, projected_size(layer.mixer));
    mixed_size_ = std::max(mixed_size_, layer.mixer.out.columns);
    mixer_scratch_size_ = std::max(mixer_scratch_size_, scratch_size(layer.mixer, 1));
    const Experts& experts = layer.experts;
    experts_ = std::max(experts_, experts.router.rows), chosen_ = std::max(chosen_, experts.chosen);
    expert_inner = std::max(expert_inner, experts.inner_size);
  }
  if (count_ <= reserved_streams_ && threads <= reserved_threads_ && slots <= reserved_slots_) return;
  reserved_streams_ = std::max(count_, reserved_streams_), reserved_threads_ = std::max(threads, reserved_threads_);
  reserved_slots_ = std::max(slots, reserved_slots_);
  const int64_t hidden = model_.hidden_size;
  attention_.reserve(reserved_streams_, query_heads, value_size, reserved_slots_, reserved_threads_);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    if (attends(model_.layers[index])) attention_.reserve_scratch(model_.layers[index].attention);
  }
  states_.resize(reserved_threads_);
  for (int64_t i = 0; i < reserved_threads_; ++i) {
    const int64_t rows = i == 0 ? reserved_streams_ : 1;  // the other states hold a single stream
    states_[i].x.reserve(rows * hidden);
    states_[i].factors.reserve(rows * attention_.factor_count());
    states_[i].normed = Vectors(rows, hidden);
    states_[i].attended = Vectors(rows, query_size);
    states_[i].mixed = Vectors(rows, mixed_size_);
  }
  angles_.resize(reserved_threads_ * reserved_streams_);
  qkv_.reserve(reserved_streams_ * qkv);
  qkv_size_ = qkv, inner_ = inner;
  mixer_projected_.reserve(reserved_streams_ * projected_);
  mixed_.reserve(reserved_streams_ * mixed_size_);
  mixer_scratch_.reserve(reserved_threads_ * mixer_scratch_size_);
  attention_delta_.reserve(reserved_streams_ * hidden);
  mlp_delta_.reserve(reserved_streams_ * hidden);
  gate_.reserve(reserved_streams_ * std::max(inner, chosen_ * expert_inner));
  up_.reserve(gate_.size());
  scratch_.reserve(reserved_threads_ * hidden);
  router_logits_.reserve(reserved_streams_ * experts_);
  scores_.reserve(reserved_threads_ * 2 * experts_);
  choices_.reserve(reserved_threads_ * reserved_streams_ * chosen_);
  activated_ = Vectors(reserved_streams_, inner);
  expert_activated_ = Vectors(reserved_streams_ * chosen_, expert_inner);
}

void Step::run_worker(const Worker& worker) {
  embed(worker);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    const Layer* before = index ? &model_.layers[index - 1] : nullptr;
    for_each_stream(worker, [&](State& state, int64_t stream) {
      float* x = state.x.at(stream * model_.hidden_size);
      if (before) add_layer(*before, x, stream, worker);
      write_trace(index, stream, x, worker);
      apply_norm(layer.before_attention, x, model_.hidden_size, state.normed.at(stream));
      const Matrix *qkv = layer.qkv, *in = layer.mixer.in;
      quantize_for({&qkv[0], &qkv[1], &qkv[2], &in[0], &in[1], &in[2], &in[3], &in[4], &in[5]}, state.normed, stream,
                   {0, model_.hidden_size});
    });
    if (attends(layer) || has_mixer(layer)) mix_tokens(worker, layer);
    if (has_mlp(layer)) mlp(worker, layer);
  }
  output(worker);
}

void Step::embed(const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.embedding_scale);
  const auto row = [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    read_row(model_.embedding, streams_[stream].token, x);
    for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
    if (model_.learned_positions) {
      const float* position = model_.learned_positions + (token_indices_[stream] + model_.learned_offset) * hidden;
      for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
    }
    apply_norm(model_.embedding_norm, x, hidden, x);
  };
  for_each_stream(worker, row);
}

void Step::write_trace(int64_t layer, int64_t stream, const float* x, const Worker& worker) const {
  if (!trace_ || (count_ == 1 && worker.index)) return;
  std::copy_n(x, model_.hidden_size, trace_ + (layer * count_ + stream) * model_.hidden_size);
}

void Step::add(const Norm& norm, const float* delta, float* x, const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  add_normed(norm, delta, hidden, float(model_.residual_scale), x, scratch_.at(worker.index * hidden));
}

// Adds what has not been added of the previous layer: the MLP output, and with a parallel or no MLP also that of attention
// and mixer.
void Step::add_layer(const Layer& layer, float* x, int64_t stream, const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  const bool mixes = attends(layer) || has_mixer(layer);
  if (mixes && (layer.parallel || !has_mlp(layer))) {
    add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
  }
  if (has_mlp(layer)) add(layer.after_mlp, mlp_delta_.at(stream * hidden), x, worker);
}

void Step::mlp(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Experts& experts = layer.experts;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    const bool mixes = attends(layer) || has_mixer(layer);
    if (mixes && !layer.parallel) add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
    apply_norm(layer.before_mlp, x, hidden, state.normed.at(stream));
    quantize_for({&layer.gate, &layer.up, &experts.gate, &experts.up, &experts.shared_gate}, state.normed, stream,
                 {0, hidden});
  });
  if (layer.down.weights) multiply_up(worker, layer);
  if (experts.router.weights) {
    const Range rows = worker.partition(experts.router.rows, kRows);
    skinny_gemm(experts.router, state(worker).normed, count_, rows, router_logits_.data(), experts_);
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
  if (gated) skinny_gemm(layer.gate, normed, count_, columns, gate_.data(), inner_);
  skinny_gemm(layer.up, normed, count_, columns, up_.data(), inner_);
  for (int64_t stream = 0; stream < count_; ++stream) {
    const float* gate = gated ? gate_.at(stream * inner_) : nullptr;
    activate(layer.activation, gate, up_.at(stream * inner_), columns, activated_.at(stream));
    quantize_for({&layer.down}, activated_, stream, columns);
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
    float *gate = gate_.at(choice * inner), *up = up_.at(choice * inner);
    const Vectors& normed = state(worker).normed;
    const bool gated = expert.gate.weights;
    if (gated) skinny_gemm(expert.gate, normed, Range{stream, stream + 1}, rows, gate, inner);
    skinny_gemm(expert.up, normed, Range{stream, stream + 1}, rows, up, inner);
    activate(layer.activation, gated ? gate : nullptr, up, rows, expert_activated_.at(choice));
    quantize_for({&expert.down}, expert_activated_, choice, rows);
  }
}

void Step::multiply_down(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Range rows = worker.partition(hidden, kRows);
  if (layer.down.weights) skinny_gemm(layer.down, activated_, count_, rows, mlp_delta_.data(), hidden);
  if (!layer.experts.router.weights) return;
  for (int64_t stream = 0; stream < count_; ++stream) {
    float factor = layer.down.weights ? 1 : 0;
    if (const Matrix& gate = layer.experts.shared_gate; gate.weights) {
      skinny_gemm(gate, state(worker).normed, Range{stream, stream + 1}, {0, 1}, &factor, 1);
      factor = sigmoid(factor);
    }
    float* delta = mlp_delta_.at(stream * hidden);
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] = factor ? factor * delta[i] : 0;
    add_experts(worker, layer.experts, stream, rows);
  }
}

// Adds a range of the outputs of a stream's experts.
void Step::add_experts(const Worker& worker, const Experts& experts, int64_t stream, Range rows) {
  const int64_t hidden = model_.hidden_size;
  float *delta = mlp_delta_.at(stream * hidden), *output = scratch_.at(worker.index * hidden);
  for (int64_t choice = stream * experts.chosen; choice < (stream + 1) * experts.chosen; ++choice) {
    const auto [index, weight] = choices(worker)[choice];
    const Expert expert(experts, index, hidden);
    skinny_gemm(expert.down, expert_activated_, Range{choice, choice + 1}, rows, output, hidden);
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] += weight * output[i];
  }
}

void Step::output(const Worker& worker) {
  const int64_t hidden = model_.hidden_size, vocabulary = model_.vocab_size;
  const Layer& last = model_.layers[model_.layer_count - 1];
  for_each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    add_layer(last, x, stream, worker);
    write_trace(model_.layer_count, stream, x, worker);
    apply_norm(model_.norm, x, hidden, state.normed.at(stream));
    quantize_for({&model_.output}, state.normed, stream, {0, hidden});
  });
  const Range rows = worker.partition(vocabulary, kRows);
  skinny_gemm(model_.output, state(worker).normed, count_, rows, logits_, vocabulary);
  for (int64_t stream = 0; stream < count_; ++stream) scale_logits(model_, rows, logits_ + stream * vocabulary);
}

extern "C" {

void* h2o_step_open(const Model* model) { return new Step(*model); }

void h2o_step_close(void* step) { delete static_cast<Step*>(step); }

// See `Step::run`. Returns 0, or 1 if out of memory, with nothing changed.
int64_t h2o_step(void* step, const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  try {
    static_cast<Step*>(step)->run(streams, count, logits, trace, threads);
    return 0;
  } catch (const std::exception&) {  // all buffers and threads are created before any state changes
    return 1;
  }
}

}  // extern "C"
