#include "attention.h"

#include "slot_math.h"

using simd::BFloat16;
using simd::kMinusInfinity;
using namespace slot_math;

void DecodeAttention::reserve(int64_t streams, int64_t query_heads, int64_t value_size, int64_t slots,
                              int64_t threads) {
  query_heads_ = query_heads, value_size_ = value_size;
  slots_most_ = simd::padded(slots, 16), blocks_ = simd::padded(slots, kBlock) / kBlock;
  const int64_t heads = streams * query_heads;
  probs_.reserve(heads * slots_most_);
  tops_.reserve(heads * blocks_);
  sums_.reserve(heads * blocks_);
  mixed_.reserve(heads * blocks_ * value_size);
  if (int64_t(scratch_.size()) < threads) scratch_.resize(threads);
}

void DecodeAttention::reserve_scratch(const AttentionLayer& layer) {
  for (Scratch& own : scratch_) {
    own.queries.reserve(layer.query_heads / layer.kv_heads * simd::padded(layer.head_size, 16));
    own.key.reserve(layer.head_size);
    own.value.reserve(layer.value_size);
    own.rotated.reserve(2 * layer.head_size);
    own.worth.reserve(slots_most_);
    own.distances.reserve(kBlock);
    own.grids.reserve(6 * std::max(layer.head_size, layer.value_size));
    own.mixed.reserve(layer.query_heads / layer.kv_heads * layer.value_size);
  }
}

void DecodeAttention::arrive(const Head& head, int64_t slot, int32_t now, const float* key, const float* value) {
  head.store.write(slot, key, value);
  head.index[slot] = now;
  head.rank[slot] = 0;
  head.scores[slot] = 0;
  if (head.long_term) head.long_term[slot] = 0;
}

void DecodeAttention::attend_block(const Head& head, int64_t stream, Range slots, Scratch& own) {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads(), first = head.first_query(), block = slots.begin / kBlock;
  const int32_t now = now_[stream];
  if (layer.rope) head.distances(slots.begin, slots.end, now, own.distances.data());
  const Range exact{slots.begin, std::min(slots.end, head.exact)}, coded{std::max(slots.begin, head.exact), slots.end};
  float* probs = this->probs(stream, first) + slots.begin;
  const auto multiply = [&](const auto& keys, Range some) {
    if (some.size() <= 0) return;
    const int64_t offset = some.begin - slots.begin;
    const Rotation rotation{layer.rope, layer.rotary, own.distances.at(offset)};
    products(keys, some.size(), rotation, own.rotated.data(), own.queries.data(), heads,
             [&](int64_t slot, int64_t q, float product) { probs[q * slots_most_ + offset + slot] = product; });
  };
  if (layer.in_bfloat16) {
    multiply(Exact<BFloat16>(head.store.keys, layer.head_size, exact.begin), exact);
  } else {
    multiply(Exact<float>(head.store.keys, layer.head_size, exact.begin), exact);
  }
  if (coded.size() > 0) {
    float *offsets = own.grids.data(), *steps = own.grids.at(layer.head_size);
    store::key_grid(head.store.key_range, layer.head_size, layer.kv_bits, offsets, steps);
    with_bits(layer.kv_bits, [&](auto bits) {
      const Codes<bits> codes(head.store.key_codes, layer.head_size, coded.begin - head.exact);
      multiply(KeyCodes<bits>(codes, offsets, steps), coded);
    });
  }
  for (int64_t q = 0; q < heads; ++q) {
    float* logits = probs + q * slots_most_;
    bound(head, slots, now, logits);
    const float top = simd::largest(logits, slots.size());
    tops_[partial(stream, first + q, block)] = top;
    sums_[partial(stream, first + q, block)] = exponentials(logits, slots.size(), top);
  }
  mix_values(head, stream, exact, coded, own);
}

// Scales logits and hides what may not be seen.
void DecodeAttention::bound(const Head& head, Range slots, int32_t now, float* logits) const {
  const float scaling = float(layer_->scaling), cap = float(layer_->softcap);
  const int32_t oldest = layer_->sliding ? std::max(now - int32_t(layer_->sliding) + 1, 0) : 0;
  const int32_t* index = head.index + slots.begin;
  const int64_t count = slots.size();
  if (cap > 0) {
    for (int64_t i = 0; i < count; ++i) logits[i] = std::tanh(logits[i] * scaling / cap) * cap;
  } else {
    for (int64_t i = 0; i < count; ++i) logits[i] *= scaling;
  }
  for (int64_t i = 0; i < count; ++i) logits[i] = index[i] < oldest ? kMinusInfinity : logits[i];
}

void DecodeAttention::mix_values(const Head& head, int64_t stream, Range exact, Range coded, Scratch& own) {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads(), size = layer.value_size;
  const Range slots{std::min(exact.begin, coded.begin), std::max(exact.end, coded.end)};
  float* probs = this->probs(stream, head.first_query());
  float* mixed = own.mixed.data();
  std::fill_n(mixed, heads * size, 0.f);
  if (exact.size() > 0) {
    const auto mix_exact = [&](auto number) {
      using Number = decltype(number);
      const Exact<Number> values(head.store.values, size, exact.begin);
      mix(values, exact.size(), probs + exact.begin, slots_most_, heads, mixed);
    };
    layer.in_bfloat16 ? mix_exact(BFloat16{}) : mix_exact(float{});
  }
  if (coded.size() > 0) mix_codes(head, coded, probs + coded.begin, mixed);
  for (int64_t q = 0; q < heads; ++q) {
    std::copy_n(mixed + q * size, size,
                mixed_.at(partial(stream, head.first_query() + q, slots.begin / kBlock) * size));
  }
}

