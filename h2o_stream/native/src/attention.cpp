#include "attention.h"

#include "activation.h"
#include "simd_functions.h"
#include "slot_kernels.h"

using simd::BFloat16;
using simd::kMinusInfinity;
using namespace slot_kernels;

void DecodeAttention::reserve(int64_t streams, int64_t query_heads, int64_t value_size, int64_t slots,
                              int64_t threads) {
  query_heads_ = query_heads;
  max_slots_ = simd::padded(slots, 16), blocks_ = simd::padded(slots, kBlockSlots) / kBlockSlots;
  heads_ = streams * query_heads;
  probs_.reserve(heads_ * max_slots_);
  maxima_.reserve(heads_ * blocks_);
  sums_.reserve(heads_ * blocks_);
  outputs_.reserve(heads_ * blocks_ * value_size);
  if (int64_t(scratch_.size()) < threads) scratch_.resize(threads);
}

void DecodeAttention::reserve_scratch(const AttentionLayer& layer) {
  for (Scratch& scratch : scratch_) {
    scratch.queries.reserve(layer.query_heads / layer.kv_heads * simd::padded(layer.head_size, 16));
    scratch.key.reserve(layer.head_size);
    scratch.value.reserve(layer.value_size);
    if (layer.kv_bits < 16) scratch.values.reserve(kBlockSlots * layer.value_size);
    scratch.rotated.reserve(2 * layer.head_size);
    scratch.products.reserve(layer.query_heads / layer.kv_heads * kWidth);
    if (fixed_point::fits(layer)) scratch.rounded.reserve(layer);
    scratch.worth.reserve(max_slots_);
    scratch.factors.reserve(factor_count());
    scratch.distances.reserve(kBlockSlots);
    scratch.key_params.reserve(6 * std::max(layer.head_size, layer.value_size));
    scratch.accum.reserve(layer.query_heads / layer.kv_heads * layer.value_size);
  }
}

void DecodeAttention::reserve_heads(int64_t heads) {
  for (Scratch& scratch : scratch_) scratch.places.reserve(heads);
}

void DecodeAttention::insert_token(const HeadSlots& head, int64_t slot, int32_t token_index, const float* key,
                                   const float* value) {
  head.store.write(slot, key, value);
  head.index[slot] = token_index;
  head.rank.set(slot, 0);
  head.scores[slot] = 0;
  if (head.long_term) head.long_term[slot] = 0;
}

void DecodeAttention::attend_block(const Row& row, const HeadSlots& head, Range slots, Scratch& scratch) {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads(), first = head.first_query(), block = slots.begin / kBlockSlots;
  if (layer.rope) head.distances(slots.begin, slots.end, row.token_index, scratch.distances.data());
  const Range exact{slots.begin, std::min(slots.end, head.exact)},
      quantized{std::max(slots.begin, head.exact), slots.end};
  float* probs = this->probs(row, first) + slots.begin;
  const auto add_logits = [&](const auto& keys, const auto& values, Range range) {
    if (range.size() <= 0) return;
    const int64_t offset = range.begin - slots.begin;
    const Rotation rotation{layer.rope, layer.rotary_dims, scratch.distances.at(offset)};
    query_key_dots(keys, values, range.size(), rotation, scratch.rotated.data(), scratch.products.data(),
                   scratch.queries.data(), heads, probs + offset, max_slots_);
  };
  const auto add_exact = [&](auto element) {
    using Rows = DenseRows<decltype(element)>;
    add_logits(Rows(head.store.keys, layer.head_size, exact.begin),
               Rows(head.store.values, layer.value_size, exact.begin), exact);
  };
  layer.in_bfloat16 ? add_exact(BFloat16{}) : add_exact(float{});
  if (quantized.size() > 0 && fixed_point::fits(layer)) {
    const int64_t first = quantized.begin - head.exact, offset = quantized.begin - slots.begin;
    fixed_point::query_key_dots(layer, head.store.key_codes + first * layer.head_size,
                                {head.store.value_codes, layer.value_size, first}, quantized.size(),
                                scratch.distances.at(offset), scratch.rounded, heads, probs + offset, max_slots_);
  } else if (quantized.size() > 0) {
    const float *offsets = scratch.key_params.data(), *scales = scratch.key_params.at(layer.head_size);
    const int64_t first = quantized.begin - head.exact;
    const bool rotated_whole = layer.rope && layer.rotary_dims == layer.head_size;
    with_rows(layer.kv_bits, head.store.key_codes, layer.head_size, first, rotated_whole, [&](const auto& codes) {
      const ByteRows values(head.store.value_codes, layer.value_size * layer.kv_bits / 8, first);
      add_logits(QuantizedKeys(codes, offsets, scales), values, quantized);
    });
  }
  for (int64_t q = 0; q < heads; ++q) {
    float* logits = probs + q * max_slots_;
    scale_and_mask(head, slots, row.token_index, logits);
    const float maximum = simd::reduce_max(logits, slots.size());
    maxima_[block_number(row, first + q, block)] = maximum;
    sums_[block_number(row, first + q, block)] = exp_and_sum(logits, slots.size(), maximum);
  }
  accumulate_values(row, head, exact, quantized, scratch);
}

