#include "prompt.h"

#include <algorithm>
#include <memory>

#include "activation.h"
#include "altup.h"
#include "check.h"
#include "copied.h"
#include "layer_parts.h"
#include "threads.h"

Prompt::Prompt(const Model& model, const Stream* streams, int64_t count, const int64_t* lengths, int64_t new_tokens,
               int64_t chunk, const int64_t* limits, int64_t threads)
    : model_(model),
      streams_(streams),
      stream_count_(count),
      new_tokens_(new_tokens),
      chunk_(chunk > 0 ? std::min(chunk, new_tokens) : new_tokens),
      limits_(limits),
      threads_(std::max<int64_t>(threads, 1)),
      slots_(count),
      counts_(count, new_tokens),
      starts_(count + 1) {
  if (lengths) counts_.assign(lengths, lengths + count);
  for (int64_t stream = 0; stream < count; ++stream) {
    starts_[stream + 1] = starts_[stream] + counts_[stream];
    stream_of_.insert(stream_of_.end(), counts_[stream], int32_t(stream));
  }
  count_ = starts_[count];
  const Layer& last = model.layers[model.layer_count - 1];
  groups_ = last.first_group + last.group_count;
  buffers_.resize(model.layer_count);
  int64_t shared = 0;
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const int64_t source = model.layers[index].kv_source;
    if (source != index && !buffers_[source]) buffers_[source] = ++shared;
  }
  keys_.resize(shared + 1), values_.resize(shared + 1);
  for (int64_t i = 0; i < model.layer_count; ++i) in_bfloat16_ |= model.layers[i].attention.in_bfloat16 != 0;
}

bool Prompt::fits() {
  return std::all_of(model_.layers, model_.layers + model_.layer_count, [this](const Layer& layer) {
    return !attends(layer) || prefill::fits(layer.attention, slots_of(layer), tokens_of(layer));
  });
}

void Prompt::reserve() {
  const int64_t hidden = model_.hidden_size, block = std::min(count_, kBlock);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    const AttentionLayer& shape = layer.attention;
    qkv_size_ = std::max({qkv_size_, qkv_size(layer), projected_size(layer.mixer)});
    mixer_scratch_size_ = std::max(mixer_scratch_size_, scratch_size(layer.mixer, block));
    mixed_.reserve(count_ * layer.mixer.out.columns);
    mixed_delta_.reserve(attends(layer) && has_mixer(layer) ? block * hidden : 0);
    inner_ = std::max({inner_, layer.down.columns, layer.embedding_gate.rows, layer.laurel.left.rows});
    expert_inner_ = std::max(expert_inner_, layer.experts.inner_size);
    if (layer.experts.output_norm.kind != kNoNorm) expert_sums_.reserve(block * hidden);
    for (int64_t i = 0; i < layer.latent_count; ++i) latent_ = std::max(latent_, layer.latent[i].matrix.columns);
    if (layer.gate_kind != kNoGate) gate_width_ = std::max(gate_width_, shape.query_heads * layer.gate_size);
    experts_ = std::max(experts_, layer.experts.router.rows), chosen_ = std::max(chosen_, layer.experts.chosen);
    query_.reserve(count_ * shape.query_heads * shape.head_size);
    keys_of_layer(layer).reserve(count_ * shape.kv_heads * shape.head_size);
    values_of_layer(layer).reserve(count_ * shape.kv_heads * shape.value_size);
    attended_.reserve(count_ * shape.query_heads * shape.value_size);
  }
  x_.reserve(count_ * hidden);
  versions_.reserve(count_ * model_.versions * hidden);
  projected_versions_.reserve(model_.versions ? block * (model_.versions - 1) * hidden : 0);
  indices_.reserve(count_);
  qkv_.reserve(block * qkv_size_);
  attention_delta_.reserve(block * hidden);
  mlp_delta_.reserve(block * hidden);
  const int64_t expert_rows = std::min(block * chosen_, kExpertRows);
  gate_.reserve(std::max(block * inner_, expert_rows * 2 * expert_inner_));
  latents_.reserve(block * latent_);
  gates_.reserve(count_ * gate_width_);
  layer_embeddings_.reserve(count_ * model_.layer_embedding.columns);
  layer_projections_.reserve(layer_embeddings_.size());
  up_.reserve(std::max(block * inner_, expert_rows * expert_inner_));
  scratch_.reserve(threads_ * hidden);
  mixer_scratch_.reserve(threads_ * mixer_scratch_size_);
  normed_.reserve(block * hidden);
  gathered_.reserve(expert_rows * hidden);
  expert_delta_.reserve(gathered_.size());
  router_logits_.reserve(block * experts_);
  scores_.reserve(threads_ * 2 * experts_);
  choices_.reserve(block * chosen_);
  rows_.reserve(choices_.size());
  tokens_by_expert_.resize(experts_);
  first_rows_.resize(experts_);
  angles_.resize(threads_);
  for (Angles& angles : angles_) angles.reserve(model_);
}

