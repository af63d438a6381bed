#include "memory_search.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "memory_limits.h"
#include "memory_scan.h"
#include "memory_select.h"
#include "rope.h"
#include "slot_kernels.h"

namespace memory {

using simd::kWidth;

namespace {

constexpr int64_t kBlocksAhead = 24;  // that are prefetched
constexpr int64_t kStripe = 64;       // blocks that are scanned before their candidates are collected
constexpr int64_t kSampledBest = 6;   // of the sample that a threshold is estimated by
constexpr int64_t kMaxSample = 1024;  // its blocks
constexpr int64_t kMinSample = 64;    // of summaries
constexpr int32_t kNone = 256;        // a limit that no sum reaches

// Codes of keys in 8 bits, which are anywhere.
struct MemoryKeys {
  static constexpr bool kAnySize = true;
  static constexpr int64_t kFixedSize = 0;

  const int8_t* const* keys;
  int64_t key_size;

  int64_t size() const { return key_size; }
  simd::Floats load(int64_t i, int64_t element) const { return simd::load(keys[i] + element); }
  void read(int64_t i, float* key) const { std::copy_n(keys[i], key_size, key); }
  void prefetch(int64_t) const {}
  bool vectorizable() const { return key_size % kWidth == 0; }
};

}  // namespace

void Search::reserve(const AttentionLayer& layer, int64_t queries) {
  const int64_t wanted = std::max(layer.memory_candidates, layer.memory_question_candidates);
  const int64_t candidates = 7 * wanted * kTogether + layer.memory_matches + kBlock;
  max_places_ = std::max(max_places_, simd::padded(std::max(candidates, kTraining), 16));
  stride_ = simd::padded(layer.head_size);
  for (Buffer<float>* buffer : {&queries_, &far_queries_, &near_queries_}) buffer->reserve(queries * stride_);
  key_.reserve(stride_);
  const size_t batches = std::max(size_t((queries + kTogether - 1) / kTogether), candidates_.size());
  num_near_.resize(batches), candidates_.resize(batches);
  far_.resize(batches * kTogether), near_.resize(batches * kTogether);
  thresholds_.resize(far_.size()), far_limits_.resize(far_.size()), near_limits_.resize(far_.size());
  for (Candidates& of_batch : candidates_) of_batch.reserve(max_places_);
  chosen_.resize(batches);
  for (std::vector<IndexBlock>& of_batch : chosen_) of_batch.reserve(layer.memory_blocks * kTogether);
  summaries_.reserve(4 * layer.memory_blocks * kTogether + 1);
  sums_.reserve(kMaxSample * kTogether * kBlock);
  places_.reserve(max_places_);
  keys_.reserve(max_places_), scales_.reserve(max_places_), distances_.reserve(max_places_);
  unsummed_.reserve(kTogether * kWidth), products_.reserve(kTogether * max_places_);
  matches_.reserve(layer.memory_matches + 1);
}

void Search::begin(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, int64_t candidates) {
  layer_ = &layer, memory_ = memory, newest_ = newest, num_candidates_ = candidates;
  count_ = 0, stride_ = simd::padded(layer.head_size), has_thresholds_ = false;
  std::fill_n(key_.data(), stride_, 0.f);
}

void Search::add_query(const float* query) {
  const int64_t size = layer_->head_size;
  float *copy = queries_.at(count_ * stride_), *far = far_queries_.at(count_ * stride_);
  std::fill(std::copy_n(query, size, copy), copy + stride_, 0.f);
  std::copy_n(copy, stride_, far);
  if (layer_->rope) rope::rotate(*layer_, layer_->memory_distance, far);
  ++count_;
}

void Search::count_queries() {
  if (memory_.codebook().learned()) return;
  for (int64_t q = 0; q < count_; ++q) memory_.codebook().count(far_queries_.at(q * stride_));
}

bool Search::is_exact() const {
  return !memory_.codebook().learned() || memory_.count() <= std::max(num_candidates_, kTraining);
}

// Blocks of tokens that are all at the largest distance.
int64_t Search::far_blocks() const {
  return std::max<int64_t>(memory_.count() - layer_->memory_distance, 0) / kBlock;
}

// The token at whose distance a block of newer ones is compared.
int64_t Search::middle_of(int64_t block) const {
  return std::min(block * kBlock + kBlock / 2, memory_.count() - 1);
}

// Visits the blocks of newer tokens of a part.
template <class Visit>
void Search::for_each_near(int64_t part, int64_t parts, Visit visit) const {
  for (int64_t block = far_blocks() + part; block * kBlock < memory_.count(); block += parts) visit(block);
}

void Search::search(int64_t part, int64_t parts) {
  multiplied_ = -1;
  const int64_t batches = (count_ + kTogether - 1) / kTogether;
  for (int64_t batch = 0; batch < batches; ++batch) candidates_[batch].clear(), num_near_[batch] = 0;
  if (is_exact()) {
    const int64_t end = memory_.count() * (part + 1) / parts;
    for (int64_t place = memory_.count() * part / parts; place < end; ++place) {
      for (int64_t batch = 0; batch < batches; ++batch) candidates_[batch].push_back({0, int32_t(place)});
    }
    return;
  }
  const int64_t wanted = num_candidates_ * std::min(count_, kTogether);
  for_each_near(part, parts, [&](int64_t block) {
    memory_.prefetch_key(middle_of(block)), memory_.prefetch_codes(memory_.codes(block));
  });
  if (!has_thresholds_) prepare();
  const auto part_of = [&](int64_t blocks) -> Range { return {blocks * part / parts, blocks * (part + 1) / parts}; };
  const Range rest = part_of(far_blocks() - unindexed_);
  for (int64_t i = rest.begin; i < std::min(rest.begin + kBlocksAhead, rest.end); ++i) {
    memory_.prefetch_codes(memory_.codes(unindexed_ + i));
  }
  for_each_near(part, parts, [&](int64_t block) { scan_near(block); });
  for (int64_t batch = 0; batch < batches; ++batch) {
    keep_best(candidates_[batch], 0, std::max(wanted / parts, layer_->memory_matches));
    num_near_[batch] = int64_t(candidates_[batch].size());
    const Range chosen = part_of(int64_t(chosen_[batch].size()));
    scan_older(batch, chosen, chosen.end);
  }
  // All batches are compared with some blocks while these are in the L1 cache.
  for (int64_t begin = rest.begin; begin < rest.end; begin += kStripe) {
    for (int64_t batch = 0; batch < batches; ++batch) {
      const int64_t first = int64_t(chosen_[batch].size()), end = std::min(begin + kStripe, rest.end);
      scan_older(batch, {first + begin, first + end}, batch ? 0 : first + rest.end);
    }
  }
  for (int64_t batch = 0; batch < batches; ++batch) keep_best(candidates_[batch], num_near_[batch], 2 * wanted);
}

// Makes the tables for the largest distance, decides which older tokens are scanned, and estimates which products so
// many of them reach as are wanted.
void Search::prepare() {
  has_thresholds_ = true;
  memory_.codebook().make_tables(far_queries_.data(), stride_, count_, far_.data());
  const HeadIndex& index = memory_.head_index();
  const int64_t far = far_blocks(), batches = (count_ + kTogether - 1) / kTogether;
  chapters_ = index.chapters();
  while (chapters_ && index.start(chapters_) > far * kBlock) --chapters_;
  const int64_t chosen = layer_->memory_blocks * std::min(count_, kTogether);
  if (chapters_ * index.chapter_blocks() < layer_->memory_min_index * chosen) chapters_ = 0;
  unindexed_ = chapters_ ? index.start(chapters_) / kBlock : 0;
  for (int64_t batch = 0; batch < batches; ++batch) {
    choose_blocks(batch);
    const Range queries = queries_of(batch);
    const OlderBlocks blocks = older(batch);
    // The best tokens of blocks that are alike are in a few of them: a sample would not have them.
    const int64_t sampled =
        chapters_ ? blocks.count : (kSampledBest * blocks.count + num_candidates_ - 1) / num_candidates_;
    estimate_limits(queries, blocks.count, num_candidates_, sampled, [&](int64_t i) { return blocks.codes(i); });
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      thresholds_[q] = blocks.count ? far_[q].offset + far_[q].step * float(far_limits_[q]) : simd::kMinusInfinity;
    }
  }
}

