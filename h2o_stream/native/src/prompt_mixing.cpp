// What mixes tokens in a prompt: attention and recurrent mixers.

#include <algorithm>

#include "prompt.h"

// Selects the slots of a layer.
prefill::LayerSlots Prompt::slots_of(const Layer& layer) {
  const int64_t chunks = tokens_of(layer).chunks(new_tokens_);
  for (int64_t stream = 0; stream < stream_count_; ++stream) {
    slots_[stream] = streams_[stream].slots + layer.first_group;
  }
  return {slots_.data(), layer.group_count, limits_ + layer.first_group * chunks, groups_ * chunks, chunks};
}

prefill::NewTokens Prompt::tokens_of(const Layer& layer) {
  const AttentionLayer& shape = layer.attention;
  const int64_t heads[] = {shape.query_heads, shape.kv_heads, shape.kv_heads};
  const int64_t sizes[] = {shape.head_size, shape.head_size, shape.value_size};
  for (int64_t i = 0; i < 3; ++i) {
    strides_[3 * i] = new_tokens_ * heads[i] * sizes[i];
    strides_[3 * i + 1] = sizes[i];
    strides_[3 * i + 2] = heads[i] * sizes[i];
  }
  const bool in_bfloat16 = false;
  return {query_.data(),  key_.data(),   value_.data(), strides_, attended_.data(),
          counts_.data(), stream_count_, new_tokens_,   chunk_,   in_bfloat16};
}

// Writes the queries, keys and values of a layer, and takes the tokens through its recurrent mixer.
void Prompt::mix_tokens(const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  for_each_block([&](int64_t first, int64_t size) {
    for_each_token(size, [&](int64_t i, const Worker&) {
      apply_norm(layer.before_attention, x_.at((first + i) * hidden), hidden, normed_.at(i * hidden));
    });
    if (attends(layer)) project(layer, first, size);
    if (has_mixer(layer)) run_mixer(layer.mixer, first, size);
  });
}

// Multiplies a block of normed tokens with several matrices, whose outputs are concatenated in `qkv_`.
void Prompt::multiply_all(const Matrix* matrices, int64_t count, int64_t size) {
  int64_t column = 0;
  for (int64_t i = 0; i < count; ++i) {
    multiply(matrices[i], normed_.data(), size, qkv_.at(column), qkv_size_, in_bfloat16_, threads_);
    column += matrices[i].rows;
  }
}

// Writes the queries, keys and values of a block of tokens.
void Prompt::project(const Layer& layer, int64_t first, int64_t size) {
  const AttentionLayer& shape = layer.attention;
  multiply_all(layer.qkv, layer.qkv_count, size);
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    const int64_t token = first + i;
    const float* qkv = qkv_.at(i * qkv_size_);
    Angles& angles = angles_[worker.index];
    const Heads queries{layer.query_norm, qkv + layer.query_offset, layer.query_stride, shape.query_heads};
    for (int64_t head = 0; head < shape.query_heads; ++head) {
      prepare_head(layer, queries, head, indices_[token], angles,
                   query_.at((token * shape.query_heads + head) * shape.head_size));
    }
    const Heads keys{layer.key_norm, qkv + layer.key_offset, layer.key_stride, shape.kv_heads};
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      prepare_head(layer, keys, head, indices_[token], angles,
                   key_.at((token * shape.kv_heads + head) * shape.head_size));
      std::copy_n(qkv + layer.value_offset + head * layer.value_stride, shape.value_size,
                  value_.at((token * shape.kv_heads + head) * shape.value_size));
    }
    if (layer.gate_stride) {
      float* gates = gates_.at(token * layer.out.columns);
      std::fill_n(gates, layer.out.columns, 1.f);
      gate_heads(layer, qkv, gates);
    }
  });
}

// Takes a block of tokens, which may be of several streams, through a recurrent mixer.
void Prompt::run_mixer(const Mixer& mixer, int64_t first, int64_t size) {
  multiply_all(mixer.in, mixer.in_count, size);
  for (int64_t begin = first; begin < first + size;) {
    const int64_t stream = begin / new_tokens_, end = std::min(first + size, (stream + 1) * new_tokens_);
    const MixerTokens tokens{qkv_.at((begin - first) * qkv_size_), end - begin, qkv_size_,
                             streams_[stream].states + mixer.first_state, mixed_.at(begin * mixer.out.columns),
                             new_tokens_ > 1 || indices_[begin] == 0};
    parallel(threads_, [&](const Worker& worker) {
      mix(mixer, tokens, mixer_scratch_.at(worker.index * mixer_scratch_size_), worker);
    });
    begin = end;
  }
}

// Attends, and multiplies the outputs of heads by their gates.
void Prompt::attend(const Layer& layer) {
  const int64_t size = layer.out.columns;
  prefill::attend(layer.attention, slots_of(layer), tokens_of(layer), threads_);
  if (!layer.gate_stride) return;
  for_each_token(count_, [&](int64_t token, const Worker&) {
    for (int64_t i = token * size; i < (token + 1) * size; ++i) attended_[i] *= gates_[i];
  });
}

// Writes the outputs of attention and mixer for a block of tokens.
void Prompt::multiply_out(const Layer& layer, int64_t first, int64_t size) {
  const int64_t hidden = model_.hidden_size;
  if (attends(layer)) {
    multiply(layer.out, attended_.at(first * layer.out.columns), size, attention_delta_.data(), hidden, in_bfloat16_,
             threads_);
  }
  if (!has_mixer(layer)) return;
  const Matrix& out = layer.mixer.out;
  float* delta = attends(layer) ? mixed_delta_.data() : attention_delta_.data();
  multiply(out, mixed_.at(first * out.columns), size, delta, hidden, in_bfloat16_, threads_);
  if (!attends(layer)) return;
  for_each_token(size, [&](int64_t i, const Worker&) {
    for (int64_t k = i * hidden; k < (i + 1) * hidden; ++k) attention_delta_[k] += delta[k];
  });
}
