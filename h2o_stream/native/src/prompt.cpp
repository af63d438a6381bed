#include "prompt.h"

#include <exception>

#include "activation.h"

namespace {

using packed::kGroup;
using packed::kRows;

// Tokens of a block: few enough that their activations stay in the L2 cache beside a part of a matrix.
constexpr int64_t kBlock = 128;

}  // namespace

// Calls `body(first, size)` for every block of tokens. Barriers separate its phases, but not two blocks: the last phase
// of one must not read what the first phase of the next writes.
template <class Body>
void Prompt::for_each_block(Body body) const {
  for (int64_t first = 0; first < count_; first += kBlock) body(first, std::min(kBlock, count_ - first));
}

void Prompt::reserve(int64_t count, int64_t threads) {
  count_ = count, threads_ = threads;
  const int64_t hidden = model_.hidden_size, block = std::min(count, kBlock);
  int64_t query_size = 0;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    int64_t rows = 0;
    for (int64_t i = 0; i < layer.qkv_count; ++i) rows += layer.qkv[i].rows;
    qkv_size_ = std::max(qkv_size_, rows), inner_ = std::max(inner_, layer.down.columns);
    query_size = std::max(query_size, layer.out.columns);
  }
  x_.reserve(count * hidden);
  indices_.reserve(count);
  qkv_.reserve(block * qkv_size_);
  attention_delta_.reserve(block * hidden);
  mlp_delta_.reserve(block * hidden);
  gate_.reserve(block * inner_);
  up_.reserve(block * inner_);
  scratch_.reserve(threads * hidden);
  normed_.reserve(block, hidden);
  attended_.reserve(block, query_size);
  activated_.reserve(block, inner_);
  if (int64_t(angles_.size()) < threads) angles_.resize(threads);
}

void Prompt::begin(const int64_t* tokens, const int32_t* indices, int64_t count, int64_t threads) {
  reserve(count, threads);
  std::copy_n(indices, count, indices_.data());
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.embedding_scale);
  parallel(threads_, [&](const Worker& worker) {
    const Range range = worker.partition(count);
    for (int64_t token = range.begin; token < range.end; ++token) {
      float* x = x_.at(token * hidden);
      read_row(model_.embedding, tokens[token], x);
      for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
      if (!model_.learned_positions) continue;
      const float* position = model_.learned_positions + (indices[token] + model_.learned_offset) * hidden;
      for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
    }
  });
}

void Prompt::project(int64_t index, float* query, float* key, float* value) {
  const Layer& layer = model_.layers[index];
  const AttentionLayer& shape = layer.attention;
  const int64_t hidden = model_.hidden_size;
  parallel(threads_, [&](const Worker& worker) {
    Angles& angles = angles_[worker.index];
    for_each_block([&](int64_t first, int64_t size) {
      const Range tokens = worker.partition(size);
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        apply_norm(layer.before_attention, x_.at((first + i) * hidden), hidden, normed_.at(i));
        quantize_for({&layer.qkv[0], &layer.qkv[1], &layer.qkv[2]}, normed_, i, {0, hidden});
      }
      worker.barrier();
      int64_t column = 0;
      for (int64_t i = 0; i < layer.qkv_count; ++i) {
        const Matrix& matrix = layer.qkv[i];
        skinny_gemm(matrix, normed_, size, worker.partition(matrix.rows, kRows), qkv_.at(column), qkv_size_);
        column += matrix.rows;
      }
      worker.barrier();
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        const int64_t token = first + i;
        const float* qkv = qkv_.at(i * qkv_size_);
        for (int64_t head = 0; head < shape.query_heads; ++head) {
          prepare_head(layer, layer.query_norm, qkv + layer.query_offset + head * layer.query_stride, indices_[token],
                       angles, query + (token * shape.query_heads + head) * shape.head_size);
        }
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
          prepare_head(layer, layer.key_norm, qkv + layer.key_offset + head * layer.key_stride, indices_[token],
                       angles, key + (token * shape.kv_heads + head) * shape.head_size);
          std::copy_n(qkv + layer.value_offset + head * layer.value_stride, shape.value_size,
                      value + (token * shape.kv_heads + head) * shape.value_size);
        }
      }
    });
  });
}

