// Decode attention: one new token per stream over the slots of one layer.
//
// Slots are processed in fixed-size blocks, so results do not depend on the number of threads. Every block has its own
// softmax, and the blocks are merged in order, as in split-K flash decoding. A token goes through `attend`, `merge` for each stream, `update_scores` and `evict`, between which
// the caller puts barriers; `step` takes each head of many streams through all of them.

#pragma once

#include "buffer.h"
#include "fixed_point.h"
#include "head_slots.h"
#include "threads.h"

#include <vector>

using slot_kernels::kBlockSlots;

class DecodeAttention {
 public:
  // Allocates buffers for these sizes; for `step` `streams` are the threads.
  void reserve(int64_t streams, int64_t query_heads, int64_t value_size, int64_t slots, int64_t threads);

  // Allocates per-thread scratch for a layer of this shape. Call `reserve` first.
  void reserve_scratch(const AttentionLayer& layer);

  // Allocates for `step` of so many heads of all streams. Call `reserve` first.
  void reserve_heads(int64_t heads);

  // Selects a layer. `slots` is [streams][groups]; the groups of stream b start at slots[b].
  void set_layer(const AttentionLayer& layer, const Slots* const* slots, int64_t groups, int64_t streams,
                 const int32_t* token_indices) {
    layer_ = &layer, slots_ = slots, groups_ = groups, streams_ = streams, token_indices_ = token_indices;
  }

  // Writes the new tokens into their slots and attends to this thread's blocks. `prepare(stream, head, queries, key,
  // value)` writes a head's rotated queries and, unless null, its key and value.
  template <class Prepare>
  void attend(const Worker& worker, Prepare prepare) {
    for_each_range(worker, [&](int64_t stream, const HeadSlots& head, Range range) {
      attend_range({stream, stream, token_indices_[stream]}, head, range, scratch_[worker.index], prepare);
    });
  }

  // Takes this thread's heads through all phases, each while its slots are in the cache of a processor. Writes outputs
  // [streams][query_heads][value_size]. `prepare` as for `attend`.
  template <class Prepare>
  void step(const Worker& worker, Prepare prepare, float* outputs) {
    const std::vector<Place>& places = scratch_[worker.index].places;
    collect_heads(worker);
    for (size_t i = 0; i < places.size(); ++i) {
      step_head(worker, places[i], i + 1 < places.size() ? &places[i + 1] : nullptr, prepare, outputs);
    }
  }

  // The same for `tokens` tokens of a single stream, one after another; the slots of each are those of that stream.
  // Notes what all but the first one change.
  template <class Prepare>
  void pass(const Worker& worker, int64_t tokens, Prepare prepare, Journal& journal, float* outputs) {
    collect_heads(worker);
    for (const Place& place : scratch_[worker.index].places) {
      for (int64_t token = 0; token < tokens; ++token) {
        const Place at{token, slots_[token] + (place.slots - slots_[0]), place.local_head};
        step_head(worker, at, nullptr, prepare, outputs, {token ? &journal : nullptr, token});
      }
    }
  }

  // Writes a stream's attention output [query_heads][value_size], and the factor on each block's softmax. Of a single
  // stream, every thread may do so.
  void merge(int64_t stream, float* output, float* factors);
  int64_t factor_count() const { return query_heads_ * blocks_; }

  // Updates the scores of this thread's slots; `factors(stream)` returns what `merge` wrote.
  template <class Factors>
  void update_scores(const Worker& worker, Factors factors) const {
    if (!has_scores()) return;
    for_each_range(worker, [&](int64_t stream, const HeadSlots& head, Range range) {
      update_scores({stream, stream, token_indices_[stream]}, head, range, factors(stream));
    });
  }

  // Evicts tokens from this thread's heads and advances the token counters.
  void evict(const Worker& worker);

 private:
  // A token, and where its intermediate results are: in rows of streams, or in `step` of threads.
  struct Row {
    int64_t stream, number;
    int32_t token_index;
  };

  // A head of a stream.
  struct Place {
    int64_t stream;
    const Slots* slots;
    int64_t local_head;
  };

  // Per-thread buffers.
  struct Scratch {
    Buffer<float> queries, key, value, values, rotated, key_params, accum, worth, factors;
    std::vector<Place> places;
    Buffer<int32_t> distances;
    Buffer<simd::Floats> products;
    fixed_point::Rounded rounded;
  };

  bool has_scores() const { return layer_->policy == kAccumulated || layer_->policy == kTova; }

  // Takes a head through all phases, for which see `step`, and prefetches the next one, if any.
  template <class Prepare>
  void step_head(const Worker& worker, const Place& place, const Place* next, Prepare prepare, float* outputs,
                 JournalPage page = {}) {
    Scratch& scratch = scratch_[worker.index];
    const auto [stream, slots, local_head] = place;
    const Row row{stream, worker.index, token_indices_[stream]};
    const HeadSlots head(*layer_, *slots, local_head, page);
    if (page.journal) head.begin(row.token_index);
    attend_range(row, head, {0, head.count}, scratch, prepare);
    merge(row, *slots, local_head, outputs + stream * layer_->query_heads * layer_->value_size,
          scratch.factors.data());
    if (has_scores()) update_scores(row, head, {0, head.count}, scratch.factors.data());
    if (next) prefetch_head(*next);
    evict(row, head, scratch);
  }

