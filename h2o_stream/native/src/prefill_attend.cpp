// Attention of a chunk of one head: logits and outputs by small products of matrices, softmax and scores in between.

#include <algorithm>

#include "gemm.h"
#include "policies.h"
#include "prefill.h"
#include "prefill_sizes.h"
#include "rope.h"

namespace prefill {

using simd::Floats;
using simd::kWidth;

// Some queries of a chunk with all query heads of the group, a row each, and the places that any of them sees.
struct Head::Block {
  int64_t first, past;  // queries
  int64_t rows;
  int64_t begin, end;   // places, from the beginning of a panel
};

namespace {

// Numbers between two rows of logits: not a power of two, so that rows do not meet in the same sets of the cache.
int64_t logit_stride(int64_t places) { return simd::padded(places, kPlaces) + kWidth; }

// bound * tanh(x / bound), to within 1e-7 of the bound.
void soft_cap(float bound, float* x, int64_t count) {
  for (int64_t i = 0; i < count; i += kWidth) {
    const Floats given = simd::load(x + i), size = given < 0.f ? -given : given;
    const Floats faded = simd::exp_nonpositive(size * (-2.f / bound));
    const Floats capped = (1.f - faded) / (1.f + faded) * bound;
    simd::store(given < 0.f ? -capped : capped, x + i);
  }
}

// Rows [count][size] into the columns of a panel.
void transpose(const float* rows, int64_t count, int64_t size, float* panel) {
  using Four = float __attribute__((vector_size(16)));
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
      Four row[4];
      for (int64_t j = 0; j < 4; ++j) std::memcpy(row + j, rows + (i + j) * size + k, sizeof(Four));
      const Four a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      const Four b = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      const Four c = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      const Four d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      const Four columns[4] = {__builtin_shufflevector(a, c, 0, 1, 4, 5), __builtin_shufflevector(a, c, 2, 3, 6, 7),
                               __builtin_shufflevector(b, d, 0, 1, 4, 5), __builtin_shufflevector(b, d, 2, 3, 6, 7)};
      for (int64_t j = 0; j < 4; ++j) std::memcpy(panel + (k + j) * gemm::kPanel + i, columns + j, sizeof(Four));
    }
    for (; k < size; ++k) {
      for (int64_t j = i; j < i + 4; ++j) panel[k * gemm::kPanel + j] = rows[j * size + k];
    }
  }
  for (; i < count; ++i) {
    for (int64_t k = 0; k < size; ++k) panel[k * gemm::kPanel + i] = rows[i * size + k];
  }
}

// Sums of rows [begin, end) of a matrix, each times a weight, added to `sums` in columns [from, to).
template <bool kSquared>
void add_rows(const float* rows, int64_t stride, const float* weights, int64_t begin, int64_t end, int64_t from,
              int64_t to, float* sums) {
  simd::Ints lane{};
  for (int32_t i = 0; i < kWidth; ++i) lane[i] = i;
  for (int64_t i = from; i < to; i += kWidth) {
    Floats sum{};
    for (int64_t row = begin; row < end; ++row) {
      const Floats x = simd::load(rows + row * stride + i);
      sum += (kSquared ? x * x : x) * weights[row];
    }
    const Floats inside = lane < int32_t(std::min(to - i, kWidth)) ? sum : Floats{};
    simd::store(simd::load(sums + i) + inside, sums + i);
  }
}

}  // namespace

void Scratch::reserve(const AttentionLayer& layer, int64_t places) {
  const int64_t groups = layer.query_heads / layer.kv_heads, rows = block_queries(groups) * groups;
  keys.reserve(kPlaces * layer.head_size);
  queries.reserve(rows * layer.head_size);
  logits.reserve(rows * logit_stride(places));
  mixed.reserve(rows * simd::padded(layer.value_size));
  weights.reserve(rows);
  squares.reserve(rows);
}

int64_t Head::pieces() const { return (places_ + kPlaces - 1) / kPlaces; }
int64_t Head::bands() const { return band_count(fresh_, groups_); }