// Chooses the blocks of the index whose summaries have the largest products with a batch of queries.
void Search::choose_blocks(int64_t batch) {
  chosen_[batch].clear();
  if (!chapters_) return;
  const HeadIndex& index = memory_.head_index();
  const Range queries = queries_of(batch);
  const int64_t blocks = chapters_ * index.summary_blocks(), wanted = layer_->memory_blocks * queries.size();
  const auto codes_of = [&](int64_t i) { return index.summaries(i); };
  estimate_limits(queries, blocks, layer_->memory_blocks, std::max(kMinSample, blocks / 4), codes_of);
  summaries_.clear();
  scan({0, blocks}, blocks, queries.size(), &far_[queries.begin], &far_limits_[queries.begin], codes_of,
       [&](int64_t i, int64_t lane, int32_t excess) {
         const int64_t block = index.block_of(i, lane);
         if (block >= 0) summaries_.push_back({excess, int32_t(block)});
         if (int64_t(summaries_.size()) > 4 * wanted) keep_best(summaries_, 0, wanted);
       });
  keep_best(summaries_, 0, wanted);
  for (const Candidate& best : summaries_) chosen_[batch].push_back(index.block(best.place));
}

Search::OlderBlocks Search::older(int64_t batch) const {
  const std::vector<IndexBlock>& chosen = chosen_[batch];
  const int64_t count = int64_t(chosen.size());
  return {memory_, chosen.data(), count, unindexed_, count + far_blocks() - unindexed_};
}