// Applies scaling, softcap and the sliding window to logits.
void DecodeAttention::scale_and_mask(const HeadSlots& head, Range slots, int32_t token_index, float* logits) const {
  const float scaling = float(layer_->scaling), cap = float(layer_->softcap);
  const int32_t oldest = int32_t(first_visible(*layer_, token_index));
  const int32_t* index = head.index + slots.begin;
  const int64_t count = slots.size();
  for (int64_t i = 0; i < count; ++i) logits[i] *= scaling;
  if (cap > 0) soft_cap(cap, logits, count);
  for (int64_t i = 0; i < count; ++i) logits[i] = index[i] < oldest ? kMinusInfinity : logits[i];
}

void DecodeAttention::accumulate_values(const Row& row, const HeadSlots& head, Range exact, Range quantized,
                                        Scratch& scratch) {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads(), size = layer.value_size;
  const Range slots{std::min(exact.begin, quantized.begin), std::max(exact.end, quantized.end)};
  float* probs = this->probs(row, head.first_query());
  float* accum = scratch.accum.data();
  std::fill_n(accum, heads * size, 0.f);
  if (exact.size() > 0) {
    const auto accumulate_dense = [&](auto element) {
      using Element = decltype(element);
      const DenseRows<Element> values(head.store.values, size, exact.begin);
      accumulate(values, exact.size(), probs + exact.begin, max_slots_, heads, accum);
    };
    layer.in_bfloat16 ? accumulate_dense(BFloat16{}) : accumulate_dense(float{});
  }
  if (quantized.size() > 0) accumulate_quantized(head, quantized, probs + quantized.begin, scratch);
  for (int64_t q = 0; q < heads; ++q) {
    std::copy_n(accum + q * size, size,
                outputs_.at(block_number(row, head.first_query() + q, slots.begin / kBlockSlots) * size));
  }
}

