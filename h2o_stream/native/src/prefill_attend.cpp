// Attention of one head over a chunk: two small matrix products with softmax and scoring in between.

#include <algorithm>

#include "activation.h"
#include "gemm.h"
#include "masks.h"
#include "policies.h"
#include "prefill.h"
#include "prefill_blocking.h"
#include "rope.h"
#include "simd_functions.h"

namespace prefill {

using simd::Floats;
using simd::kWidth;

// A block of queries, one row per query and query head of the group, and the keys that any of them attends to.
struct Head::Block {
  int64_t query_begin, query_end;
  int64_t rows;
  int64_t key_begin, key_end;  // keys, starting at a panel boundary
};

namespace {

// Elements between rows of logits: not a power of two, which would cause cache set conflicts.
int64_t logit_stride(int64_t num_keys) { return simd::padded(num_keys, kKeyBlock) + kWidth; }

// Transposes rows [count][size] into a panel.
void transpose(const float* rows, int64_t count, int64_t size, float* panel) {
  using Four = float __attribute__((vector_size(16)));
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
      Four block[4];
      for (int64_t j = 0; j < 4; ++j) std::memcpy(block + j, rows + (i + j) * size + k, sizeof(Four));
      simd::transpose(block);
      for (int64_t j = 0; j < 4; ++j) std::memcpy(panel + (k + j) * gemm::kPanel + i, block + j, sizeof(Four));
    }
    for (; k < size; ++k) {
      for (int64_t j = i; j < i + 4; ++j) panel[k * gemm::kPanel + j] = rows[j * size + k];
    }
  }
  for (; i < count; ++i) {
    for (int64_t k = 0; k < size; ++k) panel[k * gemm::kPanel + i] = rows[i * size + k];
  }
}

// Adds the weighted sum of rows [begin, end), restricted to columns [from, to), to `sums`.
template <bool kSquared>
void add_weighted_rows(const float* rows, int64_t stride, const float* weights, int64_t begin, int64_t end,
                       int64_t from, int64_t to, float* sums) {
  simd::Ints lanes{};
  for (int32_t i = 0; i < kWidth; ++i) lanes[i] = i;
  for (int64_t i = from; i < to; i += kWidth) {
    Floats sum{};
    for (int64_t row = begin; row < end; ++row) {
      const Floats x = simd::load(rows + row * stride + i);
      sum += (kSquared ? x * x : x) * weights[row];
    }
    const Floats masked = lanes < int32_t(std::min(to - i, kWidth)) ? sum : Floats{};
    simd::store(simd::load(sums + i) + masked, sums + i);
  }
}

}  // namespace

void Scratch::reserve(const AttentionLayer& layer, int64_t num_keys) {
  const int64_t groups = layer.query_heads / layer.kv_heads, rows = block_queries(groups) * groups;
  keys.reserve(kKeyBlock * layer.head_size);
  queries.reserve(rows * layer.head_size);
  logits.reserve(rows * logit_stride(num_keys));
  accum.reserve(rows * simd::padded(layer.value_size));
  weights.reserve(rows);
  squares.reserve(rows);
}

int64_t Head::key_blocks() const {
  return (num_keys_ + kKeyBlock - 1) / kKeyBlock;
}
int64_t Head::splits() const { return split_count(num_new_, groups_); }

// The first key whose token index is at least `index`.
int64_t Head::first_key_from(int64_t index) const {
  return std::lower_bound(index_.data(), index_.at(num_keys_), index, [](int32_t a, int64_t b) { return a < b; }) -
         index_.data();
}