void Prompt::run(const int64_t* tokens, int64_t keep, float* logits, float* copied, float* projected) {
  begin(tokens);
  for (int64_t index = 0; index < model_.layer_count; ++index) run_layer(index, keep, logits, copied, projected);
}

void Prompt::begin(const int64_t* tokens) {
  check_tokens(model_, tokens, count_);
  reserve();
  embed(tokens);
}

void Prompt::run_layer(int64_t index, int64_t keep, float* logits, float*& copied, float*& projected) {
  const Layer& layer = model_.layers[index];
  const bool is_last = index + 1 == model_.layer_count;
  const AttentionLayer& shape = layer.attention;
  if (attends(layer) || has_mixer(layer)) mix_tokens(layer);
  if (copied && attends(layer)) {
    measure_copied(shape, query_.data(), keys_of_layer(layer).data(), new_tokens_, copied, threads_);
    copied += shape.kv_heads;
  }
  if (projected && attends(layer)) {
    projected = std::copy_n(query_.data(), count_ * shape.query_heads * shape.head_size, projected);
    projected = std::copy_n(keys_of_layer(layer).data(), count_ * shape.kv_heads * shape.head_size, projected);
  }
  if (attends(layer)) {
    attend_slots(layer);
    gate(layer);
  }
  if (is_last) drop_all_but(keep);
  finish(layer);
  if (!is_last) return;
  output(logits);
  advance();
}

void Prompt::embed(const int64_t* tokens) {
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.embedding_scale);
  for_each_token(count_, [&](int64_t token, const Worker&) {
    const int64_t stream = stream_of_[token];
    indices_[token] = int32_t(*streams_[stream].slots->seen + token - starts_[stream]);
    float* x = x_.at(token * hidden);
    read_row(model_.embedding, tokens[token], x);
    for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
    if (model_.learned_positions) {
      const float* position = model_.learned_positions + (indices_[token] + model_.learned_offset) * hidden;
      for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
    }
    apply_norm(model_.embedding_norm, x, hidden, x);
  });
  if (model_.layer_embedding.weights) embed_for_layers(tokens);
  if (model_.versions) split_versions();
}

void Prompt::embed_for_layers(const int64_t* tokens) {
  const int64_t size = model_.layer_embedding.columns;
  for_each_token(count_, [&](int64_t token, const Worker&) {
    read_row(model_.layer_embedding, tokens[token] < model_.layer_embedding.rows ? tokens[token] : 0,
             layer_embeddings_.at(token * size));
  });
  for_each_block([&](int64_t first, int64_t count) {
    multiply(model_.layer_projection, x_.at(first * model_.hidden_size), count, layer_projections_.at(first * size),
             size, false, threads_);
  });
}

// Moves the last `keep` tokens of each stream to the front: after the last layer has mixed tokens no others are needed.
void Prompt::drop_all_but(int64_t keep) {
  const int64_t hidden = model_.hidden_size;
  const Layer& last = model_.layers[model_.layer_count - 1];
  const auto keep_rows = [](const Buffer<float>& rows, int64_t size, int64_t from, int64_t to, int64_t count) {
    std::memmove(rows.at(to * size), rows.at(from * size), count * size * sizeof(float));
  };
  for (int64_t stream = 0; stream < stream_count_; ++stream) {
    const int64_t from = starts_[stream + 1] - keep, to = stream * keep;
    keep_rows(x_, hidden, from, to, keep);
    if (model_.versions) keep_rows(versions_, model_.versions * hidden, from, to, keep);
    if (attends(last)) keep_rows(attended_, last.out.columns, from, to, keep);
    if (has_mixer(last)) keep_rows(mixed_, last.mixer.out.columns, from, to, keep);
    if (const int64_t size = model_.layer_embedding.columns) {
      keep_rows(layer_embeddings_, size, from, to, keep);
      keep_rows(layer_projections_, size, from, to, keep);
    }
  }
  count_ = stream_count_ * keep;
}

