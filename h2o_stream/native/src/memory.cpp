#include "memory.h"

#include <algorithm>
#include <cmath>

#include "rope.h"

namespace memory {

using simd::Floats;
using simd::kWidth;

namespace {

constexpr int64_t kLevels = 127;         // of 8 bits with a sign
constexpr float kNormRoom = 1.5f;        // norms reach so many times the largest of the first tokens
constexpr int64_t kBlocksAhead = 6;       // that are prefetched
constexpr int64_t kSampledBest = 16;     // of the sample by which the threshold of sketches is estimated
constexpr int64_t kMaxSample = 256;      // its blocks
constexpr int32_t kBefore = 1, kAfter = 3;  // surroundings of a place
static_assert(kSurroundings == kBefore + 1 + kAfter);

// The factor of each of four elements, by the signs of all.
struct Signs {
  float factors[4][16];

  constexpr Signs() : factors() {
    for (int i = 0; i < 4; ++i) {
      for (int signs = 0; signs < 16; ++signs) factors[i][signs] = signs >> i & 1 ? 1 : -1;
    }
  }
};
constexpr Signs kSigns;

// Codes of x [size] in 8 bits; returns their scale.
simd::Half encode(const float* x, int64_t size, int8_t* codes) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x[i]));
  simd::Half stored;
  simd::from_float(std::min(largest / kLevels, 65504.f), stored);
  const float scale = simd::to_float(stored), inverse = scale > 0 ? 1 / scale : 0;
  for (int64_t i = 0; i < size; ++i) {
    const float code = std::nearbyint(x[i] * inverse);
    codes[i] = int8_t(code > -kLevels ? std::min(code, float(kLevels)) : -float(kLevels));
  }
  return stored;
}

// The product of a query and a row of codes.
float product(const float* query, const int8_t* codes, int64_t size) {
  Floats sums{};
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) sums += simd::load(query + i) * simd::load(codes + i);
  float sum = simd::reduce_add(sums);
  for (; i < size; ++i) sum += query[i] * float(codes[i]);
  return sum;
}

// The token of a block whose score is at `lane`: even ones come first.
int64_t token_of(int64_t lane) { return lane < kBlock / 2 ? 2 * lane : 2 * lane - kBlock + 1; }

// The lanes with scores above a threshold.
uint64_t passing(const int16_t* scores, int32_t threshold) {
#if defined(H2O_AVX512)
  const __m512i limit = _mm512_set1_epi16(int16_t(threshold));
  const uint64_t first = _mm512_cmpgt_epi16_mask(_mm512_load_si512(scores), limit);
  return first | uint64_t(_mm512_cmpgt_epi16_mask(_mm512_load_si512(scores + 32), limit)) << 32;
#elif defined(H2O_AVX2)
  const __m256i limit = _mm256_set1_epi16(int16_t(threshold));
  uint64_t lanes = 0;
  for (int64_t i = 0; i < kBlock; i += 32) {
    const auto* from = reinterpret_cast<const __m256i*>(scores + i);
    const __m256i both = _mm256_packs_epi16(_mm256_cmpgt_epi16(_mm256_load_si256(from), limit),
                                            _mm256_cmpgt_epi16(_mm256_load_si256(from + 1), limit));
    lanes |= uint64_t(uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(both, 0xd8)))) << i;
  }
  return lanes;
#else
  uint64_t lanes = 0;
  for (int64_t i = 0; i < kBlock; ++i) lanes |= uint64_t(scores[i] > threshold) << i;
  return lanes;
#endif
}

// The same for a vector of floats.
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

// The lanes of the first `count` tokens of a block.
uint64_t first_lanes(int64_t count) {
  if (count >= kBlock) return ~uint64_t(0);
  const auto lanes = [](int64_t n) { return (uint64_t(1) << n) - 1; };
  return lanes((count + 1) / 2) | lanes(count / 2) << kBlock / 2;
}

}  // namespace

bool is_remembered(const Slots& slots, int32_t index) {
  for (int64_t range = 0; range < slots.transient_count; ++range) {
    if (index >= slots.transient[2 * range] && index < slots.transient[2 * range + 1]) return false;
  }
  return index >= 0;
}

void HeadMemory::set_found(int64_t query, const std::vector<Match>& matches) const {
  int32_t* places = found(query);
  for (size_t i = 0; i < matches.size(); ++i) places[i] = matches[i].place;
  std::fill(places + matches.size(), places + matches_, -1);
}