// A value is offset + code * scale, so the scales are folded into the probabilities.
void DecodeAttention::accumulate_quantized(const HeadSlots& head, Range quantized, const float* probs,
                                           Scratch& scratch) const {
  float* accum = scratch.accum.data();
  const int64_t heads = head.query_heads(), size = layer_->value_size, first = quantized.begin - head.exact;
  const simd::Half* params = head.store.value_grid + 2 * first;
  float offsets[kBlockSlots], scales[kBlockSlots], weights[kMaxHeads * kBlockSlots];
  store::for_each_vector(quantized.size(), [&](auto is_vector, int64_t i) {
    if constexpr (is_vector) {
      const auto [even, odd] = simd::separated(simd::load(params + 2 * i), simd::load(params + 2 * i + simd::kWidth));
      simd::store(even, offsets + i), simd::store(odd, scales + i);
    } else {
      offsets[i] = simd::to_float(params[2 * i]), scales[i] = simd::to_float(params[2 * i + 1]);
    }
  });
  with_rows(layer_->kv_bits, head.store.value_codes, size, first, true, [&](const auto& codes) {
    if (!codes.vectorizable()) {
      float* values = scratch.values.data();
      for (int64_t i = 0; i < quantized.size(); ++i) head.store.read_value(quantized.begin + i, values + i * size);
      return accumulate(DenseRows<float>(values, size), quantized.size(), probs, max_slots_, heads, accum);
    }
    for (int64_t q = 0; q < heads; q += kMaxHeads) {
      const int64_t count = std::min(kMaxHeads, heads - q);
      for (int64_t j = 0; j < count; ++j) {
        const float* row = probs + (q + j) * max_slots_;
        const float offset = dot(row, offsets, quantized.size());
        for (int64_t i = 0; i < quantized.size(); ++i) weights[j * kBlockSlots + i] = row[i] * scales[i];
        for (int64_t i = 0; i < size; ++i) accum[(q + j) * size + i] += offset;
      }
      if (layer_->kv_bits == 8 && size % (4 * kWidth) == 0) {
        fixed_point::accumulate(codes.at(0), size, quantized.size(), weights, kBlockSlots, count, accum + q * size);
      } else {
        accumulate_heads<kMaxHeads>(codes, quantized.size(), weights, kBlockSlots, count, accum + q * size);
      }
    }
  });
}

void DecodeAttention::merge(int64_t stream, float* output, float* factors) {
  const Row row{stream, stream, token_indices_[stream]};
  for (int64_t group = 0; group < groups_; ++group) {
    const Slots& slots = slots_[stream][group];
    for (int64_t local_head = 0; local_head < slots.head_count; ++local_head) {
      merge(row, slots, local_head, output, factors);
    }
  }
}

// The same for the queries of a head; `output` and `factors` are those of all heads.
void DecodeAttention::merge(const Row& row, const Slots& slots, int64_t local_head, float* output,
                            float* factors) const {
  const int64_t heads = layer_->query_heads / layer_->kv_heads;
  const int64_t blocks = simd::padded(slots.slot_count, kBlockSlots) / kBlockSlots;
  for (int64_t i = 0; i < heads; ++i) {
    const int64_t q = slots.heads[local_head] * heads + i;
    const float sink = layer_->sink_logits ? layer_->sink_logits[q] : kMinusInfinity;
    merge_head(block_number(row, q, 0), blocks, sink, output + q * layer_->value_size, factors + q * blocks_);
  }
}

void DecodeAttention::merge_head(int64_t first, int64_t blocks, float sink, float* output, float* factors) const {
  const int64_t size = layer_->value_size;
  const float *maxima = maxima_.at(first), *sums = sums_.at(first), *accum = outputs_.at(first * size);
  float maximum = sink;
  for (int64_t b = 0; b < blocks; ++b) maximum = std::max(maximum, maxima[b]);
  float sum = std::exp(sink - maximum);
  for (int64_t b = 0; b < blocks; ++b) {
    factors[b] = maxima[b] == kMinusInfinity ? 0 : std::exp(maxima[b] - maximum);
    sum += factors[b] * sums[b];
  }
  std::fill_n(output, size, 0.f);
  for (int64_t b = 0; b < blocks; ++b) {
    const float factor = factors[b] /= sum;
    const float* row = accum + b * size;
    for (int64_t i = 0; i < size; ++i) output[i] += factor * row[i];
  }
}

