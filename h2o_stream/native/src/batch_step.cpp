#include "batch_step.h"

BatchStep::BatchStep(const Model& model, const Stream* streams, int64_t count, int64_t threads)
    : Prompt(model, streams, count, nullptr, 1, 1, nullptr, threads), tokens_(count) {
  rounds_logits_ = in_bfloat16_;
  for (int64_t stream = 0; stream < count; ++stream) tokens_[stream] = streams[stream].token;
}

void BatchStep::run(float* logits) {
  reserve_attention();
  Prompt::run(tokens_.data(), 1, logits, nullptr, nullptr);
}

void BatchStep::reserve_attention() {
  int64_t slots = 0, query_heads = 0, kv_heads = 0, value_size = 0;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    query_heads = std::max(query_heads, layer.attention.query_heads);
    kv_heads = std::max(kv_heads, layer.attention.kv_heads);
    value_size = std::max(value_size, layer.attention.value_size);
    for (int64_t stream = 0; stream < stream_count_; ++stream) {
      for (int64_t group = 0; group < layer.group_count; ++group) {
        slots = std::max(slots, streams_[stream].slots[layer.first_group + group].slot_count);
      }
    }
  }
  attention_.reserve(threads_, query_heads, value_size, slots, threads_);
  attention_.reserve_heads(stream_count_ * kv_heads);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    if (attends(model_.layers[index])) attention_.reserve_scratch(model_.layers[index].attention);
  }
}

// Attends to the slots and evicts; a thread has some heads of some streams.
void BatchStep::attend_slots(const Layer& layer) {
  const AttentionLayer& shape = layer.attention;
  const Buffer<float>&keys = keys_of_layer(layer), &values = values_of_layer(layer);
  const int64_t heads = shape.query_heads / shape.kv_heads, size = shape.head_size, padded = simd::padded(size);
  select_slots(layer);
  attention_.set_layer(shape, slots_.data(), layer.group_count, stream_count_, indices_.data());
  parallel(threads_, [&](const Worker& worker) {
    const auto prepare = [&](int64_t stream, int64_t head, float* queries, float* key, float* value) {
      for (int64_t q = 0; q < heads; ++q) {
        std::copy_n(query_.at((stream * shape.query_heads + head * heads + q) * size), size, queries + q * padded);
      }
      if (!key) return;
      std::copy_n(keys.at((stream * shape.kv_heads + head) * size), size, key);
      std::copy_n(values.at((stream * shape.kv_heads + head) * shape.value_size), shape.value_size, value);
    };
    attention_.step(worker, prepare, attended_.data());
  });
}