// Estimates which sums as many tokens of blocks reach as are wanted, for each of some queries, by a sample of blocks.
template <class Codes>
void Search::estimate_limits(Range queries, int64_t blocks, int64_t wanted, int64_t sampled, Codes codes_of) {
  sampled = std::min({blocks, sampled, kMaxSample});
  const int64_t best = blocks ? std::max<int64_t>(1, wanted * sampled / blocks) : 0, count = queries.size();
  const auto sample = [&](int64_t i) { return codes_of(i * blocks / sampled); };
  for (int64_t i = 0; i < std::min(kBlocksAhead, sampled); ++i) memory_.prefetch_codes(sample(i));
  const int32_t all[kTogether] = {};
  uint64_t tokens[kTogether];
  with_scanner(&far_[queries.begin], all, count, memory_.code_bytes(), [&](const auto& scanner) {
    for (int64_t i = 0; i < sampled; ++i) {
      memory_.prefetch_codes(sample(std::min(i + kBlocksAhead, sampled - 1)));
      scanner.scan(sample(i), sums_.at(i * count * kBlock), tokens);
    }
  });
  for (int64_t q = 0; q < count; ++q) {
    far_limits_[queries.begin + q] = estimate_limit(sums_.at(q * kBlock), sampled, count * kBlock, best);
  }
}

// Scans a block of newer tokens at the distance of one of them.
void Search::scan_near(int64_t block) {
  const int64_t distance = memory_.distance(middle_of(block), newest_);
  std::copy_n(queries_.data(), count_ * stride_, near_queries_.data());
  for (int64_t q = 0; layer_->rope && q < count_; ++q) rope::rotate(*layer_, distance, near_queries_.at(q * stride_));
  memory_.codebook().make_tables(near_queries_.data(), stride_, count_, near_.data());
  for (int64_t q = 0; q < count_; ++q) {
    const float missing = thresholds_[q] - near_[q].offset;
    const bool reachable = missing <= 255 * near_[q].step;
    near_limits_[q] =
        !reachable ? kNone : missing > 0 ? std::min(int32_t(std::ceil(missing / near_[q].step)), 255) : 0;
  }
  for (int64_t first = 0; first < count_; first += kTogether) {
    const int64_t batch = first / kTogether;
    scan({block, block + 1}, 0, queries_of(batch).size(), &near_[first], &near_limits_[first],
         [&](int64_t i) { return memory_.codes(i); },
         [&](int64_t i, int64_t token, int32_t excess) {
           const int64_t place = i * kBlock + token;
           if (place < memory_.count()) add_candidate(batch, excess, place);
         });
  }
}

// Adds the older tokens whose sums reach the limits to the candidates. Blocks before `prefetched` are.
void Search::scan_older(int64_t batch, Range blocks, int64_t prefetched) {
  const Range queries = queries_of(batch);
  const OlderBlocks all = older(batch);
  scan(blocks, prefetched, queries.size(), &far_[queries.begin], &far_limits_[queries.begin],
       [&](int64_t i) { return all.codes(i); },
       [&](int64_t i, int64_t token, int32_t excess) {
         const int64_t place = all.place(i, token);
         if (place >= 0) add_candidate(batch, excess, place);
       });
}

