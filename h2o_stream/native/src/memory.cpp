#include "memory.h"

#include <algorithm>
#include <cmath>

#include "rope.h"
#include "slot_kernels.h"

namespace memory {

using simd::Floats;
using simd::kWidth;

namespace {

constexpr int64_t kMaxHeadSize = 4096;   // of a key that is rotated in scratch memory
constexpr int64_t kLevels = 127;         // of 8 bits with a sign
constexpr float kNormRoom = 1.5f;        // norms reach so many times the largest of the first tokens
constexpr int64_t kBlocksAhead = 6;       // that are prefetched
constexpr int64_t kSampledBest = 16;     // of the sample by which the threshold of sketches is estimated
constexpr int64_t kMaxSample = 256;      // its blocks
constexpr int64_t kNearBlock = 64;       // near keys that are multiplied together

// Rows of 8 bits with a sign, as `slot_kernels` take them.
struct CodeRows {
  static constexpr bool kAnySize = true;

  const int8_t* codes;
  int64_t row_size;

  int64_t size() const { return row_size; }
  const int8_t* at(int64_t slot) const { return codes + slot * row_size; }
  Floats load(int64_t slot, int64_t i) const { return simd::load(at(slot) + i); }
  float scalar(int64_t slot, int64_t i) const { return float(at(slot)[i]); }
  void read(int64_t slot, float* row) const {
    for (int64_t i = 0; i < row_size; ++i) row[i] = scalar(slot, i);
  }
  void prefetch(int64_t slot) const { simd::prefetch(at(slot), row_size); }
  bool vectorizable() const { return row_size % kWidth == 0; }
};

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

void HeadMemory::append(int32_t index, const float* key, const float* value) const {
  const int64_t place = *count_, segment = place / kSegment, row = place % kSegment;
  indices(segment)[row] = index;
  scales(segment)[row] = encode(key, layout_.key_size, const_cast<int8_t*>(this->key(place)));
  scales(segment)[kSegment + row] = encode(value, layout_.value_size, const_cast<int8_t*>(this->value(place)));
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

void multiply_near(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* queries,
                   int64_t heads, int64_t first, int64_t end, float* near, int64_t stride) {
  constexpr int64_t kMost = slot_kernels::kMaxHeads;
  int32_t distances[kNearBlock];
  alignas(64) Floats products[kMost * kWidth];
  float scratch[kMaxHeadSize + kWidth];
  const int64_t origin = memory.first_near(layer), size = simd::padded(layer.head_size);
  std::fill_n(scratch, size, 0.f);  // what is behind a key is multiplied by zeros
  for (int64_t last; first < end; first = last) {
    last = std::min({first + kNearBlock, (first / kSegment + 1) * kSegment, end});
    for (int64_t place = first; place < last; ++place) {
      distances[place - first] = std::min(newest - memory.index(place), int32_t(layer.memory_distance));
    }
    const CodeRows keys{memory.key(first), memory.key_size()};
    const slot_kernels::Rotation rotation{layer.rope, layer.rotary_dims, distances};
    for (int64_t q = 0; q < heads; q += kMost) {
      const int64_t count = std::min(kMost, heads - q);
      slot_kernels::query_key_dots(keys, keys, last - first, rotation, scratch, products, queries + q * size, count,
                                   near + q * stride + first - origin, stride);
      for (int64_t i = q; i < q + count; ++i) {
        for (int64_t place = first; place < last; ++place) near[i * stride + place - origin] *= memory.key_scale(place);
      }
    }
  }
}

void Search::reserve(const AttentionLayer& layer) {
  query_.reserve(simd::padded(layer.head_size, 16));
  tables_.reserve(Layout{layer.head_size, 0}.sketch_bytes() * 32);
  sample_.reserve(kMaxSample * kBlock);
  found_.reserve(4 * layer.memory_candidates + kBlock);
  far_.reserve(4 * layer.memory_candidates + kBlock);
  products_.reserve(far_.size() + kWidth);
  matches_.reserve(layer.memory_matches + 1);
}

std::vector<Match>& Search::find(const AttentionLayer& layer, const HeadMemory& memory, const float* query,
                                 float scaling, const float* near) {
  const int64_t begin = memory.first_near(layer), end = memory.count();
  matches_.clear();
  if (begin) find_far(layer, memory, query, begin);
  select(near, end - begin, layer.memory_matches, [begin](int64_t i) { return int32_t(begin + i); });
  const float cap = float(layer.softcap);
  for (Match& match : matches_) {
    match.logit *= scaling;
    if (cap > 0) match.logit = std::tanh(match.logit / cap) * cap;
  }
  return matches_;
}

// Compares the tokens before `end`, all at the largest distance: those with the best sketches exactly.
void Search::find_far(const AttentionLayer& layer, const HeadMemory& memory, const float* query, int64_t end) {
  const int64_t size = layer.head_size;
  std::copy_n(query, size, query_.data());
  if (layer.rope) rope::rotate(layer, layer.memory_distance, query_.data());
  int64_t count = end;
  if (end <= layer.memory_candidates) {
    for (int64_t place = 0; place < end; ++place) far_[place] = int32_t(place);
  } else {
    scan(memory, end, layer.memory_candidates);
    count = int64_t(found_.size());
    for (int64_t i = 0; i < count; ++i) far_[i] = ~int32_t(found_[i]);
  }
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) simd::prefetch(memory.key(far_[i + kAhead]), size);
    products_[i] = product(query_.data(), memory.key(far_[i]), size) * memory.key_scale(far_[i]);
  }
  select(products_.data(), count, layer.memory_matches, [this](int64_t i) { return far_[i]; });
}

// Puts the largest products among the `wanted` best matches, of equal ones the first.
template <class Place>
void Search::select(const float* products, int64_t count, int64_t wanted, Place place) {
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
      matches_.insert(at, {product, place(i)});
    }
  }
}

