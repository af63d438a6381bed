#include "memory_search.h"

#include <algorithm>
#include <cmath>

#include "memory_scan.h"
#include "rope.h"
#include "slot_kernels.h"

namespace memory {

using simd::kWidth;

namespace {

constexpr int64_t kBlocksAhead = 16;  // that are prefetched
constexpr int64_t kStripe = 64;       // blocks that all queries are compared with while they are in the L1 cache
constexpr int64_t kSampledBest = 6;   // of the sample that a threshold is estimated by
constexpr int64_t kMaxSample = 1024;  // its blocks
constexpr int32_t kNone = 256;        // a limit that no sum reaches

// The elements of a vector of floats above a threshold.
uint32_t passing(const float* from, float threshold) {
#if defined(H2O_AVX512)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(from), _mm512_set1_ps(threshold), _CMP_GT_OQ);
#elif defined(H2O_AVX2)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(from), _mm256_set1_ps(threshold), _CMP_GT_OQ)));
#else
  uint32_t lanes = 0;
  for (int64_t i = 0; i < kWidth; ++i) lanes |= uint32_t(from[i] > threshold) << i;
  return lanes;
#endif
}

// The first tokens of a block.
uint64_t first_tokens(int64_t count) { return count >= kBlock ? ~uint64_t(0) : (uint64_t(1) << count) - 1; }

// The largest sum that at least `best` of the sampled ones reach; those of blocks are `stride` apart.
int32_t estimate_limit(const uint8_t* sums, int64_t blocks, int64_t stride, int64_t best) {
  int32_t low = 0, high = 256;  // `best` reach `low`, fewer `high`
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    int64_t count = 0;
    for (int64_t i = 0; i < blocks; ++i) count += count_reaching(sums + i * stride, middle);
    (count >= best ? low : high) = middle;
  }
  return low;
}

// Calls a function with the number of queries that are compared together, as a constant.
template <class Function>
void with_constant(int64_t queries, Function function) {
  static_assert(kTogether == 4);
  if (queries == 1) return function(std::integral_constant<int64_t, 1>());
  if (queries == 2) return function(std::integral_constant<int64_t, 2>());
  if (queries == 3) return function(std::integral_constant<int64_t, 3>());
  function(std::integral_constant<int64_t, 4>());
}

}  // namespace

void Search::reserve(const AttentionLayer& layer, int64_t queries) {
  const int64_t candidates = 7 * layer.memory_candidates * kTogether + layer.memory_matches + kBlock;
  max_places_ = std::max(max_places_, simd::padded(std::max(candidates, kTraining), 16));
  stride_ = simd::padded(layer.head_size, 16);
  queries_.reserve(queries * stride_), far_queries_.reserve(queries * stride_), rotated_.reserve(stride_);
  const size_t batches = std::max(size_t((queries + kTogether - 1) / kTogether), candidates_.size());
  num_near_.resize(batches), candidates_.resize(batches);
  far_.resize(batches * kTogether), near_.resize(batches * kTogether);
  thresholds_.resize(far_.size()), far_limits_.resize(far_.size()), limits_.resize(far_.size());
  for (Candidates& of_batch : candidates_) of_batch.reserve(max_places_);
  sample_.reserve(kMaxSample * kTogether * kBlock);
  places_.reserve(max_places_);
  products_.reserve(kTogether * max_places_);
  matches_.reserve(layer.memory_matches + 1);
}

void Search::begin(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest) {
  layer_ = &layer, memory_ = memory, newest_ = newest;
  count_ = 0, stride_ = simd::padded(layer.head_size, 16), has_thresholds_ = false;
}

void Search::add_query(const float* query) { std::copy_n(query, layer_->head_size, queries_.at(count_++ * stride_)); }

void Search::count_queries() {
  if (memory_.codebook().learned()) return;
  for (int64_t q = 0; q < count_; ++q) memory_.codebook().count(rotate(q, layer_->memory_distance));
}

// A query, rotated by a distance.
const float* Search::rotate(int64_t query, int64_t distance) {
  std::copy_n(queries_.at(query * stride_), layer_->head_size, rotated_.data());
  if (layer_->rope) rope::rotate(*layer_, distance, rotated_.data());
  return rotated_.data();
}

bool Search::is_exact() const {
  return !memory_.codebook().learned() || memory_.count() <= std::max(layer_->memory_candidates, kTraining);
}