// Visits the tokens of blocks whose sums reach the limit of one of the queries, with the largest excess. Blocks before
// `prefetched` are.
template <class Codes, class Visit>
void Search::scan(Range blocks, int64_t prefetched, int64_t queries, const Table* tables, const int32_t* limits,
                  Codes codes_of, Visit visit) {
  with_scanner(tables, limits, queries, memory_.code_bytes(), [&](const auto& scanner) {
    constexpr int64_t kQueries = std::decay_t<decltype(scanner)>::kQueries;
    uint64_t found[kStripe][kQueries];
    for (int64_t begin = blocks.begin; begin < blocks.end; begin += kStripe) {
      int64_t hits[kStripe], count = 0;  // blocks with such tokens
      uint64_t tokens[kStripe];
      for (int64_t i = begin; i < std::min(begin + kStripe, blocks.end); ++i) {
        if (i + kBlocksAhead < prefetched) memory_.prefetch_codes(codes_of(i + kBlocksAhead));
        scanner.scan(codes_of(i), sums_.at(count * kQueries * kBlock), found[count]);
        hits[count] = i, tokens[count] = 0;
        for (int64_t q = 0; q < kQueries; ++q) tokens[count] |= limits[q] == kNone ? 0 : found[count][q];
        count += tokens[count] != 0;
      }
      for (int64_t hit = 0; hit < count; ++hit) {
        const uint8_t* sums = sums_.at(hit * kQueries * kBlock);
        for (uint64_t left = tokens[hit]; left; left &= left - 1) {
          const int64_t token = __builtin_ctzll(left);
          int32_t excess = 0;
          for (int64_t q = 0; q < kQueries; ++q) {
            if (found[hit][q] >> token & 1) excess = std::max(excess, sums[q * kBlock + token] - limits[q]);
          }
          visit(hits[hit], token, excess);
        }
      }
    }
  });
}

void Search::add_candidate(int64_t batch, int32_t excess, int64_t place) {
  memory_.prefetch_key(place);
  Candidates& candidates = candidates_[batch];
  candidates.push_back({excess, int32_t(place)});
  const int64_t wanted = num_candidates_ * queries_of(batch).size();
  if (int64_t(candidates.size()) - num_near_[batch] > 4 * wanted) keep_best(candidates, num_near_[batch], wanted);
}

// Leaves the best of the candidates from `first` on, in their order; of equal ones the first.
void Search::keep_best(Candidates& candidates, int64_t first, int64_t wanted) {
  if (int64_t(candidates.size()) - first <= wanted) return;
  const auto begin = candidates.begin() + first;
  int64_t counts[256] = {};  // by excess
  for (auto candidate = begin; candidate != candidates.end(); ++candidate) ++counts[candidate->excess];
  int32_t limit = 255;
  int64_t missing = wanted;  // of those at the limit
  while (counts[limit] < missing) missing -= counts[limit--];
  candidates.erase(std::remove_if(begin, candidates.end(),
                                  [&](const Candidate& candidate) {
                                    return candidate.excess < limit || (candidate.excess == limit && missing-- <= 0);
                                  }),
                   candidates.end());
}

std::vector<Match>& Search::find(int64_t query, float scaling) {
  if (query / kTogether != multiplied_) multiply(query / kTogether);
  return best_of(*layer_, places_, products_.at(query % kTogether * max_places_), scaling);
}

// Products of a batch of queries with the keys of their candidates, each at its own distance.
void Search::multiply(int64_t batch) {
  multiplied_ = batch;
  places_.clear();
  for (const Candidate& candidate : candidates_[batch]) {
    const int64_t i = int64_t(places_.size()), place = candidate.place;
    keys_[i] = memory_.key(place), scales_[i] = memory_.key_scale(place);
    distances_[i] = int32_t(memory_.distance(place, newest_));
    places_.push_back(candidate.place);
  }
  const int64_t count = int64_t(places_.size()), near = is_exact() ? count : num_near_[batch];
  const int64_t first = batch * kTogether, queries = std::min(kTogether, count_ - first);
  const auto multiply = [&](Range candidates, const float* table, const Buffer<float>& rows) {
    const MemoryKeys keys{keys_.at(candidates.begin), layer_->head_size};
    slot_kernels::query_key_dots(keys, keys, candidates.size(),
                                 {table, layer_->rotary_dims, distances_.at(candidates.begin)}, key_.data(),
                                 unsummed_.data(), rows.at(first * stride_), queries,
                                 products_.at(candidates.begin), max_places_);
  };
  multiply({0, near}, layer_->rope, queries_);
  multiply({near, count}, nullptr, far_queries_);
  for (int64_t q = 0; q < queries; ++q) {
    float* products = products_.at(q * max_places_);
    for (int64_t i = 0; i < count; ++i) products[i] *= scales_[i];
  }
}

std::vector<Match>& Search::best_of(const AttentionLayer& layer, const std::vector<int32_t>& places,
                                    const float* products, float scaling) {
  const float cap = float(layer.softcap);
  matches_.clear();
  select_largest(products, int64_t(places.size()), layer.memory_matches, [&](int64_t i) {
    const float logit = products[i] * scaling;
    matches_.push_back({cap > 0 ? std::tanh(logit / cap) * cap : logit, places[i]});
  });
  return matches_;
}

}  // namespace memory