  // Writes a new token into its slot, if that is in a range, and attends to the range.
  template <class Prepare>
  void attend_range(const Row& row, const HeadSlots& head, Range range, Scratch& scratch, Prepare prepare) {
    const int64_t slot = head.slot_for(row.token_index);
    const bool holds_new = slot >= range.begin && slot < range.end;
    prepare(row.stream, head.kv_head, scratch.queries.data(), holds_new ? scratch.key.data() : nullptr,
            holds_new ? scratch.value.data() : nullptr);
    clear_padding(scratch.queries.data(), head.query_heads());
    head.rank.visit([range](auto* ranks) {
      for (int64_t i = range.begin; i < range.end; ++i) ++ranks[i];
    });
    if (holds_new) insert_token(head, slot, row.token_index, scratch.key.data(), scratch.value.data());
    if (layer_->kv_bits < 16) {
      store::key_params(head.store.key_range, layer_->head_size, layer_->kv_bits, scratch.key_params.data(),
                        scratch.key_params.at(layer_->head_size));
      if (fixed_point::fits(*layer_)) {
        scratch.rounded.round(*layer_, scratch.key_params.data(), scratch.queries.data(), head.query_heads());
      }
    }
    for (int64_t begin = range.begin; begin < range.end; begin += kBlockSlots) {
      attend_block(row, head, {begin, std::min(begin + kBlockSlots, range.end)}, scratch);
    }
  }

  // Notes the heads that are this thread's in `step`: about as many slots as those of any other thread.
  void collect_heads(const Worker& worker);

  // Prefetches what is read of a head first.
  void prefetch_head(const Place& place) const;

  // Zeros behind each query, where a layer with larger heads may have left numbers.
  void clear_padding(float* queries, int64_t heads) const {
    const int64_t size = layer_->head_size, stride = simd::padded(size);
    for (int64_t q = 0; q < heads; ++q) std::fill(queries + q * stride + size, queries + (q + 1) * stride, 0.f);
  }

  static void insert_token(const HeadSlots& head, int64_t slot, int32_t token_indices, const float* key,
                           const float* value);
  void attend_block(const Row& row, const HeadSlots& head, Range slots, Scratch& scratch);
  void scale_and_mask(const HeadSlots& head, Range slots, int32_t token_indices, float* logits) const;
  void accumulate_values(const Row& row, const HeadSlots& head, Range exact, Range quantized, Scratch& scratch);
  void accumulate_quantized(const HeadSlots& head, Range quantized, const float* probs, Scratch& scratch) const;
  void merge(const Row& row, const Slots& slots, int64_t local_head, float* output, float* factors) const;
  void merge_head(int64_t first_slot, int64_t blocks, float sink, float* output, float* factors) const;
  void update_scores(const Row& row, const HeadSlots& head, Range slots, const float* factors) const;
  void evict(const Row& row, const HeadSlots& head, Scratch& scratch);

  float* probs(const Row& row, int64_t query_head) const {
    return probs_.at((row.number * query_heads_ + query_head) * max_slots_);
  }
  int64_t block_number(const Row& row, int64_t query_head, int64_t block) const {
    return (row.number * query_heads_ + query_head) * blocks_ + block;
  }

  // Calls `work` for every head of which this thread has some slots, in whole blocks.
  template <class Function>
  void for_each_range(const Worker& worker, Function function) const {
    int64_t total = 0;
    for_each_head([&](int64_t, const Slots& slots, int64_t) { total += slots.slot_count; });
    const Range range = worker.partition(total);  // before its bounds move to the nearest blocks
    int64_t first_slot = 0;
    for_each_head([&](int64_t stream, const Slots& slots, int64_t local_head) {
      const int64_t begin = nearest_block(range.begin - first_slot, slots.slot_count),
                    end = nearest_block(range.end - first_slot, slots.slot_count);
      first_slot += slots.slot_count;
      if (begin < end) function(stream, HeadSlots(*layer_, slots, local_head), Range{begin, end});
    });
  }

  // The start of a block that is nearest to a slot, or the end of all `count` slots.
  static int64_t nearest_block(int64_t slot, int64_t count) {
    if (slot >= count) return count;
    return slot <= 0 ? 0 : std::min((slot + kBlockSlots / 2) / kBlockSlots * kBlockSlots, count);
  }

  template <class Visit>
  void for_each_head(Visit visit) const {
    for (int64_t stream = 0; stream < streams_; ++stream) {
      for (int64_t group = 0; group < groups_; ++group) {
        const Slots& slots = slots_[stream][group];
        for (int64_t local_head = 0; local_head < slots.head_count; ++local_head) visit(stream, slots, local_head);
      }
    }
  }

  const AttentionLayer* layer_ = nullptr;
  const Slots* const* slots_ = nullptr;
  int64_t groups_ = 0, streams_ = 0;
  const int32_t* token_indices_ = nullptr;

  int64_t query_heads_ = 0, max_slots_ = 0, blocks_ = 0, heads_ = 0;
  Buffer<float> probs_, maxima_, sums_, outputs_;
  std::vector<Scratch> scratch_;
};

// Prefetches this thread's part of the slots' metadata, which is scattered in memory.
void prefetch_slots(const Slots& slots, const Worker& worker);
