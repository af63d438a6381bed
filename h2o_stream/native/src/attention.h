// The attention of one new token of each stream over the slots of one layer.
//
// Work is divided into blocks of slots, whatever the number of threads, so that results do not depend on it: every
// block has a softmax of its own, and they are merged in order. A token's way has four parts, with a barrier of the
// caller's between any two: `attend`, `merge` for each stream, `update_scores`, `evict`.

#pragma once

#include "head.h"
#include "memory.h"
#include "threads.h"

#include <vector>

// Slots that are attended to together.
constexpr int64_t kBlock = 32;

class DecodeAttention {
 public:
  // Makes room for so many streams, query heads, numbers of a value and slots, and so many threads.
  void reserve(int64_t streams, int64_t query_heads, int64_t value_size, int64_t slots, int64_t threads);

  // Makes room for the heads of a layer of this shape, in every thread; after `reserve`.
  void reserve_scratch(const AttentionLayer& layer);

  // Takes up a layer. `slots` [streams][groups], those of stream b at slots[b] and the following.
  void enter(const AttentionLayer& layer, const Slots* const* slots, int64_t groups, int64_t streams,
             const int32_t* now) {
    layer_ = &layer, slots_ = slots, groups_ = groups, streams_ = streams, now_ = now;
  }

  // Puts the new tokens into their slots and attends to a thread's blocks. Queries and keys are as they are asked with
  // and held: `prepare(stream, token)` makes them for the head that is called for.
  template <class Prepare>
  void attend(const Worker& worker, Prepare prepare) {
    each_range(worker, [&](int64_t stream, const Head& head, Range range) {
      Scratch& own = scratch_[worker.number];
      const int64_t slot = head.new_slot(now_[stream]);
      const bool here = slot >= range.begin && slot < range.end;
      prepare(stream, head.number, own.queries.data(), here ? own.key.data() : nullptr,
              here ? own.value.data() : nullptr);
      for (int64_t i = range.begin; i < range.end; ++i) ++head.rank[i];
      if (here) arrive(head, slot, now_[stream], own.key.data(), own.value.data());
      for (int64_t begin = range.begin; begin < range.end; begin += kBlock) {
        attend_block(head, stream, {begin, std::min(begin + kBlock, range.end)}, own);
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
    each_range(worker, [&](int64_t stream, const Head& head, Range range) {
      update_scores(head, stream, range, factors(stream));
    });
  }

  // Evicts what the new tokens push out, of a thread's heads, and counts the tokens.
  void evict(const Worker& worker);

 private:
  // A thread's own.
  struct Scratch {
    Buffer<float> queries, key, value, rotated, grids, mixed, worth;
    Buffer<int32_t> distances;
  };

  static void arrive(const Head& head, int64_t slot, int32_t now, const float* key, const float* value);
  void attend_block(const Head& head, int64_t stream, Range slots, Scratch& own);
  void bound(const Head& head, Range slots, int32_t now, float* logits) const;
  void mix_values(const Head& head, int64_t stream, Range exact, Range coded, Scratch& own);
  void mix_codes(const Head& head, Range coded, const float* probs, float* mixed) const;
  void merge_head(int64_t first, int64_t blocks, float* output, float* factors) const;
  void update_scores(const Head& head, int64_t stream, Range slots, const float* factors) const;

  float* probs(int64_t stream, int64_t query_head) const {
    return probs_.at((stream * query_heads_ + query_head) * slots_most_);
  }
  int64_t partial(int64_t stream, int64_t query_head, int64_t block) const {
    return (stream * query_heads_ + query_head) * blocks_ + block;
  }

  // Calls `work` for all heads of which some slots are a thread's: whole blocks.
  template <class Work>
  void each_range(const Worker& worker, Work work) const {
    int64_t total = 0;
    each_head([&](int64_t, const Slots& slots, int64_t) { total += slots.slots; });
    const Range mine = worker.share(total);  // of the blocks that begin there
    int64_t first = 0;
    each_head([&](int64_t stream, const Slots& slots, int64_t place) {
      const int64_t begin = padded_block(mine.begin - first), end = padded_block(mine.end - first);
      first += slots.slots;
      if (begin < std::min(end, slots.slots)) {
        work(stream, Head(*layer_, slots, place), Range{begin, std::min(end, slots.slots)});
      }
    });
  }

  // The first slot from this one on that begins a block.
  static int64_t padded_block(int64_t slot) { return slot <= 0 ? 0 : simd::padded(slot, kBlock); }

  template <class Visit>
  void each_head(Visit visit) const {
    for (int64_t stream = 0; stream < streams_; ++stream) {
      for (int64_t group = 0; group < groups_; ++group) {
        const Slots& slots = slots_[stream][group];
        for (int64_t place = 0; place < slots.head_count; ++place) visit(stream, slots, place);
      }
    }
  }

  const AttentionLayer* layer_ = nullptr;
  const Slots* const* slots_ = nullptr;
  int64_t groups_ = 0, streams_ = 0;
  const int32_t* now_ = nullptr;

  int64_t query_heads_ = 0, value_size_ = 0, slots_most_ = 0, blocks_ = 0;
  Buffer<float> probs_, tops_, sums_, mixed_;
  std::vector<Scratch> scratch_;
};

// Fetches a thread's part of what is known of some slots: it is scattered, and would be waited for piece by piece.
void prefetch_slots(const Slots& slots, const Worker& worker);