void add_surroundings(std::vector<int32_t>& places, int64_t count, std::vector<int32_t>& out) {
  std::sort(places.begin(), places.end());
  out.clear();
  int32_t next = 0;
  for (const int32_t place : places) {
    const int32_t end = std::min(place + kAfter + 1, int32_t(count));
    for (next = std::max(next, place - kBefore); next < end; ++next) out.push_back(next);
  }
}

void HeadMemory::append(int32_t index, const float* key, const float* value) const {
  const int64_t place = *count_;
  const simd::Half scales[2] = {encode(key, layout_.key_size, const_cast<int8_t*>(this->key(place))),
                                encode(value, layout_.value_size, const_cast<int8_t*>(this->value(place)))};
  std::memcpy(record(place), &index, sizeof(index));
  std::memcpy(record(place) + sizeof(index), scales, sizeof(scales));
  if (place == kCentring - 1) {
    set_centre();
    for (int64_t i = 0; i < place; ++i) write_sketch(i);
  }
  if (place >= kCentring - 1) write_sketch(place);
  *count_ = place + 1;
}

void HeadMemory::set_centre() const {
  const int64_t size = layout_.key_size;
  std::fill_n(centre_, size + 1, 0.f);
  for (int64_t place = 0; place < kCentring; ++place) {
    const float scale = key_scale(place) / kCentring;
    for (int64_t i = 0; i < size; ++i) centre_[i] += scale * float(key(place)[i]);
  }
  float largest = 0;
  for (int64_t place = 0; place < kCentring; ++place) {
    float norm = 0;
    for (int64_t i = 0; i < size; ++i) norm += std::fabs(key_scale(place) * float(key(place)[i]) - centre_[i]);
    largest = std::max(largest, norm / float(size));
  }
  centre_[size] = largest * kNormRoom / 255;
}

void HeadMemory::write_sketch(int64_t place) const {
  const int64_t size = layout_.key_size, lane = place % kBlock;
  auto* sketch = const_cast<uint8_t*>(sketches(place / kBlock)) + lane;
  const float scale = key_scale(place);
  float norm = 0;
  for (int64_t i = 0; i < size; i += 8) {
    uint8_t signs = 0;
    for (int64_t j = i; j < std::min(i + 8, size); ++j) {
      const float difference = scale * float(key(place)[j]) - centre_[j];
      norm += std::fabs(difference);
      signs |= uint8_t(difference > 0) << (j - i);
    }
    sketch[i / 8 * kBlock] = signs;
  }
  const float code = centre_[size] > 0 ? norm / float(size) / centre_[size] : 0;
  const_cast<uint8_t*>(norms(place / kBlock))[lane] = uint8_t(std::min(code + 0.5f, 255.f));
}

void Search::reserve(const AttentionLayer& layer) {
  const int64_t most = std::max({4 * layer.memory_candidates + kBlock, kCentring, layer.memory_matches * kSurroundings});
  query_.reserve(simd::padded(layer.head_size, 16));
  rotated_.reserve(simd::padded(layer.head_size, 16));
  places_.reserve(most);
  surroundings_.reserve(most);
  tables_.reserve(Layout{layer.head_size, 0}.sketch_bytes() * 32);
  sample_.reserve(kMaxSample * kBlock);
  found_.reserve(most);
  products_.reserve(most + kWidth);
  matches_.reserve(layer.memory_matches + 1);
}

std::vector<Match>& Search::find(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest,
                                 const float* query, float scaling) {
  const int64_t count = memory.count();
  places_.clear();
  if (count <= std::max(layer.memory_candidates, kCentring)) {
    for (int64_t place = 0; place < count; ++place) places_.push_back(int32_t(place));
  } else {
    scan(layer, memory, newest, query);
    for (const int64_t found : found_) places_.push_back(~int32_t(found));
  }
  multiply(layer, memory, newest, query, places_);
  return best_of(layer, places_, products_.data(), scaling);
}

std::vector<Match>& Search::follow(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest,
                                   const float* query, float scaling, const int32_t* found) {
  places_.clear();
  for (int64_t i = 0; i < layer.memory_matches; ++i) {
    if (found[i] >= 0) places_.push_back(found[i]);
  }
  add_surroundings(places_, memory.count(), surroundings_);
  multiply(layer, memory, newest, query, surroundings_);
  return best_of(layer, surroundings_, products_.data(), scaling);
}

