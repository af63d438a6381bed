// What mixes tokens in a prompt: attention and recurrent mixers.

#include <algorithm>

#include "activation.h"
#include "altup.h"
#include "layer_parts.h"
#include "prompt.h"

// Selects the slots of a layer.
void Prompt::select_slots(const Layer& layer) {
  for (int64_t stream = 0; stream < stream_count_; ++stream) {
    slots_[stream] = streams_[stream].slots + layer.first_group;
  }
}

void Prompt::attend_slots(const Layer& layer) {
  prefill::attend(layer.attention, slots_of(layer), tokens_of(layer), threads_);
}

prefill::LayerSlots Prompt::slots_of(const Layer& layer) {
  const int64_t chunks = tokens_of(layer).chunks(new_tokens_);
  select_slots(layer);
  return {slots_.data(), layer.group_count, limits_ + layer.first_group * chunks, groups_ * chunks, chunks};
}

prefill::NewTokens Prompt::tokens_of(const Layer& layer) {
  const AttentionLayer& shape = layer.attention;
  const int64_t heads[] = {shape.query_heads, shape.kv_heads, shape.kv_heads};
  const int64_t sizes[] = {shape.head_size, shape.head_size, shape.value_size};
  for (int64_t i = 0; i < 3; ++i) {
    strides_[3 * i] = 0;
    strides_[3 * i + 1] = sizes[i];
    strides_[3 * i + 2] = heads[i] * sizes[i];
  }
  const bool in_bfloat16 = false;
  return {query_.data(),    keys_of_layer(layer).data(), values_of_layer(layer).data(), strides_,
          attended_.data(), counts_.data(),              stream_count_,                 new_tokens_,
          chunk_,           in_bfloat16,            starts_.data()};
}

// Writes the queries, keys and values of a layer, and takes the tokens through its recurrent mixer.
void Prompt::mix_tokens(const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  for_each_block([&](int64_t first, int64_t size) {
    for_each_token(size, [&](int64_t i, const Worker&) {
      float* x = x_.at((first + i) * hidden);
      if (model_.versions) altup::predict(model_, layer, versions_.at((first + i) * model_.versions * hidden), x);
      apply_norm(layer.before_attention, x, hidden, normed_.at(i * hidden));
    });
    if (attends(layer)) project(layer, first, size);
    if (has_mixer(layer)) run_mixer(layer.mixer, first, size);
    if (layer.laurel.right.weights) add_laurel(layer, first, size);
  });
}

// Writes the queries, keys and values of a block of tokens.
void Prompt::project(const Layer& layer, int64_t first, int64_t size) {
  const AttentionLayer& shape = layer.attention;
  for (int64_t i = 0; i < layer.qkv_count; ++i) {
    multiply(layer.qkv[i], normed_.data(), size, qkv_.at(layer.qkv_columns[i]), qkv_size_, in_bfloat16_, threads_);
  }
  if (layer.latent_count) project_latent(layer, size);
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    const int64_t token = first + i;
    float* qkv = qkv_.at(i * qkv_size_);
    clip(layer, {0, qkv_size(layer)}, qkv);
    Angles& angles = angles_[worker.index];
    for (int64_t head = 0; layer.gate_kind != kNoGate && head < shape.query_heads; ++head) {
      std::copy_n(qkv + layer.gate_offset + head * layer.gate_stride, layer.gate_size,
                  gates_.at(token * gate_width_ + head * layer.gate_size));
    }
    const Heads queries = queries_of(layer, qkv, indices_[token]);
    for (int64_t head = 0; head < shape.query_heads; ++head) {
      prepare_head(layer, queries, head, indices_[token], angles,
                   query_.at((token * shape.query_heads + head) * shape.head_size));
    }
    if (layer.kv_source != index_of(layer)) return;
    const Heads keys = keys_of(layer, qkv);
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      const int64_t row = token * shape.kv_heads + head;
      prepare_head(layer, keys, head, indices_[token], angles, keys_of_layer(layer).at(row * shape.head_size));
      prepare_value(layer, qkv, head, values_of_layer(layer).at(row * shape.value_size));
    }
  });
}

// Takes a block of tokens, which may be of several streams, through a recurrent mixer.
void Prompt::run_mixer(const Mixer& mixer, int64_t first, int64_t size) {
  int64_t column = 0;
  for (int64_t i = 0; i < mixer.in_count; column += mixer.in[i++].rows) {
    multiply(mixer.in[i], normed_.data(), size, qkv_.at(column), qkv_size_, in_bfloat16_, threads_);
  }
  for (int64_t begin = first; begin < first + size;) {
    const int64_t stream = stream_of_[begin], end = std::min(first + size, starts_[stream + 1]);
    const MixerTokens tokens{qkv_.at((begin - first) * qkv_size_), end - begin, qkv_size_,
                             streams_[stream].states + mixer.first_state, mixed_.at(begin * mixer.out.columns),
                             starts_[stream + 1] - starts_[stream] > 1 || indices_[begin] == 0};
    parallel(threads_, [&](const Worker& worker) {
      mix(mixer, tokens, mixer_scratch_.at(worker.index * mixer_scratch_size_), worker);
    });
    begin = end;
  }
}

// Computes for a block what comes from latent vectors.
void Prompt::project_latent(const Layer& layer, int64_t size) {
  for (int64_t i = 0; i < layer.latent_count; ++i) {
    const Projection& latent = layer.latent[i];
    const int64_t columns = latent.matrix.columns;
    for_each_token(size, [&](int64_t token, const Worker&) {
      apply_norm(latent.norm, qkv_.at(token * qkv_size_ + latent.from), columns, latents_.at(token * columns));
    });
    multiply(latent.matrix, latents_.data(), size, qkv_.at(latent.to), qkv_size_, in_bfloat16_, threads_);
  }
}

// Applies the gate and the norm of the attention's output.
void Prompt::gate(const Layer& layer) {
  if (layer.gate_kind == kNoGate && layer.attended_norm.kind == kNoNorm) return;
  const int64_t size = layer.out.columns;
  Layer gated = layer;  // the gate's values follow one another here
  gated.gate_offset = 0, gated.gate_stride = layer.gate_size;
  for_each_token(count_, [&](int64_t token, const Worker&) {
    float* attended = attended_.at(token * size);
    apply_gate(gated, gates_.at(token * gate_width_), attended);
    apply_norm(layer.attended_norm, attended, size, attended);
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