void Prompt::finish(int64_t index, const float* attended) {
  const Layer& layer = model_.layers[index];
  const int64_t hidden = model_.hidden_size, size_attended = layer.out.columns;
  const float scale = float(model_.residual_scale);
  parallel(threads_, [&](const Worker& worker) {
    float* scratch = scratch_.at(worker.index * hidden);
    for_each_block([&](int64_t first, int64_t size) {
      const Range tokens = worker.partition(size);
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        std::copy_n(attended + (first + i) * size_attended, size_attended, attended_.at(i));
        quantize_for({&layer.out}, attended_, i, {0, size_attended});
      }
      worker.barrier();
      skinny_gemm(layer.out, attended_, size, worker.partition(hidden, kRows), attention_delta_.data(), hidden);
      worker.barrier();
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        float* x = x_.at((first + i) * hidden);
        const float* delta = attention_delta_.at(i * hidden);
        if (!layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
        apply_norm(layer.before_mlp, x, hidden, normed_.at(i));
        quantize_for({&layer.gate, &layer.up}, normed_, i, {0, hidden});
        if (layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
      }
      worker.barrier();
      const int64_t inner = layer.down.columns;
      const Range columns = worker.partition(inner, kGroup);
      if (layer.gate.weights) skinny_gemm(layer.gate, normed_, size, columns, gate_.data(), inner_);
      skinny_gemm(layer.up, normed_, size, columns, up_.data(), inner_);
      for (int64_t i = 0; i < size; ++i) {
        const float* gate = layer.gate.weights ? gate_.at(i * inner_) : nullptr;
        activate(layer.activation, gate, up_.at(i * inner_), columns, activated_.at(i));
        quantize_for({&layer.down}, activated_, i, columns);
      }
      worker.barrier();
      skinny_gemm(layer.down, activated_, size, worker.partition(hidden, kRows), mlp_delta_.data(), hidden);
      worker.barrier();
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        add_normed(layer.after_mlp, mlp_delta_.at(i * hidden), hidden, scale, x_.at((first + i) * hidden), scratch);
      }
    });
  });
}

void Prompt::output(const int64_t* chosen, int64_t count, float* logits) {
  const int64_t hidden = model_.hidden_size, vocabulary = model_.vocab_size;
  normed_.reserve(std::min(count, kBlock), hidden);
  parallel(threads_, [&](const Worker& worker) {
    for (int64_t first = 0; first < count; first += kBlock) {
      const int64_t size = std::min(kBlock, count - first);
      const Range tokens = worker.partition(size), rows = worker.partition(vocabulary, kRows);
      for (int64_t i = tokens.begin; i < tokens.end; ++i) {
        apply_norm(model_.norm, x_.at(chosen[first + i] * hidden), hidden, normed_.at(i));
        quantize_for({&model_.output}, normed_, i, {0, hidden});
      }
      worker.barrier();
      float* block = logits + first * vocabulary;
      skinny_gemm(model_.output, normed_, size, rows, block, vocabulary);
      for (int64_t i = 0; i < size; ++i) scale_logits(model_, rows, block + i * vocabulary);
      worker.barrier();
    }
  });
}

extern "C" {

void* h2o_prompt_open(const Model* model) { return new Prompt(*model); }

void h2o_prompt_close(void* prompt) { delete static_cast<Prompt*>(prompt); }

// See `Prompt::begin`. Returns 0, or 1 if out of memory.
int64_t h2o_prompt_begin(void* prompt, const int64_t* tokens, const int32_t* indices, int64_t count, int64_t threads) {
  try {
    static_cast<Prompt*>(prompt)->begin(tokens, indices, count, threads);
    return 0;
  } catch (const std::exception&) {  // all buffers and threads are created here
    return 1;
  }
}

// See `Prompt::project`.
void h2o_prompt_project(void* prompt, int64_t layer, float* query, float* key, float* value) {
  static_cast<Prompt*>(prompt)->project(layer, query, key, value);
}

// See `Prompt::finish`.
void h2o_prompt_finish(void* prompt, int64_t layer, const float* attended) {
  static_cast<Prompt*>(prompt)->finish(layer, attended);
}

// See `Prompt::output`.
void h2o_prompt_output(void* prompt, const int64_t* chosen, int64_t count, float* logits) {
  static_cast<Prompt*>(prompt)->output(chosen, count, logits);
}

}  // extern "C"