// Products of a query with the keys at some places, each at its own distance.
void Search::multiply(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                      const std::vector<int32_t>& places) {
  constexpr int64_t kAhead = 16;
  const int64_t size = layer.head_size, count = int64_t(places.size());
  std::copy_n(query, size, query_.data());
  if (layer.rope) rope::rotate(layer, layer.memory_distance, query_.data());
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) memory.prefetch_key(places[i + kAhead]);
    const int32_t place = places[i], distance = newest - memory.index(place);
    const float* rotated = query_.data();
    if (layer.rope && distance < layer.memory_distance) {
      std::copy_n(query, size, rotated_.data());
      rope::rotate(layer, distance, rotated_.data());
      rotated = rotated_.data();
    }
    products_[i] = product(rotated, memory.key(place), size) * memory.key_scale(place);
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
      const float product = products[i];
      if (int64_t(matches_.size()) == wanted) {
        if (!(product > matches_.back().logit)) continue;
        matches_.pop_back();
      }
      auto at = matches_.end();
      while (at != matches_.begin() && product > at[-1].logit) --at;
      matches_.insert(at, {product, places[i]});
    }
  }
  return with_logits(layer, scaling);
}

// Makes logits of products.
std::vector<Match>& Search::with_logits(const AttentionLayer& layer, float scaling) {
  const float cap = float(layer.softcap);
  for (Match& match : matches_) {
    match.logit *= scaling;
    if (cap > 0) match.logit = std::tanh(match.logit / cap) * cap;
  }
  return matches_;
}

// Finds about `memory_candidates` tokens whose sketches have the largest products with the query.
void Search::scan(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query) {
  const int64_t end = memory.count(), wanted = layer.memory_candidates, blocks = end / kBlock;
  set_scale(layer, query);
  set_distance(layer, memory, query, int32_t(layer.memory_distance));
  // The score that about `wanted` tokens exceed, judged by whole blocks among them.
  const int64_t asked = (kSampledBest * end / wanted + kBlock - 1) / kBlock;
  const int64_t sampled = std::min({blocks, asked, kMaxSample});
  for (int64_t i = 0; i < sampled; ++i) {
    score_block(layer, memory, newest, query, i * blocks / sampled, sample_.at(i * kBlock));
  }
  int32_t limit = threshold(sampled, std::max<int64_t>(1, wanted * sampled * kBlock / end));
  alignas(64) int16_t scores[kBlock];
  found_.clear();
  for (int64_t block = 0; block * kBlock < end; ++block) {
    if ((block + kBlocksAhead) * kBlock < end) memory.prefetch_sketches(block + kBlocksAhead);
    score_block(layer, memory, newest, query, block, scores);
    for (uint64_t lanes = passing(scores, limit) & first_lanes(end - block * kBlock); lanes; lanes &= lanes - 1) {
      const int64_t lane = __builtin_ctzll(lanes);
      // In order of scores, then of places, oldest first.
      found_.push_back(int64_t(scores[lane]) * (int64_t(1) << 32) + uint32_t(~int32_t(block * kBlock + token_of(lane))));
    }
    if (int64_t(found_.size()) > 4 * wanted) {
      keep_best(wanted);
      limit = int32_t(found_[wanted - 1] >> 32);
    }
  }
  if (int64_t(found_.size()) > 2 * wanted) keep_best(wanted);
}

void Search::keep_best(int64_t wanted) {
  std::nth_element(found_.begin(), found_.begin() + wanted - 1, found_.end(), std::greater<>());
  found_.resize(wanted);
}

// The least score that at most `best` of the sampled ones exceed.
int32_t Search::threshold(int64_t sampled, int64_t best) const {
  if (!sampled) return INT16_MIN;
  int32_t low = INT16_MIN, high = INT16_MAX;  // more than `best` exceed `low`, at most as many exceed `high`
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    int64_t count = 0;
    for (int64_t i = 0; i < sampled; ++i) count += __builtin_popcountll(passing(sample_.at(i * kBlock), middle));
    (count > best ? low : high) = middle;
  }
  return high;
}