// Finds about `wanted` tokens before `end` whose sketches have the largest products with the query.
void Search::scan(const HeadMemory& memory, int64_t end, int64_t wanted) {
  set_tables(query_.data(), memory.key_size());
  int32_t limit = threshold(memory, end, wanted);
  alignas(64) int16_t scores[kBlock];
  found_.clear();
  for (int64_t block = 0; block * kBlock < end; ++block) {
    if ((block + kBlocksAhead) * kBlock < end) memory.prefetch_sketches(block + kBlocksAhead);
    score_block(memory, block, scores);
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

// The score that about `wanted` tokens before `end` exceed, judged by whole blocks among them.
int32_t Search::threshold(const HeadMemory& memory, int64_t end, int64_t wanted) {
  const int64_t blocks = end / kBlock, asked = (kSampledBest * end / wanted + kBlock - 1) / kBlock;
  const int64_t sampled = std::min({blocks, asked, kMaxSample});
  if (!sampled) return INT16_MIN;
  for (int64_t i = 0; i < sampled; ++i) score_block(memory, i * blocks / sampled, sample_.at(i * kBlock));
  const int64_t best = std::max<int64_t>(1, wanted * sampled * kBlock / end);
  int32_t low = INT16_MIN, high = INT16_MAX;  // more than `best` exceed `low`, at most as many exceed `high`
  while (high - low > 1) {
    const int32_t middle = (low + high) >> 1;
    int64_t count = 0;
    for (int64_t i = 0; i < sampled; ++i) count += __builtin_popcountll(passing(sample_.at(i * kBlock), middle));
    (count > best ? low : high) = middle;
  }
  return high;
}

// Tables of the sums of a query's elements, each with the sign of a bit, in 7 bits.
void Search::set_tables(const float* query, int64_t size) {
  const int64_t quads = Layout{size, 0}.sketch_bytes() * 2;
  float largest = 0, total = 0;
  const auto sum_of = [&](int64_t quad, auto element) {
    float sum = 0;
    for (int64_t i = 4 * quad; i < std::min(4 * quad + 4, size); ++i) sum += element(i);
    return sum;
  };
  for (int64_t quad = 0; quad < quads; ++quad) {
    const float sum = sum_of(quad, [&](int64_t i) { return std::fabs(query[i]); });
    largest = std::max(largest, sum), total += sum;
  }
  const float inverse = largest > 0 ? kLevels / (2 * largest) : 0;
  for (int64_t quad = 0; quad < quads; ++quad) {
    const float lowest = sum_of(quad, [&](int64_t i) { return std::fabs(query[i]); });
    for (int64_t signs = 0; signs < 16; ++signs) {
      const float sum = sum_of(quad, [&](int64_t i) { return signs >> i % 4 & 1 ? query[i] : -query[i]; });
      tables_[quad * 16 + signs] = uint8_t(std::min((sum + lowest) * inverse + 0.5f, float(kLevels)));
    }
  }
  bias_ = int32_t(total * inverse + 0.5f);
  shift_ = 0;
  while (quads * (kLevels + 2) << (shift_ + 1) <= INT16_MAX * 2) ++shift_;  // rounding included
}

// Writes the scores of a block: sums minus the bias, times norms; even tokens first.
void Search::score_block(const HeadMemory& memory, int64_t block, int16_t* to) const {
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
