// The slots of one KV head of one stream: positions, eviction, quantization.

#pragma once

#include "abi.h"
#include "journal.h"
#include "masks.h"
#include "policies.h"
#include "ranks.h"
#include "rope.h"
#include "simd.h"
#include "simd_functions.h"
#include "store.h"

struct HeadSlots {
  const AttentionLayer& layer;
  const Slots& slots;
  int64_t local_head, kv_head;  // index within the group, and within the layer
  int64_t count, exact;         // slots; those from `exact` on are quantized
  store::HeadStore store;
  float *scores, *long_term;  // long_term may be null
  int32_t* index;
  Ranks rank;
  int64_t* free;
  JournalPage page;

  HeadSlots(const AttentionLayer& layer, const Slots& slots, int64_t local_head, JournalPage page = {})
      : layer(layer),
        slots(slots),
        local_head(local_head),
        kv_head(slots.heads[local_head]),
        count(slots.slot_count),
        store(layer, slots, local_head),
        scores(slots.scores + local_head * count),
        long_term(slots.long_term ? slots.long_term + local_head * count : nullptr),
        index(slots.index + local_head * count),
        rank(slots, local_head),
        free(slots.free + local_head),
        page(page) {
    exact = store.exact;
  }

  int64_t query_heads() const { return layer.query_heads / layer.kv_heads; }
  int64_t first_query() const { return kv_head * query_heads(); }

  // The slot that a new token is written to.
  int64_t slot_for(int32_t token) const { return layer.kv_bits == 16 ? *free : store::exact_slot(layer, token); }

  // Notes what this token of the stream is going to change; the rest is noted when it is known.
  void begin(int32_t token) const {
    for_each_change(token, [&](void* memory, int64_t bytes) { page.save(memory, bytes); });
    page.note(Aged{rank, count});
  }

  // What a token takes of a journal at most.
  int64_t journal_room() const {
    int64_t room = Journal::room_for(sizeof(Aged));
    for_each_change(0, [&](void*, int64_t bytes) { room += Journal::room_for(bytes); });
    room += slots.evictions * (Journal::room_for(sizeof *index) + Journal::room_for(sizeof(Cleared)));
    return room + (layer.kv_bits < 16 ? Journal::room_for(store.key_code_bytes(count)) : 0);
  }

  // RoPE distances of some slots from the newest token.
  void distances(int64_t begin, int64_t end, int32_t newest, int32_t* out) const {
    rank.visit([&](const auto* ranks) {
      rope::distances(layer, slots, newest, index + begin, ranks + begin, end - begin, out);
    });
  }

  void clear_slot(int64_t slot) const {
    page.save(index + slot, sizeof *index);
    page.note(Cleared{rank, count, slot, rank[slot]});
    rank.visit([&](auto* ranks) {
      const auto cleared_rank = ranks[slot];
      for (int64_t i = 0; i < count; ++i) ranks[i] -= ranks[i] > cleared_rank;
    });
    rank.set(slot, count);
    index[slot] = -1;
    scores[slot] = simd::kMinusInfinity;
  }

  // Evicts the tokens of lowest worth and finds a free slot for the next token.
  //
  // `seen` counts the tokens of the stream; `worth` is scratch of one element per slot.
  void evict(int64_t seen, float* worth) const {
    if (slots.evictions == 0) {
      int64_t slot = exact == count ? 0 : exact;
      while (slot + 1 < count && index[slot] >= 0) ++slot;
      *free = slot;
      return;
    }
    const int64_t first = exact == count ? 0 : exact;
    for (int64_t i = 0; i < slots.evictions; ++i) {
      rank.visit([&](const auto* ranks) {
        policies::compute_worth(layer, slots, local_head, seen, {scores, long_term, index, count}, ranks, worth);
      });
      for (int64_t slot = first; slot < count; ++slot) {
        worth[slot] = worth[slot] == simd::kMinusInfinity ? -simd::kMinusInfinity : worth[slot];
      }
      const float minimum = simd::reduce_min(worth + first, count - first);
      int64_t slot = first;
      while (slot + 1 < count && worth[slot] != minimum) ++slot;
      clear_slot(slot);
      *free = slot;
    }
  }

  // Frees the exact slot that token `seen` will be written to: quantizes the oldest token of the ring into the free
  // slot.
  //
  // `scratch` holds six keys or values.
  void quantize_oldest(int64_t seen, float* scratch) const {
    const int64_t size = std::max(layer.head_size, layer.value_size);
    float *key = scratch, *offsets = scratch + size, *scales = scratch + 2 * size, *value = scratch + 3 * size;
    float *old_offsets = scratch + 4 * size, *old_scales = scratch + 5 * size;
    const int64_t newest = store::exact_slot(layer, seen - 1), oldest = store::exact_slot(layer, seen), slot = *free;
    store::key_params(store.key_range, layer.head_size, layer.kv_bits, old_offsets, old_scales);
    if (newest >= layer.exact_sinks) {
      store.read_key(newest, nullptr, nullptr, key);
      if (store.extend_range(key, key)) requantize_keys(old_offsets, old_scales, offsets, scales, key);
    }
    if (index[oldest] < 0) return;
    store::key_params(store.key_range, layer.head_size, layer.kv_bits, offsets, scales);
    store.read_key(oldest, nullptr, nullptr, key);
    store.read_value(oldest, value);
    store.write_quantized(slot, offsets, scales, key, value);
    if (long_term) long_term[slot] = long_term[oldest];
    scores[slot] = scores[oldest], index[slot] = index[oldest], rank.set(slot, rank[oldest]);
    scores[oldest] = simd::kMinusInfinity, index[oldest] = -1, rank.set(oldest, count);
  }

 private:
  // All slots have become one token older.
  struct Aged {
    Ranks rank;
    int64_t count;
    void undo() const {
      rank.visit([&](auto* ranks) {
        for (int64_t i = 0; i < count; ++i) --ranks[i];
      });
    }
  };

  // A slot was cleared.
  struct Cleared {
    Ranks rank;
    int64_t count, slot, old_rank;
    void undo() const {
      rank.visit([&](auto* ranks) {
        for (int64_t i = 0; i < count; ++i) ranks[i] += ranks[i] >= old_rank;
      });
      rank.set(slot, old_rank);
    }
  };

  // Calls `visit(memory, bytes)` for what this token of the stream changes in any case, except for ranks.
  template <class Visit>
  void for_each_change(int32_t token, Visit visit) const {
    visit(scores, 4 * count);
    if (long_term) visit(long_term, 4 * count);
    const auto visit_slot = [&](int64_t slot) {
      visit(index + slot, int64_t(sizeof *index));
      rank.visit([&](auto* ranks) { visit(ranks + slot, int64_t(sizeof *ranks)); });
    };
    visit_slot(slot_for(token));
    if (layer.kv_bits < 16) visit_slot(*free), visit_slot(store::exact_slot(layer, token + 1));
    store.for_each_change(slot_for(token), *free, visit);
    visit(free, int64_t(sizeof *free));
    if (local_head == 0) visit(slots.seen, int64_t(sizeof *slots.seen));
  }

  void requantize_keys(const float* old_offsets, const float* old_scales, float* offsets, float* scales,
                       float* key) const {
    page.save(store.key_codes, store.key_code_bytes(count));
    store::key_params(store.key_range, layer.head_size, layer.kv_bits, offsets, scales);
    for (int64_t slot = exact; slot < count; ++slot) {
      if (index[slot] >= 0) store.requantize_key(slot, {old_offsets, old_scales, 1}, {offsets, scales, 1}, key);
    }
  }
};