// Rotates keys and stores them as panels [head_size][kPanel].
void Head::prepare(int64_t block, Scratch& scratch) {
  const int64_t begin = block * kKeyBlock, end = std::min(begin + kKeyBlock, num_keys_), size = layer_->head_size;
  const int64_t value_size = layer_->value_size, value_stride = simd::padded(value_size);
  const int32_t newest = int32_t(seen_ + num_new_) - 1;
  float* rows = scratch.keys.data();
  int32_t distances[kKeyBlock];
  if (layer_->position_mode != kAbsolute) {
    rope::distances(*layer_, *slots_, newest, index_.at(begin), rank_.at(begin), end - begin, distances);
  }
  for (int64_t i = begin; i < end; ++i) {
    float *key = rows + (i - begin) * size, *value = values_.at(i * value_stride);
    read_key(i, key);
    if (layer_->position_mode != kAbsolute) rope::rotate_inverse(*layer_, distances[i - begin], key);
    read_value(i, value);
    std::fill(value + value_size, value + value_stride, 0.f);
  }
  for (int64_t first = begin; first < end; first += gemm::kPanel) {
    const int64_t count = std::min(gemm::kPanel, end - first);
    float *panel = keys_.at(first * size), *panel_rows = rows + (first - begin) * size;
    transpose(panel_rows, count, size, panel);
  }
}

void Head::attend(int64_t split, Scratch& scratch) {
  const int64_t last = split * score_stride_ + score_stride_;
  if (policies::needs_attention(*layer_)) std::fill(sums_.at(last - score_stride_), sums_.at(last), 0.f);
  if (long_term_) std::fill(squares_.at(last - score_stride_), squares_.at(last), 0.f);
  const int64_t blocks = block_count(num_new_, groups_);
  for (int64_t block = split; block < blocks; block += splits()) attend_block(block, split, scratch);
}

void Head::attend_block(int64_t index, int64_t split, Scratch& scratch) {
  Block block{index * block_queries_, std::min((index + 1) * block_queries_, num_new_), 0, 0, 0};
  block.rows = (block.query_end - block.query_begin) * groups_;
  block.key_end = num_held_ + block.query_end;
  if (layer_->sliding_window) {
    block.key_begin =
        first_key_from(first_visible(*layer_, seen_ + block.query_begin)) / gemm::kPanel * gemm::kPanel;
  }
  const int64_t size = layer_->head_size, stride = logit_stride(num_keys_);
  const int64_t value_stride = simd::padded(layer_->value_size);
  float *logits = scratch.logits.data(), *accum = scratch.accum.data();

  read_queries(block, scratch.queries.data());
  for (int64_t i = block.key_begin; i < block.key_end; i += gemm::kPanel) {
    gemm::multiply<false>({scratch.queries.data(), size}, {keys_.at(i * size), gemm::kPanel}, logits + i, stride,
                          block.rows, size, std::min(gemm::kPanel, block.key_end - i));
  }
  softmax(block, stride, scratch);
  for (int64_t i = block.key_begin; i < block.key_end; i += kValueBlock) {
    const gemm::View probs{logits + i, stride}, values{values_.at(i * value_stride), value_stride};
    const int64_t depth = std::min(kValueBlock, block.key_end - i);
    if (i == block.key_begin) {
      gemm::multiply<false>(probs, values, accum, value_stride, block.rows, depth, value_stride);
    } else {
      gemm::multiply<true>(probs, values, accum, value_stride, block.rows, depth, value_stride);
    }
  }
  write_outputs(block, value_stride, scratch);
  add_scores(block, split, stride, scratch);
}

// Reads queries row by row, rotated by their distance to the newest token of the chunk, and scaled.
void Head::read_queries(const Block& block, float* query) const {
  const int64_t size = layer_->head_size, first_head = slots_->heads[local_head_] * groups_;
  const float scaling = float(layer_->scaling);
  for (int64_t q = block.query_begin; q < block.query_end; ++q) {
    for (int64_t g = 0; g < groups_; ++g, query += size) {
      read_new(0, first_head + g, q, size, query);
      if (layer_->position_mode != kAbsolute && q + 1 < num_new_) {
        rope::rotate_inverse(*layer_, std::min(num_new_ - 1 - q, layer_->rope_rows - 1), query);
      }
      for (int64_t i = 0; i < size; ++i) query[i] *= scaling;
    }
  }
}

