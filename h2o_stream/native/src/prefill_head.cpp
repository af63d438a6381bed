// The books of a head while a prompt goes through its slots: what is held, what is worth most, where it lies.

#include <algorithm>

#include "gemm.h"
#include "policies.h"
#include "prefill.h"
#include "prefill_sizes.h"

namespace prefill {

void Head::reserve(const AttentionLayer& layer, int64_t places, int64_t chunk) {
  const int64_t padded = simd::padded(places, kPlaces), groups = layer.query_heads / layer.kv_heads;
  keys_.reserve(padded * layer.head_size);
  values_.reserve(places * simd::padded(layer.value_size));
  if (policies::observes(layer)) sums_.reserve(band_count(chunk, groups) * padded);
  if (layer.long_term > 0) squares_.reserve(band_count(chunk, groups) * padded);
  for (Buffer<float>* buffer : {&scores_, &long_terms_, &worth_}) buffer->reserve(places);
  for (Buffer<int32_t>* buffer : {&index_, &rank_, &slot_, &order_}) buffer->reserve(places);
  for (Buffer<uint8_t>* buffer : {&kept_, &used_}) buffer->reserve(places);
  for (Buffer<float>* buffer : {&key_offsets_, &key_steps_}) buffer->reserve(2 * layer.head_size);
  decays_.reserve(kAtOnce + 1);
  long_term_decays_.reserve(chunk);
  key_.reserve(layer.head_size);
  value_.reserve(layer.value_size);
}

void Head::begin(const AttentionLayer& layer, const Slots& slots, const NewTokens& tokens, int64_t stream, int64_t head,
                 int64_t count, const int64_t* windows) {
  layer_ = &layer, slots_ = &slots, tokens_ = &tokens, windows_ = windows;
  stream_ = stream, head_ = head, count_ = count;
  groups_ = layer.query_heads / layer.kv_heads;
  block_queries_ = block_queries(groups_);
  long_term_ = layer.policy == kAccumulated && layer.long_term > 0 && slots.long_term;
  store_ = store::HeadStore(layer, slots, head);
  number_ = first_ = held_ = 0;
  seen_ = *slots.seen;

  const int64_t past = head * slots.slots;
  const int32_t* index = slots.index + past;
  for (int64_t slot = 0; slot < slots.slots; ++slot) {
    used_[slot] = index[slot] >= 0;
    if (used_[slot]) slot_[held_++] = int32_t(slot);
  }
  std::sort(slot_.data(), slot_.at(held_), [index](int32_t a, int32_t b) { return index[a] < index[b]; });
  for (int64_t i = 0; i < held_; ++i) {
    index_[i] = index[slot_[i]];
    scores_[i] = slots.scores[past + slot_[i]];
    long_terms_[i] = long_term_ ? slots.long_term[past + slot_[i]] : 0;
  }
  set_decays();
  start_chunk();
}

// What a query counts after so many more: in the long-term score, and up to `kAtOnce` in the other.
void Head::set_decays() {
  const int64_t most = std::min(tokens_->chunk, count_);
  double decay = 1, long_term_decay = 1;
  for (int64_t later = 0; later <= std::max(most, kAtOnce); ++later) {
    if (later <= kAtOnce) decays_[later] = float(decay);
    if (later < most) long_term_decays_[later] = float(long_term_decay);
    decay *= layer_->policy == kTova ? 0 : layer_->decay;
    long_term_decay *= layer_->long_term_decay;
  }
}

void Head::start_chunk() {
  fresh_ = std::min(tokens_->chunk, count_ - first_);
  places_ = held_ + fresh_;
  sums_stride_ = simd::padded(places_);
  for (int64_t i = held_; i < places_; ++i) {
    index_[i] = int32_t(seen_ + i - held_);
    slot_[i] = -1;
    scores_[i] = long_terms_[i] = 0;
  }
  for (int64_t i = 0; i < places_; ++i) rank_[i] = int32_t(places_ - 1 - i);
  if (store_.bits < 16) {
    store::key_grid(store_.key_range, store_.key_size, store_.bits, key_offsets_.data(), key_steps_.data());
  }
}

void Head::evict() {
  update_scores();
  select();
  store_.bits == 16 ? store_tokens() : store_codes();
  compact();
  seen_ += fresh_, first_ += fresh_, ++number_;
  first_ < count_ ? start_chunk() : end();
}

void Head::update_scores() {
  const auto add = [&](const Buffer<float>& sums, double decay, float* scores) {
    const float faded = float(std::pow(decay, double(fresh_)));
    for (int64_t i = 0; i < places_; ++i) scores[i] = faded > 0 ? scores[i] * faded : 0;
    for (int64_t band = 0, all = bands(); band < all; ++band) {
      const float* own = sums.at(band * sums_stride_);
      for (int64_t i = 0; i < places_; ++i) scores[i] += own[i];
    }
  };
  if (policies::observes(*layer_)) add(sums_, layer_->policy == kTova ? 0 : layer_->decay, scores_.data());
  if (long_term_) add(squares_, layer_->long_term_decay, long_terms_.data());
}

// Marks what is kept: what is worth most, of equals the newest.
void Head::select() {
  const int64_t evicted = std::max<int64_t>(places_ - windows_[number_], 0);
  std::fill(kept_.data(), kept_.at(places_), uint8_t(1));
  if (!evicted) return;
  const float* long_terms = long_term_ ? long_terms_.data() : nullptr;
  policies::worth(*layer_, *slots_, head_, seen_ + fresh_,
                  {scores_.data(), long_terms, index_.data(), rank_.data(), places_}, worth_.data());
  for (int64_t i = 0; i < places_; ++i) order_[i] = int32_t(i);
  const float* worth = worth_.data();
  std::nth_element(order_.data(), order_.at(evicted - 1), order_.at(places_), [worth](int32_t a, int32_t b) {
    return worth[a] != worth[b] ? worth[a] < worth[b] : a < b;
  });
  for (int64_t i = 0; i < evicted; ++i) {
    kept_[order_[i]] = 0;
    if (slot_[order_[i]] >= 0) used_[slot_[order_[i]]] = 0;
  }
}

// The first empty slot from a number on.
int64_t Head::vacant(int64_t from) const {
  while (from < slots_->slots && used_[from]) ++from;
  return from;
}

// Puts the new tokens that are kept where others were evicted; those that were held stay where they are.
void Head::store_tokens() {
  int64_t slot = 0;
  for (int64_t i = held_; i < places_; ++i) {
    if (!kept_[i]) continue;
    slot = vacant(slot);
    read_key(i, key_.data());
    read_value(i, value_.data());
    store_.write(slot, key_.data(), value_.data());
    used_[slot] = 1, slot_[i] = int32_t(slot);
  }
}

// Puts what is kept of sinks and newest tokens into their seats, after all others have been encoded.
void Head::store_codes() {
  const int64_t seen = seen_ + fresh_, size = store_.key_size;
  const auto seated = [&](int64_t i) {
    return index_[i] < layer_->exact_sinks || index_[i] >= seen - (layer_->residual - 1);
  };
  std::copy(key_offsets_.data(), key_offsets_.at(size), key_offsets_.at(size));
  std::copy(key_steps_.data(), key_steps_.at(size), key_steps_.at(size));
  bool wider = false;
  for (int64_t i = 0; i < places_; ++i) {
    if (!kept_[i] || index_[i] < layer_->exact_sinks || (i < held_ && slot_[i] >= store_.exact)) continue;
    read_key(i, key_.data());
    wider |= store_.widen(key_.data());
  }
  const store::Grids before{key_offsets_.at(size), key_steps_.at(size), 1};
  const store::Grids now{key_offsets_.data(), key_steps_.data(), 1};
  if (wider) store::key_grid(store_.key_range, size, store_.bits, key_offsets_.data(), key_steps_.data());
  int64_t slot = store_.exact;
  for (int64_t i = 0; i < places_; ++i) {
    if (!kept_[i] || seated(i)) continue;
    if (slot_[i] >= store_.exact) {
      if (wider) store_.recode_key(slot_[i], before, now, key_.data());
      continue;
    }
    read_key(i, key_.data());
    read_value(i, value_.data());
    slot = vacant(slot);
    store_.write_codes(slot, now.offsets, now.steps, key_.data(), value_.data());
    if (slot_[i] >= 0) used_[slot_[i]] = 0;
    used_[slot] = 1, slot_[i] = int32_t(slot);
  }
  for (int64_t i = held_; i < places_; ++i) {
    if (!kept_[i] || !seated(i)) continue;
    read_key(i, key_.data());
    read_value(i, value_.data());
    slot_[i] = int32_t(store::ring_seat(*layer_, index_[i]));
    used_[slot_[i]] = 1;
    store_.write(slot_[i], key_.data(), value_.data());
  }
}

// Forgets what is not kept.
void Head::compact() {
  int64_t kept = 0;
  for (int64_t i = 0; i < places_; ++i) {
    if (!kept_[i]) continue;
    index_[kept] = index_[i], slot_[kept] = slot_[i], scores_[kept] = scores_[i], long_terms_[kept] = long_terms_[i];
    ++kept;
  }
  held_ = kept;
}

void Head::end() {
  const int64_t past = head_ * slots_->slots;
  for (int64_t slot = past; slot < past + slots_->slots; ++slot) {
    slots_->index[slot] = -1;
    slots_->rank[slot] = int32_t(slots_->slots);
    slots_->scores[slot] = simd::kMinusInfinity;
    if (slots_->long_term) slots_->long_term[slot] = 0;
  }
  for (int64_t i = 0; i < held_; ++i) {
    const int64_t slot = past + slot_[i];
    slots_->index[slot] = index_[i];
    slots_->rank[slot] = int32_t(held_ - 1 - i);
    slots_->scores[slot] = scores_[i];
    if (slots_->long_term) slots_->long_term[slot] = long_terms_[i];
  }
  slots_->free[head_] = vacant(store_.bits == 16 ? 0 : store_.exact);
}

void Head::read_new(int64_t which, int64_t head, int64_t token, int64_t size, float* x) const {
  const void* tensors[] = {tokens_->query, tokens_->key, tokens_->value};
  const int64_t* strides = tokens_->strides + 3 * which;
  const int64_t at = stream_ * strides[0] + head * strides[1] + (first_ + token) * strides[2];
  if (tokens_->in_bfloat16) {
    store::convert(static_cast<const simd::BFloat16*>(tensors[which]) + at, size, x);
  } else {
    std::memcpy(x, static_cast<const float*>(tensors[which]) + at, size * sizeof(float));
  }
}

void Head::read_key(int64_t place, float* key) const {
  if (place >= held_) return read_new(1, slots_->heads[head_], place - held_, store_.key_size, key);
  store_.read_key(slot_[place], key_offsets_.data(), key_steps_.data(), key);
}

void Head::read_value(int64_t place, float* value) const {
  if (place >= held_) return read_new(2, slots_->heads[head_], place - held_, store_.value_size, value);
  store_.read_value(slot_[place], value);
}

}  // namespace prefill
