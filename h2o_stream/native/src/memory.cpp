#include "memory.h"

#include <algorithm>
#include <cmath>
#include <exception>

#include "rope.h"

namespace memory {

using simd::Floats;
using simd::kWidth;

namespace {

constexpr int64_t kLevels = 127;         // of 8 bits with a sign
constexpr int32_t kBefore = 1, kAfter = 3;  // surroundings of a place
static_assert(kSurroundings == kBefore + 1 + kAfter);

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

}  // namespace

bool belongs_in_memory(const Slots& slots, int32_t index) {
  for (int64_t range = 0; range < slots.transient_count; ++range) {
    if (index >= slots.transient[2 * range] && index < slots.transient[2 * range + 1]) return false;
  }
  return index >= 0;
}

void HeadMemory::set_found(int64_t query, const std::vector<Match>& matches) const {
  int32_t* places = found(query);
  size_t best = 0;
  for (size_t i = 0; i < matches.size(); ++i) {
    places[i] = matches[i].place;
    if (matches[i].logit > matches[best].logit) best = i;
  }
  std::fill(places + matches.size(), places + matches_, -1);
  if (!matches.empty()) std::swap(places[0], places[best]);
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

void HeadMemory::read_key(int64_t place, float* to) const {
  const int64_t size = layout_.key_size;
  const int8_t* codes = key(place);
  const float scale = key_scale(place);
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) simd::store(simd::load(codes + i) * scale, to + i);
  for (; i < size; ++i) to[i] = float(codes[i]) * scale;
}

void HeadMemory::append(int32_t index, const float* key, const float* value, Training& training) const {
  const int64_t place = *count_;
  const simd::Half scales[2] = {encode(key, layout_.key_size, const_cast<int8_t*>(this->key(place))),
                                encode(value, layout_.value_size, const_cast<int8_t*>(this->value(place)))};
  std::memcpy(record(place), &index, sizeof(index));
  std::memcpy(record(place) + sizeof(index), scales, sizeof(scales));
  *count_ = place + 1;
  add_code(place, key, training);
}

void HeadMemory::add_codes(int64_t added, Training& training) const {
  Buffer<float> key;
  key.reserve(layout_.key_size);
  if (!codebook_.learned() && *count_ >= kTraining) training.reserve(layout_.key_size);
  for (int64_t place = *count_ - added; place < *count_; ++place) {
    read_key(place, key.data());
    add_code(place, key.data(), training);
  }
}

// Tokens get their codes in order: the first ones when the codebook is learned from them.
void HeadMemory::add_code(int64_t place, const float* key, Training& training) const {
  if (codebook_.learned()) {
    write_code(place, key);
  } else if (place + 1 == kTraining) {
    learn_codebook(training);
  }
}

void HeadMemory::write_code(int64_t place, const float* key) const {
  codebook_.encode(key, const_cast<uint8_t*>(codes(place / kBlock)) + place % kBlock, kBlock);
}

// Learns from the first keys and writes their codes.
void HeadMemory::learn_codebook(Training& training) const {
  const int64_t size = layout_.key_size;
  const auto read_keys = [&] {
    for (int64_t place = 0; place < kTraining; ++place) read_key(place, training.keys.at(place * size));
  };
  read_keys();
  codebook_.learn(training);
  read_keys();
  for (int64_t place = 0; place < kTraining; ++place) write_code(place, training.keys.at(place * size));
}

void add_values(const HeadMemory& memory, const std::vector<Match>& matches, float* accum) {
  const int64_t size = memory.value_size();
  for (const Match& match : matches) {
    const float weight = match.logit * memory.value_scale(match.place);
    const int8_t* codes = memory.value(match.place);
    int64_t i = 0;
    for (; i + kWidth <= size; i += kWidth) {
      simd::store(simd::load(accum + i) + weight * simd::load(codes + i), accum + i);
    }
    for (; i < size; ++i) accum[i] += weight * float(codes[i]);
  }
}

}  // namespace memory

// Bytes that a head with keys and values of these sizes takes of the scanned part of a segment, and of its data; tokens
// of a segment; floats of a codebook; bytes of the index of a chapter of so many segments, and of scratch to make it.
extern "C" void h2o_memory_layout(int64_t key_size, int64_t value_size, int64_t chapter, int64_t* layout) {
  const memory::Layout bytes{key_size, value_size};
  const memory::CodeShape shape{key_size};
  const memory::ChapterLayout index{chapter * memory::kSegment, shape.bytes()};
  layout[0] = bytes.scan_bytes(), layout[1] = bytes.data_bytes(), layout[2] = memory::kSegment;
  layout[3] = shape.floats(), layout[4] = index.bytes();
  layout[5] = memory::ChapterMaker::scratch_bytes(shape, index);
}

// Adds the codes of the newest `added` tokens in the memory of a head, the index in the group of `slots`, whose records
// the caller has appended. Before its codebook is learned, counts queries [count][head_size], rotated as if keys were
// at the largest distance. Of `layer` only sizes are read, of `slots` what the memory needs.
//
// Returns 0, or 1 if out of memory.
extern "C" int64_t h2o_memory_encode(const AttentionLayer* layer, const Slots* slots, int64_t head, int64_t added,
                                     const float* queries, int64_t count) {
  try {
    const memory::HeadMemory memory(*layer, *slots, head);
    memory::Training training;
    const bool learned = memory.codebook().learned();
    for (int64_t q = 0; !learned && q < count; ++q) memory.codebook().count(queries + q * layer->head_size);
    memory.add_codes(added, training);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
