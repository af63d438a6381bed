// The memory of a head: the keys and values of the tokens it evicted.
//
// Keys are un-rotated. Keys and values have 8 bits and a scale per token. Beside them are codes of the keys
// (memory_codes.h), by which they are searched (memory_search.h).
//
// Segments of kSegment tokens of all heads lie in memory that Python maps. Tokens are appended as they are evicted;
// what has been written does not change. Chapters of segments have an index (memory_index.h).

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "abi.h"
#include "memory_codes.h"
#include "memory_index.h"
#include "simd.h"

namespace memory {

// A token that a query attends to.
struct Match {
  float logit;
  int32_t place;
};

// A head's part of a segment. For scanning: codes [blocks][code bytes][kBlock]. Data: a record of each token, so that
// looking at one touches one page: its index, the scales of key and value, key and value.
struct Layout {
  int64_t key_size, value_size;

  int64_t scan_bytes() const { return kSegment * CodeShape{key_size}.bytes(); }
  int64_t record_bytes() const { return 8 + key_size + value_size; }
  int64_t data_bytes() const { return kSegment * record_bytes(); }
};

class HeadMemory {
 public:
  HeadMemory() = default;
  // `head` is the index within the group.
  HeadMemory(const AttentionLayer& layer, const Slots& slots, int64_t head)
      : layout_{layer.head_size, layer.value_size}, segments_(slots.memory_segments) {
    if (!segments_) return;
    count_ = slots.memory_counts + head;
    const CodeShape shape{layer.head_size};
    code_bytes_ = shape.bytes(), codebook_ = {slots.memory_codebooks + head * shape.floats(), layer.head_size};
    matches_ = layer.memory_matches, max_distance_ = layer.memory_distance;
    found_ = slots.memory_found + head * (layer.query_heads / layer.kv_heads) * matches_;
    scan_ = slots.memory_scan + head * layout_.scan_bytes(), data_ = slots.memory_data + head * layout_.data_bytes();
    index_ = {layer, slots, scan_, data_};
  }

  bool exists() const { return segments_; }
  // Tokens that queries search; none if they attend to none.
  int64_t count() const { return segments_ && matches_ ? *count_ : 0; }
  int64_t key_size() const { return layout_.key_size; }
  int64_t value_size() const { return layout_.value_size; }

  // What the last query of a query head of this KV head attended to: [memory_matches] places, that of the largest logit
  // first, -1 for none.
  int32_t* found(int64_t query) const { return found_ + query * matches_; }
  void set_found(int64_t query, const std::vector<Match>& matches) const;

  const Codebook& codebook() const { return codebook_; }
  const HeadIndex& head_index() const { return index_; }
  int32_t index(int64_t place) const { return at<int32_t>(place, 0); }
  // At which a token is seen from token `newest`: the largest distance at most, and none below 0, whatever a state has.
  int64_t distance(int64_t place, int64_t newest) const {
    return std::clamp<int64_t>(newest - index(place), 0, max_distance_);
  }
  float key_scale(int64_t place) const { return simd::to_float(at<simd::Half>(place, 4)); }
  float value_scale(int64_t place) const { return simd::to_float(at<simd::Half>(place, 6)); }
  const int8_t* key(int64_t place) const { return reinterpret_cast<const int8_t*>(record(place)) + 8; }
  // Writes the un-rotated key [key_size].
  void read_key(int64_t place, float* to) const;
  const int8_t* value(int64_t place) const { return key(place) + layout_.key_size; }
  void prefetch(int64_t place) const { simd::prefetch(record(place), layout_.record_bytes()); }
  int64_t code_bytes() const { return code_bytes_; }
  const uint8_t* codes(int64_t block) const {
    const int64_t place = block * kBlock;
    return scan(place / kSegment) + place % kSegment * code_bytes_;
  }
  // Into the second level of the cache, which waits for more lines at a time than the first.
  void prefetch_codes(const uint8_t* codes) const { simd::prefetch<2>(codes, kBlock * code_bytes_); }
  void prefetch_key(int64_t place) const { simd::prefetch(record(place), 8 + layout_.key_size); }

  // Appends an evicted token; there must be room. `training` is scratch.
  void append(int32_t index, const float* key, const float* value, Training& training) const;
  // Calls `visit(memory, bytes)` for all that a query and so many appended tokens change once there is a codebook.
  template <class Visit>
  void for_each_change(int64_t queries, int64_t appended, Visit visit) const {
    visit(found_, queries * matches_ * int64_t(sizeof *found_));
    for (int64_t place = *count_; place < *count_ + appended; ++place) {
      visit(record(place), layout_.record_bytes());
      uint8_t* code = const_cast<uint8_t*>(codes(place / kBlock)) + place % kBlock;
      for (int64_t byte = 0; byte < code_bytes_; ++byte) visit(code + byte * kBlock, 1);
    }
    visit(count_, int64_t(sizeof *count_));
  }
  // Writes the codes of the newest tokens, whose records are there.
  void add_codes(int64_t added, Training& training) const;

 private:
  uint8_t* scan(int64_t segment) const { return reinterpret_cast<uint8_t*>(segments_[segment]) + scan_; }
  uint8_t* record(int64_t place) const {
    return reinterpret_cast<uint8_t*>(segments_[place / kSegment]) + data_ + place % kSegment * layout_.record_bytes();
  }
  template <class Number>
  Number at(int64_t place, int64_t offset) const {
    Number number;
    std::memcpy(&number, record(place) + offset, sizeof(Number));
    return number;
  }
  void add_code(int64_t place, const float* key, Training& training) const;
  void write_code(int64_t place, const float* key) const;
  void learn_codebook(Training& training) const;

  Layout layout_{};
  const int64_t* segments_ = nullptr;
  int64_t* count_ = nullptr;
  Codebook codebook_;
  HeadIndex index_;
  int32_t* found_ = nullptr;
  int64_t matches_ = 0, max_distance_ = 0, code_bytes_ = 0;
  int64_t scan_ = 0, data_ = 0;
};

// Whether a token that is evicted goes to the memory: not if it was transient, because then it repeats another.
bool belongs_in_memory(const Slots& slots, int32_t index);

// Places and those around them, in order, of a memory with `count` tokens.
void add_surroundings(std::vector<int32_t>& places, int64_t count, std::vector<int32_t>& out);

// Maximum number of places around one.
constexpr int64_t kSurroundings = 5;

// accum += sum of the values of matches, each times what its logit was replaced by.
void add_values(const HeadMemory& memory, const std::vector<Match>& matches, float* accum);

}  // namespace memory