// How sums become codes in 7 bits, whatever the distance: no rotation makes an element larger than its pair.
void Search::set_scale(const AttentionLayer& layer, const float* query) {
  const int64_t size = layer.head_size, half = layer.rope ? layer.rotary_dims / 2 : 0;
  float largest = 0, sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int64_t other = i < half ? i + half : i - half;
    const bool rotates = i < 2 * half;
    sum += rotates ? std::sqrt(query[i] * query[i] + query[other] * query[other]) : std::fabs(query[i]);
    if (i % 4 == 3 || i == size - 1) largest = std::max(largest, sum), sum = 0;
  }
  inverse_ = largest > 0 ? kLevels / (2 * largest) : 0;
  shift_ = 0;
  while (Layout{size, 0}.sketch_bytes() * 2 * (kLevels + 2) << (shift_ + 1) <= INT16_MAX * 2) ++shift_;  // rounding included
  distance_ = -1;
}

// Makes the tables for keys at a distance. What the centre of the sketches adds is relative to the largest distance.
void Search::set_distance(const AttentionLayer& layer, const HeadMemory& memory, const float* query,
                          int32_t distance) {
  if (distance == distance_) return;
  distance_ = distance;
  const int64_t size = layer.head_size;
  std::copy_n(query, size, query_.data());
  if (layer.rope) rope::rotate(layer, distance, query_.data());
  set_tables(query_.data(), size);
  const float* centre = memory.centre();
  float sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += query_[i] * centre[i];
  if (distance == layer.memory_distance) far_offset_ = sum;
  const float unit = centre[size] > 0 ? inverse_ / centre[size] * float(1 << shift_) / 256 : 0;
  offset_ = int32_t(std::max(-32767.f, std::min((sum - far_offset_) * unit, 32767.f)));
}

// Tables of the sums of a query's elements, each with the sign of a bit.
void Search::set_tables(const float* query, int64_t size) {
  const int64_t quads = Layout{size, 0}.sketch_bytes() * 2;
  float total = 0;
  for (int64_t quad = 0; quad < quads; ++quad) {
    float elements[4] = {}, lowest = 0;
    for (int64_t i = 4 * quad; i < std::min(4 * quad + 4, size); ++i) elements[i % 4] = query[i];
    for (const float element : elements) lowest += std::fabs(element);
    total += lowest;
    uint8_t* table = tables_.at(quad * 16);
    for (int64_t signs = 0; signs < 16; ++signs) {
      float sum = lowest;
      for (int64_t i = 0; i < 4; ++i) sum += kSigns.factors[i][signs] * elements[i];
      table[signs] = uint8_t(int32_t(std::min(sum * inverse_ + 0.5f, float(kLevels))));
    }
  }
  bias_ = int32_t(total * inverse_ + 0.5f);
}

// Writes the scores of a block, at the distance of one of its tokens.
void Search::score_block(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                         int64_t block, int16_t* scores) {
  int64_t distance = layer.memory_distance;
  if ((block + 1) * kBlock > memory.count() - distance) {  // others are older
    const int64_t middle = std::min(block * kBlock + kBlock / 2, memory.count() - 1);
    distance = std::min<int64_t>(newest - memory.index(middle), distance);
  }
  set_distance(layer, memory, query, int32_t(distance));
  write_sums(memory, block, scores);
  if (!offset_) return;
  for (int64_t i = 0; i < kBlock; ++i) {
    scores[i] = int16_t(std::max(INT16_MIN, std::min(scores[i] + offset_, INT16_MAX)));
  }
}

