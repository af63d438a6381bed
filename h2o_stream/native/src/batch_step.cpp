#include "batch_step.h"

BatchStep::BatchStep(const Model& model, const Stream* streams, int64_t count, int64_t threads)
    : Prompt(model, streams, count, nullptr, 1, 1, nullptr, threads), tokens_(count) {
  rounds_logits_ = in_bfloat16_;
  for (int64_t stream = 0; stream < count; ++stream) tokens_[stream] = streams[stream].token;
}

void BatchStep::run(float* logits) {
  reserve_attention();
  Prompt::run(tokens_.data(), 1, logits, nullptr);
}

void BatchStep::reserve_attention() {
  int64_t slots = 0, query_heads = 0, value_size = 0;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    query_heads = std::max(query_heads, layer.attention.query_heads);
    value_size = std::max(value_size, layer.attention.value_size);
    for (int64_t stream = 0; stream < stream_count_; ++stream) {
      for (int64_t group = 0; group < layer.group_count; ++group) {
        slots = std::max(slots, streams_[stream].slots[layer.first_group + group].slot_count);
      }
    }
  }
  attention_.reserve(stream_count_, query_heads, value_size, slots, threads_);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    if (attends(model_.layers[index])) attention_.reserve_scratch(model_.layers[index].attention);
  }
  factors_.reserve(stream_count_ * attention_.factor_count());
}

// Attends to the slots of all streams and evicts; a thread has some slots of some streams.
void BatchStep::attend_slots(const Layer& layer) {
  const AttentionLayer& shape = layer.attention;
  const Buffer<float>&keys = keys_of_layer(layer), &values = values_of_layer(layer);
  const int64_t heads = shape.query_heads / shape.kv_heads, size = shape.head_size, padded = simd::padded(size);
  select_slots(layer);
  attention_.set_layer(shape, slots_.data(), layer.group_count, stream_count_, indices_.data());
  const auto factors = [&](int64_t stream) { return factors_.at(stream * attention_.factor_count()); };
  parallel(threads_, [&](const Worker& worker) {
    attention_.attend(worker, [&](int64_t stream, int64_t head, float* queries, float* key, float* value) {
      for (int64_t q = 0; q < heads; ++q) {
        std::copy_n(query_.at((stream * shape.query_heads + head * heads + q) * size), size, queries + q * padded);
      }
      if (!key) return;
      std::copy_n(keys.at((stream * shape.kv_heads + head) * size), size, key);
      std::copy_n(values.at((stream * shape.kv_heads + head) * shape.value_size), shape.value_size, value);
    });
    worker.barrier();
    const Range streams = worker.partition(stream_count_);
    for (int64_t stream = streams.begin; stream < streams.end; ++stream) {
      attention_.merge(stream, attended_.at(stream * shape.query_heads * shape.value_size), factors(stream));
    }
    worker.barrier();
    attention_.update_scores(worker, factors);
    worker.barrier();
    attention_.evict(worker);
  });
}