// A value is offset + code * step: the steps are multiplied to the probabilities.
void DecodeAttention::mix_codes(const Head& head, Range coded, const float* probs, float* mixed) const {
  const int64_t heads = head.query_heads(), size = layer_->value_size, first = coded.begin - head.exact;
  const simd::Half* grid = head.store.value_grid + 2 * first;
  float offsets[kBlock], steps[kBlock], weights[kTogether * kBlock];
  for (int64_t i = 0; i < coded.size(); ++i) {
    offsets[i] = simd::to_float(grid[2 * i]), steps[i] = simd::to_float(grid[2 * i + 1]);
  }
  with_bits(layer_->kv_bits, [&](auto bits) {
    const Codes<bits> codes(head.store.value_codes, size, first);
    for (int64_t q = 0; q < heads; q += kTogether) {
      const int64_t some = std::min(kTogether, heads - q);
      for (int64_t j = 0; j < some; ++j) {
        const float* own = probs + (q + j) * slots_most_;
        float offset = 0;
        for (int64_t i = 0; i < coded.size(); ++i) offset += own[i] * offsets[i];
        for (int64_t i = 0; i < coded.size(); ++i) weights[j * kBlock + i] = own[i] * steps[i];
        for (int64_t i = 0; i < size; ++i) mixed[(q + j) * size + i] += offset;
      }
      mix_some<kTogether>(codes, coded.size(), weights, kBlock, some, mixed + q * size);
    }
  });
}

void DecodeAttention::merge(int64_t stream, float* output, float* factors) const {
  for (int64_t group = 0; group < groups_; ++group) {
    const Slots& slots = slots_[stream][group];
    const int64_t blocks = simd::padded(slots.slots, kBlock) / kBlock, heads = layer_->query_heads / layer_->kv_heads;
    for (int64_t place = 0; place < slots.head_count; ++place) {
      for (int64_t q = slots.heads[place] * heads; q < (slots.heads[place] + 1) * heads; ++q) {
        merge_head(partial(stream, q, 0), blocks, output + q * value_size_, factors + q * blocks_);
      }
    }
  }
}

void DecodeAttention::merge_head(int64_t first, int64_t blocks, float* output, float* factors) const {
  const float *tops = tops_.at(first), *sums = sums_.at(first), *mixed = mixed_.at(first * value_size_);
  float top = kMinusInfinity, sum = 0;
  for (int64_t b = 0; b < blocks; ++b) top = std::max(top, tops[b]);
  for (int64_t b = 0; b < blocks; ++b) {
    factors[b] = tops[b] == kMinusInfinity ? 0 : std::exp(tops[b] - top);
    sum += factors[b] * sums[b];
  }
  std::fill_n(output, value_size_, 0.f);
  for (int64_t b = 0; b < blocks; ++b) {
    const float factor = factors[b] /= sum;
    const float* own = mixed + b * value_size_;
    for (int64_t i = 0; i < value_size_; ++i) output[i] += factor * own[i];
  }
}

void DecodeAttention::update_scores(const Head& head, int64_t stream, Range slots, const float* factors) const {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads();
  const int32_t old = now_[stream] - int32_t(layer.far);
  const float decay = layer.policy == kTova ? 0.f : float(layer.decay), slow = float(layer.long_term_decay);
  for (int64_t begin = slots.begin; begin < slots.end; begin += kBlock) {
    const int64_t count = std::min(kBlock, slots.end - begin);
    const int32_t* index = head.index + begin;
    float received[kBlock] = {}, found[kBlock] = {};
    for (int64_t q = 0; q < heads; ++q) {
      const float factor = factors[(head.first_query() + q) * blocks_ + begin / kBlock];
      const float* own = probs(stream, head.first_query() + q) + begin;
      for (int64_t i = 0; i < count; ++i) {
        const float paid = own[i] * factor;
        received[i] += paid;
        found[i] += paid * paid;
      }
    }
    float* scores = head.scores + begin;
    for (int64_t i = 0; i < count; ++i) {
      scores[i] = index[i] < 0 ? kMinusInfinity : scores[i] * decay + received[i];
    }
    if (!head.long_term) continue;
    float* long_term = head.long_term + begin;
    for (int64_t i = 0; i < count; ++i) long_term[i] = long_term[i] * slow + (index[i] < old ? found[i] : 0);
  }
}

void DecodeAttention::evict(const Worker& worker) {
  float* worth = scratch_[worker.number].worth.data();
  int64_t item = 0;
  each_head([&](int64_t stream, const Slots& slots, int64_t place) {
    if (!worker.owns(item++)) return;
    const Head head(*layer_, slots, place);
    const int32_t seen = now_[stream] + 1;
    if (layer_->kv_bits < 16) head.demote(seen, scratch_[worker.number].grids.data());
    head.evict(seen, worth);
    if (place == 0) *slots.seen = seen;
  });
}

void prefetch_slots(const Slots& slots, const Worker& worker) {
  const Range mine = worker.share(slots.head_count * slots.slots);
  simd::prefetch(slots.index + mine.begin, 4 * mine.size());
  simd::prefetch(slots.rank + mine.begin, 4 * mine.size());
  simd::prefetch(slots.scores + mine.begin, 4 * mine.size());
  if (slots.long_term) simd::prefetch(slots.long_term + mine.begin, 4 * mine.size());
  simd::prefetch(slots.free, 8 * slots.head_count);
}
