// The slots of one KV head of one stream: where they are, how far RoPE sees them, and which of them are evicted.

#pragma once

#include "abi.h"
#include "policies.h"
#include "rope.h"
#include "simd.h"
#include "store.h"

struct Head {
  const AttentionLayer& layer;
  const Slots& slots;
  int64_t place, number;  // among the heads of the slots, and of the layer
  int64_t count, exact;   // slots; those from `exact` on hold codes
  store::HeadStore store;
  float *scores, *long_term;  // long_term may be null
  int32_t *index, *rank;
  int64_t* free;

  Head(const AttentionLayer& layer, const Slots& slots, int64_t place)
      : layer(layer),
        slots(slots),
        place(place),
        number(slots.heads[place]),
        count(slots.slots),
        store(layer, slots, place),
        scores(slots.scores + place * count),
        long_term(slots.long_term ? slots.long_term + place * count : nullptr),
        index(slots.index + place * count),
        rank(slots.rank + place * count),
        free(slots.free + place) {
    exact = store.exact;
  }

  int64_t query_heads() const { return layer.query_heads / layer.kv_heads; }
  int64_t first_query() const { return number * query_heads(); }

  // The slot of a token that comes.
  int64_t new_slot(int32_t token) const { return layer.kv_bits == 16 ? *free : store::ring_seat(layer, token); }

  // How far RoPE places some slots behind token `now`.
  void distances(int64_t begin, int64_t end, int32_t now, int32_t* to) const {
    rope::distances(layer, slots, now, index + begin, rank + begin, end - begin, to);
  }

  void vacate(int64_t slot) const {
    const int32_t own = rank[slot];
    for (int64_t i = 0; i < count; ++i) rank[i] -= rank[i] > own;
    rank[slot] = int32_t(count);
    index[slot] = -1;
    scores[slot] = simd::kMinusInfinity;
  }

  // Evicts the tokens worth least, as many as the new one pushes out, and finds the next one's slot.
  //
  // `seen` counts the tokens of the stream, `worth` is scratch for all slots.
  void evict(int64_t seen, float* worth) const {
    if (slots.evictions == 0) {
      int64_t slot = exact == count ? 0 : exact;
      while (slot + 1 < count && index[slot] >= 0) ++slot;
      *free = slot;
      return;
    }
    const int64_t first = exact == count ? 0 : exact;
    for (int64_t i = 0; i < slots.evictions; ++i) {
      policies::worth(layer, slots, place, seen, {scores, long_term, index, rank, count}, worth);
      for (int64_t slot = first; slot < count; ++slot) {
        worth[slot] = worth[slot] == simd::kMinusInfinity ? -simd::kMinusInfinity : worth[slot];
      }
      const float least = simd::smallest(worth + first, count - first);
      int64_t slot = first;
      while (slot + 1 < count && worth[slot] != least) ++slot;
      vacate(slot);
      *free = slot;
    }
  }

  // Vacates the seat of the next token, the `seen`th: the oldest of the ring is encoded and moves to the free slot.
  //
  // `scratch` has room for six keys or values.
  void demote(int64_t seen, float* scratch) const {
    const int64_t size = std::max(layer.head_size, layer.value_size);
    float *key = scratch, *offsets = scratch + size, *steps = scratch + 2 * size, *value = scratch + 3 * size;
    float *old_offsets = scratch + 4 * size, *old_steps = scratch + 5 * size;
    const int64_t newest = store::ring_seat(layer, seen - 1), oldest = store::ring_seat(layer, seen), slot = *free;
    store::key_grid(store.key_range, layer.head_size, layer.kv_bits, old_offsets, old_steps);
    if (newest >= layer.exact_sinks) {
      store.read_key(newest, nullptr, nullptr, key);
      if (store.widen(key)) recode(old_offsets, old_steps, offsets, steps, key);
    }
    if (index[oldest] < 0) return;
    store::key_grid(store.key_range, layer.head_size, layer.kv_bits, offsets, steps);
    store.read_key(oldest, nullptr, nullptr, key);
    store.read_value(oldest, value);
    store.write_codes(slot, offsets, steps, key, value);
    if (long_term) long_term[slot] = long_term[oldest];
    scores[slot] = scores[oldest], index[slot] = index[oldest], rank[slot] = rank[oldest];
    scores[oldest] = simd::kMinusInfinity, index[oldest] = -1, rank[oldest] = int32_t(count);
  }

 private:
  void recode(const float* old_offsets, const float* old_steps, float* offsets, float* steps, float* key) const {
    store::key_grid(store.key_range, layer.head_size, layer.kv_bits, offsets, steps);
    for (int64_t slot = exact; slot < count; ++slot) {
      if (index[slot] >= 0) store.recode_key(slot, {old_offsets, old_steps, 1}, {offsets, steps, 1}, key);
    }
  }
};
