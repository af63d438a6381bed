// Decode attention of one layer, for models whose other modules run in torch.

#include "attention.h"

#include <exception>

namespace {

void load_row(const void* from, int64_t first, bool in_bfloat16, int64_t count, float* row) {
  for (int64_t i = 0; i < count; ++i) {
    row[i] = in_bfloat16 ? simd::to_float(static_cast<const simd::BFloat16*>(from)[first + i])
                         : static_cast<const float*>(from)[first + i];
  }
}

void decode(const AttentionLayer* layer, const Slots* slots, int64_t groups, int64_t streams, const void* query,
            const void* key, const void* value, void* output, int64_t threads) {
  thread_local DecodeAttention attention;
  thread_local std::vector<const Slots*> by_stream;
  thread_local std::vector<int32_t> token_indices;
  thread_local Buffer<float> factors, outputs;
  int64_t max_slots = 0;
  by_stream.resize(streams), token_indices.resize(streams);
  for (int64_t stream = 0; stream < streams; ++stream) {
    by_stream[stream] = slots + stream * groups;
    token_indices[stream] = int32_t(*by_stream[stream]->seen);
    for (int64_t group = 0; group < groups; ++group)
      max_slots = std::max(max_slots, by_stream[stream][group].slot_count);
  }
  attention.reserve(streams, layer->query_heads, layer->value_size, max_slots, threads);
  attention.reserve_scratch(*layer);
  attention.set_layer(*layer, by_stream.data(), groups, streams, token_indices.data());
  const int64_t heads = layer->query_heads / layer->kv_heads, size = layer->head_size, value_size = layer->value_size;
  const int64_t output_size = layer->query_heads * value_size;
  factors.reserve(streams * attention.factor_count());
  outputs.reserve(streams * output_size);
  // Other threads would see their own thread_local instances, so pass references.
  DecodeAttention& shared_attention = attention;
  float *all_factors = factors.data(), *all_outputs = outputs.data();
  parallel(threads, [&, all_factors, all_outputs](const Worker& worker) {
    shared_attention.attend(
        worker, [&](int64_t stream, int64_t head, float* queries, float* new_key, float* new_value) {
          const int64_t first = stream * layer->kv_heads + head;
          for (int64_t q = 0; q < heads; ++q) {
            load_row(query, (first * heads + q) * size, layer->in_bfloat16, size, queries + q * simd::padded(size));
          }
          if (!new_key) return;
          load_row(key, first * size, layer->in_bfloat16, size, new_key);
          load_row(value, first * value_size, layer->in_bfloat16, value_size, new_value);
        });
    worker.barrier();
    const Range range = worker.partition(streams);
    for (int64_t stream = range.begin; stream < range.end; ++stream) {
      float* row = all_outputs + stream * output_size;
      shared_attention.merge(stream, row, all_factors + stream * shared_attention.factor_count());
      for (int64_t i = 0; i < output_size; ++i) {
        const int64_t element = stream * output_size + i;
        if (layer->in_bfloat16) {
          simd::from_float(row[i], static_cast<simd::BFloat16*>(output)[element]);
        } else {
          static_cast<float*>(output)[element] = row[i];
        }
      }
    }
    worker.barrier();
    shared_attention.update_scores(
        worker, [&](int64_t stream) { return all_factors + stream * shared_attention.factor_count(); });
    worker.barrier();
    shared_attention.evict(worker);
  });
}

}  // namespace

// query [streams][query_heads][D], key and value [streams][kv_heads][D], output [streams][query_heads][value_size], all
// in the dtype of the cached keys; slots [streams][groups]. Returns 0, or 1 if out of memory, with nothing changed.
extern "C" int64_t h2o_decode(const AttentionLayer* layer, const Slots* slots, int64_t groups, int64_t streams,
                              const void* query, const void* key, const void* value, void* output, int64_t threads) {
  try {
    decode(layer, slots, groups, streams, query, key, value, output, threads);
    return 0;
  } catch (const std::exception&) {  // all buffers and threads are created before any state changes
    return 1;
  }
}