void DecodeAttention::update_scores(const Row& row, const HeadSlots& head, Range slots, const float* factors) const {
  const AttentionLayer& layer = *layer_;
  const int64_t heads = head.query_heads();
  const int32_t long_term_before = row.token_index - int32_t(layer.long_term_distance);
  const float decay = layer.policy == kTova ? 0.f : float(layer.decay), long_term_decay = float(layer.long_term_decay);
  for (int64_t begin = slots.begin; begin < slots.end; begin += kBlockSlots) {
    const int64_t count = std::min(kBlockSlots, slots.end - begin);
    const int32_t* index = head.index + begin;
    float attention[kBlockSlots] = {}, squares[kBlockSlots] = {};
    for (int64_t q = 0; q < heads; ++q) {
      const float factor = factors[(head.first_query() + q) * blocks_ + begin / kBlockSlots];
      const float* exps = probs(row, head.first_query() + q) + begin;
      for (int64_t i = 0; i < count; ++i) {
        const float prob = exps[i] * factor;
        attention[i] += prob;
        squares[i] += prob * prob;
      }
    }
    float* scores = head.scores + begin;
    for (int64_t i = 0; i < count; ++i) {
      scores[i] = index[i] < 0 ? kMinusInfinity : scores[i] * decay + attention[i];
    }
    if (!head.long_term) continue;
    float* long_term = head.long_term + begin;
    for (int64_t i = 0; i < count; ++i)
      long_term[i] = long_term[i] * long_term_decay + (index[i] < long_term_before ? squares[i] : 0);
  }
}

void DecodeAttention::evict(const Worker& worker) {
  int64_t item = 0;
  for_each_head([&](int64_t stream, const Slots& slots, int64_t local_head) {
    if (!worker.owns(item++)) return;
    const HeadSlots head(*layer_, slots, local_head);
    evict({stream, stream, token_indices_[stream]}, head, scratch_[worker.index]);
  });
}

void DecodeAttention::evict(const Row& row, const HeadSlots& head, Scratch& scratch) {
  const int32_t seen = row.token_index + 1;
  if (layer_->kv_bits < 16) head.quantize_oldest(seen, scratch.key_params.data());
  head.evict(seen, scratch.worth.data());
  if (head.local_head == 0) *head.slots.seen = seen;
}

void DecodeAttention::collect_heads(const Worker& worker) {
  std::vector<Place>& places = scratch_[worker.index].places;
  int64_t total = 0, first = 0;
  for_each_head([&](int64_t, const Slots& slots, int64_t) { total += slots.slot_count; });
  const Range range = worker.partition(total);
  places.clear();
  for_each_head([&](int64_t stream, const Slots& slots, int64_t local_head) {
    const int64_t middle = first + slots.slot_count / 2;
    first += slots.slot_count;
    if (middle >= range.begin && middle < range.end) places.push_back({stream, &slots, local_head});
  });
}

void DecodeAttention::prefetch_head(const Place& place) const {
  const HeadSlots head(*layer_, *place.slots, place.local_head);
  simd::prefetch(head.free, sizeof *head.free);
  simd::prefetch(head.index, 4 * head.count);
  const int64_t rank_bytes = Ranks::bytes(*place.slots);
  simd::prefetch(static_cast<const uint8_t*>(place.slots->rank) + rank_bytes * place.local_head * head.count,
                 rank_bytes * head.count);
  const int64_t key_bytes = layer_->head_size * (layer_->in_bfloat16 ? 2 : 4);
  simd::prefetch(head.store.keys, std::min(kPrefetchSlots, head.exact) * key_bytes);
}

void prefetch_slots(const Slots& slots, const Worker& worker) {
  const Range range = worker.partition(slots.head_count * slots.slot_count);
  simd::prefetch(slots.index + range.begin, 4 * range.size());
  const int64_t rank_bytes = Ranks::bytes(slots);
  simd::prefetch(static_cast<uint8_t*>(slots.rank) + rank_bytes * range.begin, rank_bytes * range.size());
  simd::prefetch(slots.scores + range.begin, 4 * range.size());
  if (slots.long_term) simd::prefetch(slots.long_term + range.begin, 4 * range.size());
  simd::prefetch(slots.free, 8 * slots.head_count);
  if (slots.value_grid) simd::prefetch(slots.value_grid + 2 * range.begin, 4 * range.size());
}