// Writes the scores of a block: sums minus the bias, times norms; even tokens first.
void Search::write_sums(const HeadMemory& memory, int64_t block, int16_t* to) const {
  const int64_t bytes = Layout{memory.key_size(), 0}.sketch_bytes();
  const uint8_t *codes = memory.sketches(block), *norms = memory.norms(block), *tables = tables_.data();
#if defined(H2O_AVX512)
  const __m512i four = _mm512_set1_epi8(15), bias = _mm512_set1_epi16(int16_t(bias_));
  const auto table = [&](int64_t i) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables + 16 * i)));
  };
  __m512i sums = _mm512_setzero_si512(), odd = sums;
  for (int64_t i = 0; i < bytes; ++i) {
    const __m512i signs = _mm512_loadu_si512(codes + i * kBlock);
    const __m512i low = _mm512_shuffle_epi8(table(2 * i), _mm512_and_si512(signs, four));
    const __m512i high = _mm512_shuffle_epi8(table(2 * i + 1), _mm512_and_si512(_mm512_srli_epi16(signs, 4), four));
    const __m512i both = _mm512_add_epi8(low, high);
    sums = _mm512_add_epi16(sums, both), odd = _mm512_add_epi16(odd, _mm512_srli_epi16(both, 8));
  }
  const __m512i even = _mm512_sub_epi16(sums, _mm512_slli_epi16(odd, 8)), norm = _mm512_loadu_si512(norms);
  const __m128i shift = _mm_cvtsi32_si128(shift_);
  const auto scores = [&](__m512i sum, __m512i norm) {
    const __m512i centred = _mm512_sll_epi16(_mm512_sub_epi16(sum, bias), shift);
    return _mm512_mulhrs_epi16(centred, _mm512_slli_epi16(norm, 7));
  };
  _mm512_store_si512(to, scores(even, _mm512_and_si512(norm, _mm512_set1_epi16(0xff))));
  _mm512_store_si512(to + 32, scores(odd, _mm512_srli_epi16(norm, 8)));
#elif defined(H2O_AVX2)
  const __m256i four = _mm256_set1_epi8(15), bias = _mm256_set1_epi16(int16_t(bias_));
  const __m128i shift = _mm_cvtsi32_si128(shift_);
  const auto table = [&](int64_t i) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(tables + 16 * i)));
  };
  for (int64_t half = 0; half < 2; ++half) {
    __m256i sums = _mm256_setzero_si256(), odd = sums;
    for (int64_t i = 0; i < bytes; ++i) {
      const __m256i signs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i * kBlock + half * 32));
      const __m256i low = _mm256_shuffle_epi8(table(2 * i), _mm256_and_si256(signs, four));
      const __m256i high = _mm256_shuffle_epi8(table(2 * i + 1), _mm256_and_si256(_mm256_srli_epi16(signs, 4), four));
      const __m256i both = _mm256_add_epi8(low, high);
      sums = _mm256_add_epi16(sums, both), odd = _mm256_add_epi16(odd, _mm256_srli_epi16(both, 8));
    }
    const __m256i even = _mm256_sub_epi16(sums, _mm256_slli_epi16(odd, 8));
    const __m256i norm = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(norms + half * 32));
    const auto scores = [&](__m256i sum, __m256i norm) {
      const __m256i centred = _mm256_sll_epi16(_mm256_sub_epi16(sum, bias), shift);
      return _mm256_mulhrs_epi16(centred, _mm256_slli_epi16(norm, 7));
    };
    auto* half_to = reinterpret_cast<__m256i*>(to + half * 16);
    _mm256_store_si256(half_to, scores(even, _mm256_and_si256(norm, _mm256_set1_epi16(0xff))));
    _mm256_store_si256(half_to + 2, scores(odd, _mm256_srli_epi16(norm, 8)));
  }
#else
  for (int64_t lane = 0; lane < kBlock; ++lane) {
    const int64_t token = token_of(lane);
    int32_t sum = -bias_;
    for (int64_t i = 0; i < bytes; ++i) {
      const uint8_t signs = codes[i * kBlock + token];
      sum += tables[32 * i + signs % 16] + tables[32 * i + 16 + signs / 16];
    }
    to[lane] = int16_t(((sum * (1 << shift_)) * (norms[token] * 128) + 0x4000) >> 15);
  }
#endif
}

void add_values(const HeadMemory& memory, const std::vector<Match>& matches, float* accum) {
  const int64_t size = memory.value_size();
  for (const Match& match : matches) simd::prefetch(memory.value(match.place), size);
  for (const Match& match : matches) {
    const float weight = match.logit * memory.value_scale(match.place);
    const int8_t* codes = memory.value(match.place);
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) simd::store(simd::load(accum + i) + weight * simd::load(codes + i), accum + i);
    for (; i < size; ++i) accum[i] += weight * float(codes[i]);
  }
}

}  // namespace memory

// Bytes that a head with keys and values of these sizes takes of the scanned part of a segment, and of its data; tokens
// of a segment.
extern "C" void h2o_memory_layout(int64_t key_size, int64_t value_size, int64_t* layout) {
  const memory::Layout bytes{key_size, value_size};
  layout[0] = bytes.scan_bytes(), layout[1] = bytes.data_bytes(), layout[2] = memory::kSegment;
}
