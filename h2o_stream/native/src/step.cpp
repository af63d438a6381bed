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

template <class Body>
void Step::for_each_stream(const Worker& worker, Body body) {
  if (count_ == 1) return body(state(worker), int64_t(0));
  const Range range = worker.partition(count_);
  for (int64_t stream = range.begin; stream < range.end; ++stream) body(states_[0], stream);
  worker.barrier();
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

// Attention and the recurrent mixer of a layer.
void Step::mix_tokens(const Worker& worker, const Layer& layer) {
  project(worker, layer);
  if (worker.index == 0 && attends(layer)) select_slots(layer);
  worker.barrier();
  if (attends(layer)) {
    attention_.attend(worker, [&](int64_t stream, int64_t head, float* queries, float* key, float* value) {
      prepare(layer, stream, head, queries, key, value, angles_[worker.index * reserved_streams_ + stream]);
    });
    prefetch(layer.out, worker.partition(model_.hidden_size, kRows));
  }
  if (has_mixer(layer)) {
    const Mixer& mixer = layer.mixer;
    for (int64_t stream = 0; stream < count_; ++stream) {
      mix(mixer,
          {mixer_projected_.at(stream * projected_), 1, projected_, streams_[stream].states + mixer.first_state,
           mixed_.at(stream * mixer.out.columns), token_indices_[stream] == 0},
          mixer_scratch_.at(worker.index * mixer_scratch_size_), worker);
    }
    prefetch(mixer.out, worker.partition(model_.hidden_size, kRows));
  }
  worker.barrier();
  multiply_out(worker, layer);
  if (has_mlp(layer)) prefetch(layer.gate.weights ? layer.gate : layer.up, worker.partition(layer.down.columns, kGroup));
  worker.barrier();
  if (!attends(layer)) return;
  attention_.evict(worker);
  if (!has_mlp(layer)) worker.barrier();
}

// Multiplies this thread's rows of the layer's first matrices.
void Step::project(const Worker& worker, const Layer& layer) {
  const Vectors& normed = state(worker).normed;
  const auto multiply = [&](const Matrix* matrices, int64_t count, float* out, int64_t stride) {
    for (int64_t i = 0; i < count; out += matrices[i++].rows) {
      skinny_gemm(matrices[i], normed, count_, worker.partition(matrices[i].rows, kRows), out, stride);
    }
  };
  multiply(layer.qkv, layer.qkv_count, qkv_.data(), qkv_size_);
  multiply(layer.mixer.in, layer.mixer.in_count, mixer_projected_.data(), projected_);
  for (int64_t group = 0; count_ == 1 && group < layer.group_count; ++group) {
    prefetch_slots(streams_->slots[layer.first_group + group], worker);
  }
}

void Step::select_slots(const Layer& layer) {
  for (int64_t stream = 0; stream < count_; ++stream) slots_[stream] = streams_[stream].slots + layer.first_group;
  attention_.set_layer(layer.attention, slots_.data(), layer.group_count, count_, token_indices_.data());
}

// Multiplies this thread's rows of the output projections.
void Step::multiply_out(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Range rows = worker.partition(hidden, kRows);
  const Matrix& mixer_out = layer.mixer.out;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    if (attends(layer)) {
      attention_.merge(stream, state.attended.at(stream), state.factors.at(stream * attention_.factor_count()));
      gate_heads(layer, qkv_.at(stream * qkv_size_), state.attended.at(stream));
      quantize_for({&layer.out}, state.attended, stream, {0, layer.out.columns});
    }
    if (has_mixer(layer)) {
      std::copy_n(mixed_.at(stream * mixer_out.columns), mixer_out.columns, state.mixed.at(stream));
      quantize_for({&mixer_out}, state.mixed, stream, {0, mixer_out.columns});
    }
  });
  const State& local = state(worker);
  if (!attends(layer)) {
    skinny_gemm(mixer_out, local.mixed, count_, rows, attention_delta_.data(), hidden);
    return;
  }
  attention_.update_scores(worker,
                           [&](int64_t stream) { return local.factors.at(stream * attention_.factor_count()); });
  skinny_gemm(layer.out, local.attended, count_, rows, attention_delta_.data(), hidden);
  if (!has_mixer(layer)) return;
  for (int64_t stream = 0; stream < count_; ++stream) {
    float *delta = attention_delta_.at(stream * hidden), *mixed = scratch_.at(worker.index * hidden);
    skinny_gemm(mixer_out, local.mixed, Range{stream, stream + 1}, rows, mixed, hidden);
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] += mixed[i];
  }
}

// Writes the queries of a KV head's group and, unless null, its key and value.
void Step::prepare(const Layer& layer, int64_t stream, int64_t head, float* queries, float* key, float* value,
                   Angles& angles) {
  const AttentionLayer& shape = layer.attention;
  const int64_t heads = shape.query_heads / shape.kv_heads, size = simd::padded(shape.head_size);
  const float* qkv = qkv_.at(stream * qkv_size_);
  const Heads all{layer.query_norm, qkv + layer.query_offset, layer.query_stride, shape.query_heads};
  for (int64_t q = 0; q < heads; ++q) {
    prepare_head(layer, all, head * heads + q, token_indices_[stream], angles, queries + q * size);
  }
  if (!key) return;
  const Heads keys{layer.key_norm, qkv + layer.key_offset, layer.key_stride, shape.kv_heads};
  prepare_head(layer, keys, head, token_indices_[stream], angles, key);
  std::copy_n(qkv + layer.value_offset + head * layer.value_stride, shape.value_size, value);
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