// The first place whose token index is no less.
int64_t Head::first_newer(int64_t index) const {
  return std::lower_bound(index_.data(), index_.at(places_), index, [](int32_t a, int64_t b) { return a < b; }) -
         index_.data();
}

// Keys are rotated and turned into panels: [head_size][kPanel] numbers for kPanel places.
void Head::prepare(int64_t piece, Scratch& scratch) {
  const int64_t begin = piece * kPlaces, end = std::min(begin + kPlaces, places_), size = layer_->head_size;
  const int64_t value_size = layer_->value_size, value_stride = simd::padded(value_size);
  const int32_t newest = int32_t(seen_ + fresh_) - 1;
  float* rows = scratch.keys.data();
  int32_t distances[kPlaces];
  if (layer_->positions != kAsFed) {
    rope::distances(*layer_, *slots_, newest, index_.at(begin), rank_.at(begin), end - begin, distances);
  }
  for (int64_t i = begin; i < end; ++i) {
    float *key = rows + (i - begin) * size, *value = values_.at(i * value_stride);
    read_key(i, key);
    if (layer_->positions != kAsFed) rope::rotate_back(*layer_, distances[i - begin], key);
    read_value(i, value);
    std::fill(value + value_size, value + value_stride, 0.f);
  }
  for (int64_t first = begin; first < end; first += gemm::kPanel) {
    const int64_t count = std::min(gemm::kPanel, end - first);
    float *panel = keys_.at(first * size), *own = rows + (first - begin) * size;
    transpose(own, count, size, panel);
  }
}

void Head::attend(int64_t band, Scratch& scratch) {
  const int64_t last = band * sums_stride_ + sums_stride_;
  if (policies::observes(*layer_)) std::fill(sums_.at(last - sums_stride_), sums_.at(last), 0.f);
  if (long_term_) std::fill(squares_.at(last - sums_stride_), squares_.at(last), 0.f);
  const int64_t blocks = block_count(fresh_, groups_);
  for (int64_t block = band; block < blocks; block += bands()) attend_block(block, band, scratch);
}

void Head::attend_block(int64_t number, int64_t band, Scratch& scratch) {
  Block block{number * block_queries_, std::min((number + 1) * block_queries_, fresh_), 0, 0, 0};
  block.rows = (block.past - block.first) * groups_;
  block.end = held_ + block.past;
  if (layer_->sliding) {
    block.begin = first_newer(seen_ + block.first - layer_->sliding + 1) / gemm::kPanel * gemm::kPanel;
  }
  const int64_t size = layer_->head_size, stride = logit_stride(places_);
  const int64_t value_stride = simd::padded(layer_->value_size);
  float *logits = scratch.logits.data(), *mixed = scratch.mixed.data();

  read_queries(block, scratch.queries.data());
  for (int64_t i = block.begin; i < block.end; i += gemm::kPanel) {
    gemm::multiply<false>({scratch.queries.data(), size}, {keys_.at(i * size), gemm::kPanel}, logits + i, stride,
                          block.rows, size, std::min(gemm::kPanel, block.end - i));
  }
  softmax(block, stride, scratch);
  for (int64_t i = block.begin; i < block.end; i += kDepth) {
    const gemm::Rows probs{logits + i, stride}, values{values_.at(i * value_stride), value_stride};
    const int64_t depth = std::min(kDepth, block.end - i);
    if (i == block.begin) {
      gemm::multiply<false>(probs, values, mixed, value_stride, block.rows, depth, value_stride);
    } else {
      gemm::multiply<true>(probs, values, mixed, value_stride, block.rows, depth, value_stride);
    }
  }
  write_outputs(block, value_stride, scratch);
  add_scores(block, band, stride, scratch);
}