// Blocks of tokens that are all at the largest distance.
int64_t Search::far_blocks() const {
  return std::max<int64_t>(memory_.count() - layer_->memory_distance, 0) / kBlock;
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
  const int64_t far = far_blocks(), wanted = layer_->memory_candidates * std::min(count_, kTogether);
  if (!has_thresholds_) set_thresholds(far);
  for (int64_t block = far + part; block * kBlock < memory_.count(); block += parts) scan_near(block);
  for (int64_t batch = 0; batch < batches; ++batch) {
    keep_best(candidates_[batch], 0, std::max(wanted / parts, layer_->memory_matches));
    num_near_[batch] = int64_t(candidates_[batch].size());
  }
  std::copy_n(far_limits_.data(), count_, limits_.data());
  scan({far * part / parts, far * (part + 1) / parts}, far_);
  for (int64_t batch = 0; batch < batches; ++batch) keep_best(candidates_[batch], num_near_[batch], 2 * wanted);
}

// Makes the tables for the largest distance, and estimates which products so many tokens reach as are wanted.
void Search::set_thresholds(int64_t far) {
  has_thresholds_ = true;
  make_tables(layer_->memory_distance, far_);
  const int64_t wanted = layer_->memory_candidates;
  const int64_t asked = (kSampledBest * far + wanted - 1) / wanted, blocks = std::min({far, asked, kMaxSample});
  const int64_t best = blocks ? std::max<int64_t>(1, wanted * blocks / far) : 0;
  const int32_t all[kTogether] = {};
  uint64_t tokens[kTogether];
  for (int64_t first = 0; first < count_; first += kTogether) {
    const int64_t queries = std::min(kTogether, count_ - first);
    with_constant(queries, [&](auto constant) {
      for (int64_t i = 0; i < blocks; ++i) {
        scan_block<constant>(memory_.codes(i * far / blocks), memory_.code_bytes(), &far_[first], all,
                             sample_.at(i * kTogether * kBlock), tokens);
      }
    });
    for (int64_t q = 0; q < queries; ++q) {
      const int32_t limit = estimate_limit(sample_.at(q * kBlock), blocks, kTogether * kBlock, best);
      const Table& table = far_[first + q];
      far_limits_[first + q] = limit;
      thresholds_[first + q] = blocks ? table.offset + table.step * float(limit) : simd::kMinusInfinity;
    }
  }
}

void Search::make_tables(int64_t distance, std::vector<Table>& tables) {
  for (int64_t q = 0; q < count_; ++q) {
    memory_.codebook().make_table(rotate(q, distance), tables[q]);
  }
}

// Scans a block of newer tokens at the distance of one of them.
void Search::scan_near(int64_t block) {
  const int64_t middle = std::min(block * kBlock + kBlock / 2, memory_.count() - 1);
  make_tables(std::min<int64_t>(newest_ - memory_.index(middle), layer_->memory_distance), near_);
  for (int64_t q = 0; q < count_; ++q) {
    const float missing = thresholds_[q] - near_[q].offset;
    const bool reachable = missing <= 255 * near_[q].step;
    limits_[q] = !reachable ? kNone : missing > 0 ? std::min(int32_t(std::ceil(missing / near_[q].step)), 255) : 0;
  }
  scan({block, block + 1}, near_);
}

// Adds the tokens of blocks whose sums reach `limits_` to the candidates.
void Search::scan(Range blocks, const std::vector<Table>& tables) {
  for (int64_t begin = blocks.begin; begin < blocks.end; begin += kStripe) {
    const int64_t end = std::min(begin + kStripe, blocks.end);
    for (int64_t q = 0; q < count_; q += kTogether) {
      with_constant(std::min(kTogether, count_ - q), [&](auto queries) { scan<queries>({begin, end}, &tables[q], q); });
    }
  }
}

template <int64_t queries>
void Search::scan(Range blocks, const Table* tables, int64_t first) {
  alignas(64) uint8_t sums[queries * kBlock];
  uint64_t found[queries];
  const int64_t count = memory_.count(), last = (count - 1) / kBlock;
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    if (first == 0) memory_.prefetch_codes(std::min(block + kBlocksAhead, last));
    scan_block<queries>(memory_.codes(block), memory_.code_bytes(), tables, &limits_[first], sums, found);
    uint64_t any = 0;
    for (int64_t q = 0; q < queries; ++q) any |= found[q];
    if (any) add_candidates<queries>(block, found, sums, first);
  }
}

