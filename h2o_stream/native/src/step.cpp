#include "step.h"

#include <chrono>
#include <exception>
#include <initializer_list>

namespace {

using packed::kGroup;
using packed::kRows;  // of any matrix stay with one thread: their results share a line of the cache

// Rounds some numbers of a vector if one of these matrices needs it.
void round_for(std::initializer_list<const Matrix*> matrices, const Vectors& vectors, int64_t vector, Range numbers) {
  const auto needs = [](const Matrix* matrix) { return matrix->weights && packed::is_packed(matrix->kind); };
  if (std::any_of(matrices.begin(), matrices.end(), needs)) vectors.round(vector, numbers);
}

simd::Floats silu(simd::Floats x) {
  const simd::Floats power = simd::exp_nonpositive(x < 0.f ? x : -x);
  return (x < 0.f ? x * power : x) / (1.f + power);
}

float activated(int64_t activation, float x) {
  switch (activation) {
    case kGeluTanh: return 0.5f * x * (1 + std::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
    case kGeluErf: return 0.5f * x * (1 + std::erf(x * 0.7071067811865476f));
    case kRelu: return std::max(x, 0.f);
    default: return x / (1 + std::exp(-x));
  }
}

}  // namespace

void Step::run(const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  streams_ = streams, count_ = count, logits_ = logits, trace_ = trace;
  slots_.resize(count), now_.resize(count);
  for (int64_t stream = 0; stream < count; ++stream) now_[stream] = int32_t(*streams[stream].slots->seen);
  reserve(threads);
  const auto begun = std::chrono::steady_clock::now();
  parallel(threads > 1 ? choice_.choose(threads) : 1, [this](const Worker& worker) { work(worker); });
  if (threads > 1) choice_.learn(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
}

void Step::reserve(int64_t threads) {
  int64_t slots = 0, query_size = 0, qkv = 0, inner = 0, query_heads = 0, value_size = 0;
  for (int64_t number = 0; number < model_.layer_count; ++number) {
    const Layer& layer = model_.layers[number];
    for (int64_t stream = 0; stream < count_; ++stream) {
      for (int64_t group = 0; group < layer.group_count; ++group) {
        slots = std::max(slots, streams_[stream].slots[layer.first_group + group].slots);
      }
    }
    int64_t rows = 0;
    for (int64_t i = 0; i < layer.qkv_count; ++i) rows += layer.qkv[i].rows;
    qkv = std::max(qkv, rows), inner = std::max(inner, layer.down.columns);
    query_heads = std::max(query_heads, layer.attention.query_heads);
    value_size = std::max(value_size, layer.attention.value_size);
    query_size = std::max(query_size, layer.out.columns);
  }
  if (count_ <= reserved_ && threads <= reserved_threads_ && slots <= reserved_slots_) return;
  reserved_ = std::max(count_, reserved_), reserved_threads_ = std::max(threads, reserved_threads_);
  reserved_slots_ = std::max(slots, reserved_slots_);
  const int64_t hidden = model_.hidden;
  attention_.reserve(reserved_, query_heads, value_size, reserved_slots_, reserved_threads_);
  for (int64_t number = 0; number < model_.layer_count; ++number) {
    attention_.reserve_scratch(model_.layers[number].attention);
  }
  states_.resize(reserved_threads_);
  for (int64_t i = 0; i < reserved_threads_; ++i) {
    const int64_t rows = i == 0 ? reserved_ : 1;  // all others are used for one stream alone
    states_[i].x.reserve(rows * hidden);
    states_[i].factors.reserve(rows * attention_.factor_count());
    states_[i].normed = Vectors(rows, hidden);
    states_[i].attended = Vectors(rows, query_size);
  }
  angles_.resize(reserved_threads_ * reserved_);
  qkv_.reserve(reserved_ * qkv);
  qkv_size_ = qkv, inner_ = inner;
  attention_delta_.reserve(reserved_ * hidden);
  mlp_delta_.reserve(reserved_ * hidden);
  gate_.reserve(reserved_ * inner);
  up_.reserve(reserved_ * inner);
  scratch_.reserve(reserved_threads_ * hidden);
  activated_ = Vectors(reserved_, inner);
}

template <class Body>
void Step::each_stream(const Worker& worker, Body body) {
  if (count_ == 1) return body(state(worker), int64_t(0));
  const Range mine = worker.share(count_);
  for (int64_t stream = mine.begin; stream < mine.end; ++stream) body(states_[0], stream);
  worker.barrier();
}

void Step::work(const Worker& worker) {
  embed(worker);
  for (int64_t number = 0; number < model_.layer_count; ++number) {
    const Layer& layer = model_.layers[number];
    const Layer* before = number ? &model_.layers[number - 1] : nullptr;
    each_stream(worker, [&](State& state, int64_t stream) {
      float* x = state.x.at(stream * model_.hidden);
      if (before) add_layer(*before, x, stream, worker);
      keep_trace(number, stream, x, worker);
      apply_norm(layer.before_attention, x, model_.hidden, state.normed.at(stream));
      round_for({&layer.qkv[0], &layer.qkv[1], &layer.qkv[2]}, state.normed, stream, {0, model_.hidden});
    });
    attention(worker, layer);
    mlp(worker, layer);
  }
  output(worker);
}

void Step::embed(const Worker& worker) {
  const int64_t hidden = model_.hidden;
  const float scale = float(model_.embedding_scale);
  const auto row = [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    read_row(model_.embedding, streams_[stream].token, x);
    for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
    if (!model_.learned_positions) return;
    const float* position = model_.learned_positions + (now_[stream] + model_.learned_offset) * hidden;
    for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
  };
  each_stream(worker, row);
}

void Step::keep_trace(int64_t layer, int64_t stream, const float* x, const Worker& worker) const {
  if (!trace_ || (count_ == 1 && worker.number)) return;
  std::copy_n(x, model_.hidden, trace_ + (layer * count_ + stream) * model_.hidden);
}

// x += delta, normed first where the layer wants it.
void Step::add(const Norm& norm, float* delta, float* x, const Worker& worker) {
  const int64_t hidden = model_.hidden;
  const float scale = float(model_.residual_scale);
  const float* from = delta;
  if (norm.kind != kNoNorm) {
    float* own = scratch_.at(worker.number * hidden);
    apply_norm(norm, delta, hidden, own);
    from = own;
  }
  for (int64_t i = 0; i < hidden; ++i) x[i] += scale * from[i];
}

// What the layer before has left to be added.
void Step::add_layer(const Layer& layer, float* x, int64_t stream, const Worker& worker) {
  const int64_t hidden = model_.hidden;
  if (layer.parallel) add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
  add(layer.after_mlp, mlp_delta_.at(stream * hidden), x, worker);
}

void Step::attention(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden;
  State& own = state(worker);
  int64_t first = 0;
  for (int64_t i = 0; i < layer.qkv_count; ++i) {
    const Matrix& matrix = layer.qkv[i];
    multiply(matrix, own.normed, count_, worker.share(matrix.rows, kRows), qkv_.at(first), qkv_size_);
    first += matrix.rows;
  }
  for (int64_t group = 0; count_ == 1 && group < layer.group_count; ++group) {
    prefetch_slots(streams_->slots[layer.first_group + group], worker);
  }
  if (worker.number == 0) {
    for (int64_t stream = 0; stream < count_; ++stream) {
      slots_[stream] = streams_[stream].slots + layer.first_group;
    }
    attention_.enter(layer.attention, slots_.data(), layer.group_count, count_, now_.data());
  }
  worker.barrier();
  attention_.attend(worker, [&](int64_t stream, int64_t head, float* queries, float* key, float* value) {
    prepare(layer, stream, head, queries, key, value, angles_[worker.number * reserved_ + stream]);
  });
  prefetch(layer.out, worker.share(hidden, kRows));
  worker.barrier();
  each_stream(worker, [&](State& state, int64_t stream) {
    attention_.merge(stream, state.attended.at(stream), state.factors.at(stream * attention_.factor_count()));
    round_for({&layer.out}, state.attended, stream, {0, layer.out.columns});
  });
  attention_.update_scores(
      worker, [&](int64_t stream) { return own.factors.at(stream * attention_.factor_count()); });
  multiply(layer.out, own.attended, count_, worker.share(hidden, kRows), attention_delta_.data(), hidden);
  prefetch(layer.gate.weights ? layer.gate : layer.up, worker.share(layer.down.columns, kGroup));
  worker.barrier();
  attention_.evict(worker);
}

// Queries of a KV head's group and, unless null, its key and value.
void Step::prepare(const Layer& layer, int64_t stream, int64_t head, float* queries, float* key, float* value,
                   Angles& angles) {
  const AttentionLayer& shape = layer.attention;
  const int64_t heads = shape.query_heads / shape.kv_heads, size = simd::padded(shape.head_size);
  const float* qkv = qkv_.at(stream * qkv_size_);
  for (int64_t q = 0; q < heads; ++q) {
    const float* from = qkv + layer.query_first + (head * heads + q) * layer.query_step;
    prepare_head(layer, layer.query_norm, from, now_[stream], angles, queries + q * size);
  }
  if (!key) return;
  prepare_head(layer, layer.key_norm, qkv + layer.key_first + head * layer.key_step, now_[stream], angles, key);
  std::copy_n(qkv + layer.value_first + head * layer.value_step, shape.value_size, value);
}

void Step::mlp(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden, inner = layer.down.columns;
  State& own = state(worker);
  each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    if (!layer.parallel) add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
    apply_norm(layer.before_mlp, x, hidden, state.normed.at(stream));
    round_for({&layer.gate, &layer.up}, state.normed, stream, {0, hidden});
  });
  const Range columns = worker.share(inner, kGroup);
  if (layer.gate.weights) multiply(layer.gate, own.normed, count_, columns, gate_.data(), inner_);
  multiply(layer.up, own.normed, count_, columns, up_.data(), inner_);
  for (int64_t stream = 0; stream < count_; ++stream) activate(layer, stream, columns);
  prefetch(layer.down, worker.share(hidden, kRows));
  worker.barrier();
  multiply(layer.down, activated_, count_, worker.share(hidden, kRows), mlp_delta_.data(), hidden);
  const bool last = &layer == model_.layers + model_.layer_count - 1;
  const Matrix& next = last ? model_.output : (&layer)[1].qkv[0];
  prefetch(next, worker.share(next.rows, kRows));
  worker.barrier();
}

