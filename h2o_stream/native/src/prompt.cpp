#include "prompt.h"

#include <exception>

#include "activation.h"

namespace {

// Tokens that go through the MLP or a projection at a time, so that activations do not grow with the prompt.
constexpr int64_t kBlock = 512;

template <class Body>
bool fails(Body body) {
  try {
    body();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

// Calls `body(first, size)` for every block of tokens.
template <class Body>
void Prompt::for_each_block(Body body) const {
  for (int64_t first = 0; first < count_; first += kBlock) body(first, std::min(kBlock, count_ - first));
}

// Calls `body(index, worker)` for every token of a block.
template <class Body>
void Prompt::for_each_token(int64_t size, Body body) const {
  parallel(std::min(threads_, size), [&](const Worker& worker) {
    const Range tokens = worker.partition(size);
    for (int64_t i = tokens.begin; i < tokens.end; ++i) body(i, worker);
  });
}

void Prompt::reserve(int64_t count, int64_t threads) {
  count_ = count, threads_ = threads;
  const int64_t hidden = model_.hidden_size, block = std::min(count, kBlock);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    int64_t rows = 0;
    for (int64_t i = 0; i < layer.qkv_count; ++i) rows += layer.qkv[i].rows;
    qkv_size_ = std::max(qkv_size_, rows), inner_ = std::max(inner_, layer.down.columns);
  }
  x_.reserve(count * hidden);
  indices_.reserve(count);
  qkv_.reserve(block * qkv_size_);
  attention_delta_.reserve(block * hidden);
  mlp_delta_.reserve(block * hidden);
  gate_.reserve(block * inner_);
  up_.reserve(block * inner_);
  scratch_.reserve(threads * hidden);
  normed_.reserve(block * hidden);
  if (int64_t(angles_.size()) < threads) angles_.resize(threads);
}

void Prompt::begin(const int64_t* tokens, const int32_t* indices, int64_t count, int64_t threads) {
  reserve(count, threads);
  std::copy_n(indices, count, indices_.data());
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.embedding_scale);
  for_each_token(count, [&](int64_t token, const Worker&) {
    float* x = x_.at(token * hidden);
    read_row(model_.embedding, tokens[token], x);
    for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
    if (!model_.learned_positions) return;
    const float* position = model_.learned_positions + (indices[token] + model_.learned_offset) * hidden;
    for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
  });
}

void Prompt::project(int64_t index, float* query, float* key, float* value) {
  const Layer& layer = model_.layers[index];
  const AttentionLayer& shape = layer.attention;
  const int64_t hidden = model_.hidden_size;
  for_each_block([&](int64_t first, int64_t size) {
    for_each_token(size, [&](int64_t i, const Worker&) {
      apply_norm(layer.before_attention, x_.at((first + i) * hidden), hidden, normed_.at(i * hidden));
    });
    int64_t column = 0;
    for (int64_t i = 0; i < layer.qkv_count; ++i) {
      multiply(layer.qkv[i], normed_.data(), size, qkv_.at(column), qkv_size_, threads_);
      column += layer.qkv[i].rows;
    }
    for_each_token(size, [&](int64_t i, const Worker& worker) {
      const int64_t token = first + i;
      const float* qkv = qkv_.at(i * qkv_size_);
      Angles& angles = angles_[worker.index];
      for (int64_t head = 0; head < shape.query_heads; ++head) {
        prepare_head(layer, layer.query_norm, qkv + layer.query_offset + head * layer.query_stride, indices_[token],
                     angles, query + (token * shape.query_heads + head) * shape.head_size);
      }
      for (int64_t head = 0; head < shape.kv_heads; ++head) {
        prepare_head(layer, layer.key_norm, qkv + layer.key_offset + head * layer.key_stride, indices_[token], angles,
                     key + (token * shape.kv_heads + head) * shape.head_size);
        std::copy_n(qkv + layer.value_offset + head * layer.value_stride, shape.value_size,
                    value + (token * shape.kv_heads + head) * shape.value_size);
      }
    });
  });
}

void Prompt::finish(int64_t index, const float* attended) {
  const Layer& layer = model_.layers[index];
  const int64_t hidden = model_.hidden_size, inner = layer.down.columns;
  const float scale = float(model_.residual_scale);
  for_each_block([&](int64_t first, int64_t size) {
    multiply(layer.out, attended + first * layer.out.columns, size, attention_delta_.data(), hidden, threads_);
    for_each_token(size, [&](int64_t i, const Worker& worker) {
      float *x = x_.at((first + i) * hidden), *scratch = scratch_.at(worker.index * hidden);
      const float* delta = attention_delta_.at(i * hidden);
      if (!layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
      apply_norm(layer.before_mlp, x, hidden, normed_.at(i * hidden));
      if (layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
    });
    const bool gated = layer.gate.weights;
    if (gated) multiply(layer.gate, normed_.data(), size, gate_.data(), inner, threads_);
    multiply(layer.up, normed_.data(), size, up_.data(), inner, threads_);
    for_each_token(size, [&](int64_t i, const Worker&) {
      float* up = up_.at(i * inner);
      activate(layer.activation, gated ? gate_.at(i * inner) : nullptr, up, {0, inner}, up);
    });
    multiply(layer.down, up_.data(), size, mlp_delta_.data(), hidden, threads_);
    for_each_token(size, [&](int64_t i, const Worker& worker) {
      add_normed(layer.after_mlp, mlp_delta_.at(i * hidden), hidden, scale, x_.at((first + i) * hidden),
                 scratch_.at(worker.index * hidden));
    });
  });
}

void Prompt::output(const int64_t* chosen, int64_t count, float* logits) {
  const int64_t hidden = model_.hidden_size, vocabulary = model_.vocab_size;
  for (int64_t first = 0; first < count; first += kBlock) {
    const int64_t size = std::min(kBlock, count - first);
    float* block = logits + first * vocabulary;
    for_each_token(size, [&](int64_t i, const Worker&) {
      apply_norm(model_.norm, x_.at(chosen[first + i] * hidden), hidden, normed_.at(i * hidden));
    });
    multiply(model_.output, normed_.data(), size, block, vocabulary, threads_);
    for_each_token(size, [&](int64_t i, const Worker&) {
      scale_logits(model_, {0, vocabulary}, block + i * vocabulary);
    });
  }
  x_ = Buffer<float>();  // as large as the prompt, which may have been long
}

extern "C" {

void* h2o_prompt_open(const Model* model) { return new Prompt(*model); }

void h2o_prompt_close(void* prompt) { delete static_cast<Prompt*>(prompt); }

// The functions below return 0, or 1 if out of memory.

int64_t h2o_prompt_begin(void* prompt, const int64_t* tokens, const int32_t* indices, int64_t count, int64_t threads) {
  return fails([&] { static_cast<Prompt*>(prompt)->begin(tokens, indices, count, threads); });
}

int64_t h2o_prompt_project(void* prompt, int64_t layer, float* query, float* key, float* value) {
  return fails([&] { static_cast<Prompt*>(prompt)->project(layer, query, key, value); });
}

int64_t h2o_prompt_finish(void* prompt, int64_t layer, const float* attended) {
  return fails([&] { static_cast<Prompt*>(prompt)->finish(layer, attended); });
}

int64_t h2o_prompt_output(void* prompt, const int64_t* chosen, int64_t count, float* logits) {
  return fails([&] { static_cast<Prompt*>(prompt)->output(chosen, count, logits); });
}

}  // extern "C"