template <int64_t queries>
void Search::add_candidates(int64_t block, const uint64_t* found, const uint8_t* sums, int64_t first) {
  uint64_t tokens = 0;
  for (int64_t q = 0; q < queries; ++q) tokens |= limits_[first + q] == kNone ? 0 : found[q];
  const int64_t batch = first / kTogether, wanted = layer_->memory_candidates * queries;
  Candidates& candidates = candidates_[batch];
  for (tokens &= first_tokens(memory_.count() - block * kBlock); tokens; tokens &= tokens - 1) {
    const int64_t token = __builtin_ctzll(tokens), place = block * kBlock + token;
    memory_.prefetch_key(place);
    int32_t excess = 0;
    for (int64_t q = 0; q < queries; ++q) {
      if (found[q] >> token & 1) excess = std::max(excess, sums[q * kBlock + token] - limits_[first + q]);
    }
    candidates.push_back({excess, int32_t(place)});
  }
  if (int64_t(candidates.size()) - num_near_[batch] > 4 * wanted) keep_best(candidates, num_near_[batch], wanted);
}

// Leaves the best of the candidates from `first` on: in order of their excess, then of places, oldest first.
void Search::keep_best(Candidates& candidates, int64_t first, int64_t wanted) const {
  if (int64_t(candidates.size()) - first <= wanted) return;
  std::nth_element(candidates.begin() + first, candidates.begin() + first + wanted - 1, candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.excess != b.excess ? a.excess > b.excess : a.place < b.place;
                   });
  candidates.resize(first + wanted);
}

std::vector<Match>& Search::find(int64_t query, float scaling) {
  if (query / kTogether != multiplied_) multiply(query / kTogether);
  return best_of(*layer_, places_, products_.at(query % kTogether * max_places_), scaling);
}

// Products of a batch of queries with the keys of their candidates, each at its own distance.
void Search::multiply(int64_t batch) {
  multiplied_ = batch;
  places_.clear();
  for (const Candidate& candidate : candidates_[batch]) places_.push_back(candidate.place);
  const int64_t size = layer_->head_size, count = int64_t(places_.size());
  const int64_t first = batch * kTogether, queries = std::min(kTogether, count_ - first);
  for (int64_t q = first; q < first + queries; ++q) {
    std::copy_n(rotate(q, layer_->memory_distance), size, far_queries_.at(q * stride_));
  }
  float* key = rotated_.data();
  for (int64_t i = 0; i < count; ++i) {
    const int32_t place = places_[i], distance = newest_ - memory_.index(place);
    memory_.read_key(place, key);
    const bool is_near = layer_->rope && distance < layer_->memory_distance;
    if (is_near) rope::rotate_inverse(*layer_, distance, key);
    const float* rotated = (is_near ? queries_ : far_queries_).at(first * stride_);
    for (int64_t q = 0; q < queries; ++q) {
      products_[q * max_places_ + i] = slot_kernels::dot(rotated + q * stride_, key, size);
    }
  }
}

std::vector<Match>& Search::best_of(const AttentionLayer& layer, const std::vector<int32_t>& places,
                                    const float* products, float scaling) {
  const int64_t count = int64_t(places.size()), wanted = layer.memory_matches;
  matches_.clear();
  for (int64_t first = 0; first < count; first += kWidth) {
    const bool full = int64_t(matches_.size()) == wanted;
    uint32_t lanes = passing(products + first, full ? matches_.back().logit : simd::kMinusInfinity);
    if (count - first < kWidth) lanes &= (1u << (count - first)) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t i = first + __builtin_ctz(lanes);
      add_match({products[i], places[i]}, wanted, matches_);
    }
  }
  const float cap = float(layer.softcap);
  for (Match& match : matches_) {
    match.logit *= scaling;
    if (cap > 0) match.logit = std::tanh(match.logit / cap) * cap;
  }
  return matches_;
}

void add_match(const Match& match, int64_t wanted, std::vector<Match>& best) {
  if (int64_t(best.size()) == wanted) {
    if (!(match.logit > best.back().logit)) return;
    best.pop_back();
  }
  auto at = best.end();
  while (at != best.begin() && match.logit > at[-1].logit) --at;
  best.insert(at, match);
}

}  // namespace memory
