// The attention of one new token of each stream over the slots of one layer.
//
// Work is divided into blocks of slots, whatever the number of threads, so that results do not depend on it: every
// block has a softmax of its own, and they are merged in order. A token's way has four parts, with a barrier of the
// caller's between any two: `attend`, `merge` for each stream, `update_scores`, `evict`.

#pragma once

#include "head_slots.h"
#include "buffer.h"
#include "threads.h"

#include <vector>

// Slots that are attended to together.
constexpr int64_t kBlockSlots = 32;

class DecodeAttention {
 public:
  // Makes room for so many streams, query heads, numbers of a value and slots, and so many threads.
  void reserve(int64_t streams, int64_t query_heads, int64_t value_size, int64_t slots, int64_t threads);

  // Makes room for the heads of a layer of this shape, in every thread; after `reserve`.
  void reserve_scratch(const AttentionLayer& layer);

  // Takes up a layer. `slots` [streams][groups], those of stream b at slots[b] and the following.
  void set_layer(const AttentionLayer& layer, const Slots* const* slots, int64_t groups, int64_t streams,
             const int32_t* token_indices) {
    layer_ = &layer, slots_ = slots, groups_ = groups, streams_ = streams, token_indices_ = token_indices;
  }

  // Puts the new tokens into their slots and attends to a thread's blocks. Queries and keys are as they are asked with
  // and held: `prepare(stream, token)` makes them for the head that is called for.
  template <class Prepare>
  void attend(const Worker& worker, Prepare prepare) {
    for_each_range(worker, [&](int64_t stream, const HeadSlots& head, Range range) {
      Scratch& scratch = scratch_[worker.index];
      const int64_t slot = head.slot_for(token_indices_[stream]);
      const bool holds_new = slot >= range.begin && slot < range.end;
      prepare(stream, head.kv_head, scratch.queries.data(), holds_new ? scratch.key.data() : nullptr,
              holds_new ? scratch.value.data() : nullptr);
      for (int64_t i = range.begin; i < range.end; ++i) ++head.rank[i];
      if (holds_new) insert_token(head, slot, token_indices_[stream], scratch.key.data(), scratch.value.data());
      for (int64_t begin = range.begin; begin < range.end; begin += kBlockSlots) {
        attend_block(head, stream, {begin, std::min(begin + kBlockSlots, range.end)}, scratch);
      }
    });
  }

  // The attention's output of a stream, [query_heads][value_size], and what each block's softmax is multiplied by.
  void merge(int64_t stream, float* output, float* factors) const;
  int64_t factor_count() const { return query_heads_ * blocks_; }

  // Scores of a thread's slots; `factors(stream)` gives what `merge` gave.
  template <class Factors>
  void update_scores(const Worker& worker, Factors factors) const {
    if (layer_->policy != kAccumulated && layer_->policy != kTova) return;
    for_each_range(worker, [&](int64_t stream, const HeadSlots& head, Range range) {
      update_scores(head, stream, range, factors(stream));
    });
  }

  // Evicts what the new tokens push out, of a thread's heads, and counts the tokens.
  void evict(const Worker& worker);

 private:
  // A thread's own.
  struct Scratch {
    Buffer<float> queries, key, value, rotated, key_params, accum, priority;
    Buffer<int32_t> distances;
  };

  static void insert_token(const HeadSlots& head, int64_t slot, int32_t token_indices, const float* key, const float* value);
  void attend_block(const HeadSlots& head, int64_t stream, Range slots, Scratch& scratch);
  void scale_and_mask(const HeadSlots& head, Range slots, int32_t token_indices, float* logits) const;
  void accumulate_values(const HeadSlots& head, int64_t stream, Range exact, Range quantized, Scratch& scratch);
  void accumulate_quantized(const HeadSlots& head, Range quantized, const float* probs, float* accum) const;
  void merge_head(int64_t first_slot, int64_t blocks, float* output, float* factors) const;
  void update_scores(const HeadSlots& head, int64_t stream, Range slots, const float* factors) const;

  float* probs(int64_t stream, int64_t query_head) const {
    return probs_.at((stream * query_heads_ + query_head) * max_slots_);
  }
  int64_t block_number(int64_t stream, int64_t query_head, int64_t block) const {
    return (stream * query_heads_ + query_head) * blocks_ + block;
  }

  // Calls `work` for all heads of which some slots are a thread's: whole blocks.
  template <class Work>
  void for_each_range(const Worker& worker, Work work) const {
    int64_t total = 0;
    for_each_head([&](int64_t, const Slots& slots, int64_t) { total += slots.slot_count; });
    const Range range = worker.partition(total);  // of the blocks that begin there
    int64_t first_slot = 0;
    for_each_head([&](int64_t stream, const Slots& slots, int64_t local_head) {
      const int64_t begin = block_start(range.begin - first_slot), end = block_start(range.end - first_slot);
      first_slot += slots.slot_count;
      if (begin < std::min(end, slots.slot_count)) {
        work(stream, HeadSlots(*layer_, slots, local_head), Range{begin, std::min(end, slots.slot_count)});
      }
    });
  }

  // The first slot from this one on that begins a block.
  static int64_t block_start(int64_t slot) { return slot <= 0 ? 0 : simd::padded(slot, kBlockSlots); }

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

  int64_t query_heads_ = 0, value_size_ = 0, max_slots_ = 0, blocks_ = 0;
  Buffer<float> probs_, maxima_, sums_, outputs_;
  std::vector<Scratch> scratch_;
};

// Fetches a thread's part of what is known of some slots: it is scattered, and would be waited for piece by piece.
void prefetch_slots(const Slots& slots, const Worker& worker);