// Adds a layer's attention, mixer and MLP to the residual stream.
void Prompt::finish(const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.residual_scale);
  const bool mixes = attends(layer) || has_mixer(layer);
  for_each_block([&](int64_t first, int64_t size) {
    if (mixes) multiply_out(layer, first, size);
    for_each_token(size, [&](int64_t i, const Worker& worker) {
      float *x = x_.at((first + i) * hidden), *scratch = scratch_.at(worker.index * hidden);
      const float* delta = attention_delta_.at(i * hidden);
      if (mixes && !layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
      if (layer.laurel.right.weights) ::scale(layer.laurel.scale, hidden, x);
      apply_norm(layer.before_mlp, x, hidden, normed_.at(i * hidden));
      if (mixes && layer.parallel) add_normed(layer.after_attention, delta, hidden, scale, x, scratch);
    });
    if (!has_mlp(layer)) return;
    feed_mlp(layer, size);
    if (layer.experts.router.weights) feed_experts(layer, first, size);
    for_each_token(size, [&](int64_t i, const Worker& worker) {
      add_normed(layer.after_mlp, mlp_delta_.at(i * hidden), hidden, scale, x_.at((first + i) * hidden),
                 scratch_.at(worker.index * hidden));
    });
    if (layer.embedding_gate.weights) add_embedding(layer, first, size);
    if (layer.output_scale == 1) return;
    for_each_token(size, [&](int64_t i, const Worker&) {
      ::scale(layer.output_scale, hidden, x_.at((first + i) * hidden));
    });
  });
}

void Prompt::output(float* logits) {
  const int64_t hidden = model_.hidden_size, vocabulary = model_.vocab_size;
  if (model_.versions) merge_versions();
  for_each_block([&](int64_t first, int64_t size) {
    float* block = logits + first * vocabulary;
    for_each_token(size, [&](int64_t i, const Worker&) {
      apply_norm(model_.norm, x_.at((first + i) * hidden), hidden, normed_.at(i * hidden));
    });
    multiply(model_.output, normed_.data(), size, block, vocabulary, rounds_logits_, threads_);
    for_each_token(size, [&](int64_t i, const Worker&) {
      scale_logits(model_, {0, vocabulary}, block + i * vocabulary);
    });
  });
}

// Advances the token counters, of which several groups may share one.
void Prompt::advance() {
  for (int64_t stream = 0; stream < stream_count_; ++stream) {
    const int64_t seen = indices_[starts_[stream]] + starts_[stream + 1] - starts_[stream];
    for (int64_t group = 0; group < groups_; ++group) *streams_[stream].slots[group].seen = seen;
  }
}

extern "C" {

// Takes `new_tokens` of each of `count` streams through a model, and evicts; see `Prompt`. `chunk` 0 is for all tokens.
// Tokens must be in the vocabulary; those in `streams` are ignored. Tables of rotations must reach the distances of as
// many tokens as there are in all slots and in a chunk. `copied` gets the attention of every KV head to the copies in
// the tokens of a single stream, which come twice and are rotated by their positions (copied.h); null for none. So does
// `projected`, which gets queries and keys (`Prompt::run`).
//
// Returns 0, 2 if there are too few slots, or what `code_of` does: with nothing changed, unless it is out of memory.
int64_t h2o_forward(const Model* model, const Stream* streams, int64_t count, const int64_t* tokens, int64_t new_tokens,
                    int64_t chunk, const int64_t* limits, int64_t keep, float* logits, float* copied, float* projected,
                    int64_t threads) {
  return code_of([&] {
    check_streams(*model, streams, count);
    Prompt prompt(*model, streams, count, nullptr, new_tokens, chunk, limits, threads);
    if (!prompt.fits()) return 2;
    prompt.run(tokens, keep, logits, copied, projected);
    return 0;
  });
}

// Begins the same for `keep` 1, to be taken layer by layer with `h2o_prompt_layer`; `lengths` [count] are the tokens of
// each stream, `new_tokens` those of the longest one. Until `h2o_prompt_close`, model and streams must stay as they are.
int64_t h2o_prompt_open(const Model* model, const Stream* streams, int64_t count, const int64_t* lengths,
                        const int64_t* tokens, int64_t new_tokens, int64_t chunk, const int64_t* limits,
                        int64_t threads, void** opened) {
  return code_of([&] {
    check_streams(*model, streams, count);
    auto prompt = std::make_unique<Prompt>(*model, streams, count, lengths, new_tokens, chunk, limits, threads);
    if (!prompt->fits()) return 2;
    prompt->begin(tokens);
    *opened = prompt.release();
    return 0;
  });
}

// See `Prompt::run_layer`. Returns 0, or 1 if out of memory: then the slots are undefined.
int64_t h2o_prompt_layer(void* opened, int64_t index, float* logits) {
  return code_of([&] {
    float *copied = nullptr, *projected = nullptr;
    static_cast<Prompt*>(opened)->run_layer(index, 1, logits, copied, projected);
    return 0;
  });
}

void h2o_prompt_close(void* opened) { delete static_cast<Prompt*>(opened); }

}  // extern "C"