// Replaces logits by exp(logit - max), 0 where masked, and stores 1 / sum of each row in `scratch.weights`.
void Head::softmax(const Block& block, int64_t stride, Scratch& scratch) const {
  const int64_t padded = block.key_begin + simd::padded(block.key_end - block.key_begin);
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t q = block.query_begin + row / groups_;
    float* logits = scratch.logits.at(row * stride);
    const int64_t from = layer_->sliding_window ? first_key_from(first_visible(*layer_, seen_ + q)) : 0,
                  to = num_held_ + q + 1;
    if (layer_->softcap > 0) soft_cap(float(layer_->softcap), logits + block.key_begin, padded - block.key_begin);
    std::fill(logits + block.key_begin, logits + std::max(from, block.key_begin), simd::kMinusInfinity);
    std::fill(logits + to, logits + padded, simd::kMinusInfinity);
    const float sink = layer_->sink_logits
                           ? layer_->sink_logits[slots_->heads[local_head_] * groups_ + row % groups_]
                           : simd::kMinusInfinity;
    const float top = std::max(sink, simd::reduce_max(logits + block.key_begin, padded - block.key_begin));
    Floats sums{};
    for (int64_t i = block.key_begin; i < padded; i += kWidth) {
      const Floats exp_logits = simd::exp_nonpositive(simd::load(logits + i) - top);
      simd::store(exp_logits, logits + i);
      sums += exp_logits;
    }
    scratch.weights[row] = 1 / (simd::reduce_add(sums) + std::exp(sink - top));
  }
}

void Head::write_outputs(const Block& block, int64_t stride, const Scratch& scratch) const {
  const int64_t size = layer_->value_size, first_head = slots_->heads[local_head_] * groups_;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t token = tokens_->output_row(stream_) + chunk_begin_ + block.query_begin + row / groups_;
    const int64_t at = (token * layer_->query_heads + first_head + row % groups_) * size;
    const float* accum = scratch.accum.at(row * stride);
    const float scale = scratch.weights[row];
    if (tokens_->in_bfloat16) {
      simd::BFloat16* output = static_cast<simd::BFloat16*>(tokens_->output) + at;
      for (int64_t i = 0; i < size; ++i) simd::from_float(accum[i] * scale, output[i]);
    } else {
      float* output = static_cast<float*>(tokens_->output) + at;
      for (int64_t i = 0; i < size; ++i) output[i] = accum[i] * scale;
    }
  }
}

// Adds the attention received, weighted by decay until the end of the chunk. Long-term scores add squares for keys at
// least `long_term_distance` before the first query of the query's block of that size.
void Head::add_scores(const Block& block, int64_t split, int64_t stride, Scratch& scratch) {
  if (!policies::needs_attention(*layer_)) return;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t age = num_new_ - 1 - (block.query_begin + row / groups_);
    const float inverse = scratch.weights[row];
    scratch.weights[row] = decays_[std::min(age, kMaxDecaySteps)] * inverse;
    if (long_term_) scratch.squares[row] = long_term_decays_[age] * inverse * inverse;
  }
  const float* probs = scratch.logits.data();
  const int64_t first_sum = split * score_stride_;
  add_weighted_rows<false>(probs, stride, scratch.weights.data(), 0, block.rows, block.key_begin, block.key_end,
                           sums_.at(first_sum));
  for (int64_t q = block.query_begin, query_end; long_term_ && q < block.query_end; q = query_end) {
    const int64_t start = q / layer_->long_term_distance * layer_->long_term_distance;
    query_end = std::min(start + layer_->long_term_distance, block.query_end);
    add_weighted_rows<true>(probs, stride, scratch.squares.data(), (q - block.query_begin) * groups_,
                            (query_end - block.query_begin) * groups_, block.key_begin,
                            std::min(first_key_from(seen_ + start - layer_->long_term_distance), block.key_end),
                            squares_.at(first_sum));
  }
}

}  // namespace prefill
