// Decode attention of one layer, for models whose other modules run in torch.

#include "attention.h"
#include "check.h"

namespace {

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
    for (int64_t i = 0; i < groups; ++i) max_slots = std::max(max_slots, by_stream[stream][i].slot_count);
  }
  attention.reserve(streams, layer->query_heads, layer->value_size, max_slots, threads);
  attention.reserve_scratch(*layer);
  attention.set_layer(*layer, by_stream.data(), groups, streams, token_indices.data());
  const int64_t heads = layer->query_heads / layer->kv_heads, size = layer->head_size, value_size = layer->value_size;
  const int64_t output_size = layer->query_heads * value_size;
  const bool is_bfloat16 = layer->in_bfloat16;
  factors.reserve(streams * attention.factor_count());
  outputs.reserve(streams * output_size);
  // Other threads would see their own thread_local instances, so pass references.
  DecodeAttention& decoder = attention;
  float *all_factors = factors.data(), *all_outputs = outputs.data();
  parallel(threads, [&, all_factors, all_outputs](const Worker& worker) {
    decoder.attend(worker, [&](int64_t stream, int64_t head, float* queries, float* new_key, float* new_value) {
      const int64_t first = stream * layer->kv_heads + head;
      for (int64_t q = 0; q < heads; ++q) {
        store::read(query, is_bfloat16, (first * heads + q) * size, size, queries + q * simd::padded(size));
      }
      if (!new_key) return;
      store::read(key, is_bfloat16, first * size, size, new_key);
      store::read(value, is_bfloat16, first * value_size, value_size, new_value);
    });
    worker.barrier();
    const Range range = worker.partition(streams);
    for (int64_t stream = range.begin; stream < range.end; ++stream) {
      float* row = all_outputs + stream * output_size;
      decoder.merge(stream, row, all_factors + stream * decoder.factor_count());
      store::write(row, is_bfloat16, stream * output_size, output_size, output);
    }
    worker.barrier();
    decoder.update_scores(worker, [&](int64_t stream) { return all_factors + stream * decoder.factor_count(); });
    worker.barrier();
    decoder.evict(worker);
  });
}

}  // namespace

// query [streams][query_heads][D], key and value [streams][kv_heads][D], output [streams][query_heads][value_size], all
// in the dtype of the cached keys; slots [streams][groups]. Returns 0 or what `code_of`
// does, with nothing changed.
extern "C" int64_t h2o_decode(const AttentionLayer* layer, const Slots* slots, int64_t groups, int64_t streams,
                              const void* query, const void* key, const void* value, void* output, int64_t threads) {
  return code_of([&] {  // all buffers are created before any state changes
    for (int64_t i = 0; i < streams; ++i) check_slots(*layer, slots + i * groups, groups);
    decode(layer, slots, groups, streams, query, key, value, output, threads);
    return 0;
  });
}
