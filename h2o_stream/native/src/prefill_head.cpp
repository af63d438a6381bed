// Bookkeeping of a head during prefill: cached tokens, scores, evictions, slots.

#include <algorithm>

#include "gemm.h"
#include "policies.h"
#include "prefill.h"
#include "prefill_blocking.h"
#include "ranks.h"
#include "rope.h"

namespace prefill {

void Head::reserve(const AttentionLayer& layer, int64_t num_keys, int64_t chunk) {
  const int64_t padded = simd::padded(num_keys, kKeyBlock), groups = layer.query_heads / layer.kv_heads;
  keys_.reserve(padded * layer.head_size);
  values_.reserve(num_keys * simd::padded(layer.value_size));
  if (policies::needs_attention(layer)) sums_.reserve(split_count(chunk, groups) * padded);
  if (layer.long_term > 0) squares_.reserve(split_count(chunk, groups) * padded);
  for (Buffer<float>* buffer : {&scores_, &long_term_scores_, &worth_}) buffer->reserve(num_keys);
  for (Buffer<int32_t>* buffer : {&index_, &rank_, &slot_, &order_}) buffer->reserve(num_keys);
  for (Buffer<uint8_t>* buffer : {&keep_, &occupied_}) buffer->reserve(num_keys);
  for (Buffer<float>* buffer : {&key_offsets_, &key_scales_}) buffer->reserve(2 * layer.head_size);
  decays_.reserve(kMaxDecaySteps + 1);
  long_term_decays_.reserve(chunk);
  for (Buffer<float>* buffer : {&key_, &low_, &high_}) buffer->reserve(layer.head_size);
  value_.reserve(layer.value_size);
}

void Head::load_slots(const AttentionLayer& layer, const Slots& slots, const NewTokens& tokens, int64_t stream,
                      int64_t head, int64_t count, const int64_t* limits) {
  layer_ = &layer, slots_ = &slots, tokens_ = &tokens, limits_ = limits;
  stream_ = stream, local_head_ = head, count_ = count;
  groups_ = layer.query_heads / layer.kv_heads;
  block_queries_ = block_queries(groups_);
  long_term_ = layer.policy == kAccumulated && layer.long_term > 0 && slots.long_term;
  store_ = store::HeadStore(layer, slots, head);
  chunk_ = chunk_begin_ = num_held_ = 0;
  seen_ = *slots.seen;

  const int64_t first_slot = head * slots.slot_count;
  const int32_t* index = slots.index + first_slot;
  for (int64_t slot = 0; slot < slots.slot_count; ++slot) {
    occupied_[slot] = index[slot] >= 0;
    if (occupied_[slot]) slot_[num_held_++] = int32_t(slot);
  }
  std::sort(slot_.data(), slot_.at(num_held_), [index](int32_t a, int32_t b) { return index[a] < index[b]; });
  for (int64_t i = 0; i < num_held_; ++i) {
    index_[i] = index[slot_[i]];
    scores_[i] = slots.scores[first_slot + slot_[i]];
    long_term_scores_[i] = long_term_ ? slots.long_term[first_slot + slot_[i]] : 0;
  }
  set_decays();
  start_chunk();
}

// Decay factors by age of a query; scores stop decaying after kMaxDecaySteps.
void Head::set_decays() {
  const int64_t max_age = std::min(tokens_->chunk, count_);
  double decay = 1, long_term_decay = 1;
  for (int64_t age = 0; age <= std::max(max_age, kMaxDecaySteps); ++age) {
    if (age <= kMaxDecaySteps) decays_[age] = float(decay);
    if (age < max_age) long_term_decays_[age] = float(long_term_decay);
    decay *= layer_->policy == kTova ? 0 : layer_->decay;
    long_term_decay *= layer_->long_term_decay;
  }
}

void Head::start_chunk() {
  num_new_ = std::min(tokens_->chunk, count_ - chunk_begin_);
  num_keys_ = num_held_ + num_new_;
  score_stride_ = simd::padded(num_keys_);
  for (int64_t i = num_held_; i < num_keys_; ++i) {
    index_[i] = int32_t(seen_ + i - num_held_);
    slot_[i] = -1;
    scores_[i] = long_term_scores_[i] = 0;
  }
  for (int64_t i = 0; i < num_keys_; ++i) rank_[i] = int32_t(num_keys_ - 1 - i);
  if (store_.bits < 16) {
    store::key_params(store_.key_range, store_.key_size, store_.bits, key_offsets_.data(), key_scales_.data());
  }
}

void Head::evict() {
  update_scores();
  select_evictions();
  store_.bits == 16 ? store_tokens() : store_quantized();
  compact();
  seen_ += num_new_, chunk_begin_ += num_new_, ++chunk_;
  chunk_begin_ < count_ ? start_chunk() : write_back();
}

void Head::update_scores() {
  const auto add = [&](const Buffer<float>& sums, double decay, float* scores) {
    const float decay_factor = float(std::pow(decay, double(num_new_)));
    for (int64_t i = 0; i < num_keys_; ++i) scores[i] = decay_factor > 0 ? scores[i] * decay_factor : 0;
    for (int64_t split = 0, all = splits(); split < all; ++split) {
      const float* split_sums = sums.at(split * score_stride_);
      for (int64_t i = 0; i < num_keys_; ++i) scores[i] += split_sums[i];
    }
  };
  if (policies::needs_attention(*layer_)) add(sums_, layer_->policy == kTova ? 0 : layer_->decay, scores_.data());
  if (long_term_) add(squares_, layer_->long_term_decay, long_term_scores_.data());
}

// Selects the tokens to keep: highest worth first, newest first among equals.
void Head::select_evictions() {
  const int64_t evicted = std::max<int64_t>(num_keys_ - limits_[chunk_], 0);
  std::fill(keep_.data(), keep_.at(num_keys_), uint8_t(1));
  if (!evicted) return;
  const float* long_term_scores = long_term_ ? long_term_scores_.data() : nullptr;
  policies::compute_worth(*layer_, *slots_, local_head_, seen_ + num_new_,
                          {scores_.data(), long_term_scores, index_.data(), num_keys_}, rank_.data(), worth_.data());
  for (int64_t i = 0; i < num_keys_; ++i) order_[i] = int32_t(i);
  const float* worth = worth_.data();
  std::nth_element(order_.data(), order_.at(evicted - 1), order_.at(num_keys_), [worth](int32_t a, int32_t b) {
    return worth[a] != worth[b] ? worth[a] < worth[b] : a < b;
  });
  for (int64_t i = 0; i < evicted; ++i) {
    keep_[order_[i]] = 0;
    if (slot_[order_[i]] >= 0) occupied_[slot_[order_[i]]] = 0;
  }
}

// The first empty slot at or after `from`.
int64_t Head::next_free_slot(int64_t from) const {
  while (from < slots_->slot_count && occupied_[from]) ++from;
  return from;
}

// Stores kept new tokens in free slots; cached tokens stay where they are.
void Head::store_tokens() {
  int64_t slot = 0;
  for (int64_t i = num_held_; i < num_keys_; ++i) {
    if (!keep_[i]) continue;
    slot = next_free_slot(slot);
    read_key(i, key_.data());
    read_value(i, value_.data());
    store_.write(slot, key_.data(), value_.data());
    occupied_[slot] = 1, slot_[i] = int32_t(slot);
  }
}

// Quantizes kept tokens that leave the exact slots, then stores kept sinks and newest tokens there.
void Head::store_quantized() {
  const int64_t seen = seen_ + num_new_, size = store_.key_size;
  const auto stays_exact = [&](int64_t i) {
    return index_[i] < layer_->exact_sinks || index_[i] >= seen - (layer_->residual - 1);
  };
  std::copy(key_offsets_.data(), key_offsets_.at(size), key_offsets_.at(size));
  std::copy(key_scales_.data(), key_scales_.at(size), key_scales_.at(size));
  std::fill_n(low_.data(), size, std::numeric_limits<float>::infinity());
  std::fill_n(high_.data(), size, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < num_keys_; ++i) {
    if (!keep_[i] || index_[i] < layer_->exact_sinks || (i < num_held_ && slot_[i] >= store_.exact)) continue;
    read_key(i, key_.data());
    for (int64_t j = 0; j < size; ++j) {  // NaN stays
      low_[j] = low_[j] < key_[j] || low_[j] != low_[j] ? low_[j] : key_[j];
      high_[j] = high_[j] > key_[j] || high_[j] != high_[j] ? high_[j] : key_[j];
    }
  }
  const bool range_grew = store_.extend_range(low_.data(), high_.data());
  const store::ParamArray old_params{key_offsets_.at(size), key_scales_.at(size), 1};
  const store::ParamArray new_params{key_offsets_.data(), key_scales_.data(), 1};
  if (range_grew) store::key_params(store_.key_range, size, store_.bits, key_offsets_.data(), key_scales_.data());
  int64_t slot = store_.exact;
  for (int64_t i = 0; i < num_keys_; ++i) {
    if (!keep_[i] || stays_exact(i)) continue;
    if (slot_[i] >= store_.exact) {
      if (range_grew) store_.requantize_key(slot_[i], old_params, new_params, key_.data());
      continue;
    }
    read_key(i, key_.data());
    read_value(i, value_.data());
    slot = next_free_slot(slot);
    store_.write_quantized(slot, new_params.offsets, new_params.scales, key_.data(), value_.data());
    if (slot_[i] >= 0) occupied_[slot_[i]] = 0;
    occupied_[slot] = 1, slot_[i] = int32_t(slot);
  }
  for (int64_t i = num_held_; i < num_keys_; ++i) {
    if (!keep_[i] || !stays_exact(i)) continue;
    read_key(i, key_.data());
    read_value(i, value_.data());
    slot_[i] = int32_t(store::exact_slot(*layer_, index_[i]));
    occupied_[slot_[i]] = 1;
    store_.write(slot_[i], key_.data(), value_.data());
  }
}

// Drops evicted tokens.
void Head::compact() {
  int64_t count = 0;
  for (int64_t i = 0; i < num_keys_; ++i) {
    if (!keep_[i]) continue;
    index_[count] = index_[i], slot_[count] = slot_[i], scores_[count] = scores_[i],
    long_term_scores_[count] = long_term_scores_[i];
    ++count;
  }
  num_held_ = count;
}

void Head::write_back() {
  const int64_t first_slot = local_head_ * slots_->slot_count;
  const Ranks rank(*slots_, local_head_);
  for (int64_t slot = first_slot; slot < first_slot + slots_->slot_count; ++slot) {
    slots_->index[slot] = -1;
    rank.set(slot - first_slot, slots_->slot_count);
    slots_->scores[slot] = simd::kMinusInfinity;
    if (slots_->long_term) slots_->long_term[slot] = 0;
  }
  for (int64_t i = 0; i < num_held_; ++i) {
    const int64_t slot = first_slot + slot_[i];
    slots_->index[slot] = index_[i];
    rank.set(slot_[i], num_held_ - 1 - i);
    slots_->scores[slot] = scores_[i];
    if (slots_->long_term) slots_->long_term[slot] = long_term_scores_[i];
  }
  slots_->free[local_head_] = next_free_slot(store_.bits == 16 ? 0 : store_.exact);
}

void Head::read_new(int64_t which, int64_t head, int64_t token, int64_t size, float* x) const {
  const void* tensors[] = {tokens_->query, tokens_->key, tokens_->value};
  const int64_t* strides = tokens_->strides + 3 * which;
  const int64_t at = tokens_->elements_before(stream_, which) + head * strides[1] + (chunk_begin_ + token) * strides[2];
  store::read(tensors[which], tokens_->in_bfloat16, at, size, x);
}

void Head::read_key(int64_t key_index, float* key) const {
  if (key_index >= num_held_)
    return read_new(1, slots_->heads[local_head_], key_index - num_held_, store_.key_size, key);
  store_.read_key(slot_[key_index], key_offsets_.data(), key_scales_.data(), key);
}

void Head::read_value(int64_t key_index, float* value) const {
  if (key_index >= num_held_)
    return read_new(2, slots_->heads[local_head_], key_index - num_held_, store_.value_size, value);
  store_.read_value(slot_[key_index], value);
}

}  // namespace prefill