// Row by row, rotated to where they stand before the newest token of the chunk, and scaled.
void Head::read_queries(const Block& block, float* query) const {
  const int64_t size = layer_->head_size, first_head = slots_->heads[head_] * groups_;
  const float scaling = float(layer_->scaling);
  for (int64_t q = block.first; q < block.past; ++q) {
    for (int64_t g = 0; g < groups_; ++g, query += size) {
      read_new(0, first_head + g, q, size, query);
      if (layer_->positions != kAsFed && q + 1 < fresh_) {
        rope::rotate_back(*layer_, std::min(fresh_ - 1 - q, layer_->distances - 1), query);
      }
      for (int64_t i = 0; i < size; ++i) query[i] *= scaling;
    }
  }
}

// Leaves e to the power of each logit less the largest of its row, zero where a place may not be seen, and in
// `scratch.weights` one over the sum of each row.
void Head::softmax(const Block& block, int64_t stride, Scratch& scratch) const {
  const int64_t padded = block.begin + simd::padded(block.end - block.begin);
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t q = block.first + row / groups_;
    float* logits = scratch.logits.at(row * stride);
    const int64_t from = layer_->sliding ? first_newer(seen_ + q - layer_->sliding + 1) : 0, to = held_ + q + 1;
    if (layer_->softcap > 0) soft_cap(float(layer_->softcap), logits + block.begin, padded - block.begin);
    std::fill(logits + block.begin, logits + std::max(from, block.begin), simd::kMinusInfinity);
    std::fill(logits + to, logits + padded, simd::kMinusInfinity);
    const float top = simd::largest(logits + block.begin, padded - block.begin);
    Floats sums{};
    for (int64_t i = block.begin; i < padded; i += kWidth) {
      const Floats power = simd::exp_nonpositive(simd::load(logits + i) - top);
      simd::store(power, logits + i);
      sums += power;
    }
    scratch.weights[row] = 1 / simd::total(sums);
  }
}

void Head::write_outputs(const Block& block, int64_t stride, const Scratch& scratch) const {
  const int64_t size = layer_->value_size, first_head = slots_->heads[head_] * groups_;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t token = stream_ * tokens_->tokens + first_ + block.first + row / groups_;
    const int64_t at = (token * layer_->query_heads + first_head + row % groups_) * size;
    const float* mixed = scratch.mixed.at(row * stride);
    const float scale = scratch.weights[row];
    if (tokens_->in_bfloat16) {
      simd::BFloat16* output = static_cast<simd::BFloat16*>(tokens_->output) + at;
      for (int64_t i = 0; i < size; ++i) simd::from_float(mixed[i] * scale, output[i]);
    } else {
      float* output = static_cast<float*>(tokens_->output) + at;
      for (int64_t i = 0; i < size; ++i) output[i] = mixed[i] * scale;
    }
  }
}

// Attention received, by what a query counts once the chunk is over; its squares where it comes from afar: from `far`
// tokens before the first of the `far` queries that the query is one of.
void Head::add_scores(const Block& block, int64_t band, int64_t stride, Scratch& scratch) {
  if (!policies::observes(*layer_)) return;
  for (int64_t row = 0; row < block.rows; ++row) {
    const int64_t later = fresh_ - 1 - (block.first + row / groups_);
    const float inverse = scratch.weights[row];
    scratch.weights[row] = decays_[std::min(later, kAtOnce)] * inverse;
    if (long_term_) scratch.squares[row] = long_term_decays_[later] * inverse * inverse;
  }
  const float* probs = scratch.logits.data();
  const int64_t own = band * sums_stride_;
  add_rows<false>(probs, stride, scratch.weights.data(), 0, block.rows, block.begin, block.end, sums_.at(own));
  for (int64_t q = block.first, past; long_term_ && q < block.past; q = past) {
    const int64_t start = q / layer_->far * layer_->far;
    past = std::min(start + layer_->far, block.past);
    add_rows<true>(probs, stride, scratch.squares.data(), (q - block.first) * groups_, (past - block.first) * groups_,
                   block.begin, std::min(first_newer(seen_ + start - layer_->far), block.end), squares_.at(own));
  }
}

}  // namespace prefill