// Some columns of what goes into `down`, rounded for it.
void Step::activate(const Layer& layer, int64_t stream, Range columns) {
  const float* up = up_.at(stream * inner_);
  const float* gate = layer.gate.weights ? gate_.at(stream * inner_) : nullptr;
  const float* from = gate ? gate : up;
  float* to = activated_.at(stream);
  int64_t i = columns.begin;
  if (layer.activation == kSilu) {
    for (; i + simd::kWidth <= columns.end; i += simd::kWidth) {
      const simd::Floats some = silu(simd::load(from + i));
      simd::store(gate ? some * simd::load(up + i) : some, to + i);
    }
  }
  for (; i < columns.end; ++i) to[i] = activated(layer.activation, from[i]) * (gate ? up[i] : 1.f);
  round_for({&layer.down}, activated_, stream, columns);
}

void Step::output(const Worker& worker) {
  const int64_t hidden = model_.hidden, vocabulary = model_.vocabulary;
  const Layer& last = model_.layers[model_.layer_count - 1];
  each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    add_layer(last, x, stream, worker);
    keep_trace(model_.layer_count, stream, x, worker);
    apply_norm(model_.norm, x, hidden, state.normed.at(stream));
    round_for({&model_.output}, state.normed, stream, {0, hidden});
  });
  const Range rows = worker.share(vocabulary, kRows);
  multiply(model_.output, state(worker).normed, count_, rows, logits_, vocabulary);
  const float scale = float(model_.logit_scale), cap = float(model_.logit_softcap);
  if (scale == 1 && cap == 0) return;
  for (int64_t stream = 0; stream < count_; ++stream) {
    float* logits = logits_ + stream * vocabulary;
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      logits[i] *= scale;
      if (cap > 0) logits[i] = std::tanh(logits[i] / cap) * cap;
    }
  }
}

extern "C" {

void* h2o_step_open(const Model* model) { return new Step(*model); }

void h2o_step_close(void* step) { delete static_cast<Step*>(step); }

// See `Step::run`; `trace` may be null. Returns 0, or 1 if there is not memory enough, with nothing done.
int64_t h2o_step(void* step, const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  try {
    static_cast<Step*>(step)->run(streams, count, logits, trace, threads);
    return 0;
  } catch (const std::exception&) {  // of buffers or threads, which are made before anything else
    return 1;
  }
}

}  // extern "C"
