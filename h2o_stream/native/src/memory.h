// The memory of a head: the keys and values of the tokens it evicted, and the search for those that a query asks for.
//
// Keys are un-rotated. Keys and values have 8 bits and a scale per token. Beside them is a sketch of each key: the signs
// of its difference from a centre, the mean of the head's first keys, and the mean size of that difference. A query
// compares itself with the newest tokens exactly, with older ones by their sketches, and with the best of these exactly;
// then it attends to the best of all. Every token is seen at its own distance, but none farther than `memory_distance`,
// so that for older tokens it is the query that is rotated, once.
//
// Segments of kSegment tokens of all heads lie in memory that Python maps. Tokens are appended as they are evicted; what
// has been written does not change.

#pragma once

#include <vector>

#include "abi.h"
#include "buffer.h"
#include "simd.h"

namespace memory {

// Tokens per segment; tokens whose sketches lie together; first tokens of a head, whose mean is the centre.
constexpr int64_t kSegment = 512, kBlock = 64, kCentring = 256;

// A head's part of a segment. For scanning: sketches [blocks][sketch bytes][kBlock], norms [kSegment]. Data: token
// indices, scales of keys and of values, keys and values, each [kSegment].
struct Layout {
  int64_t key_size, value_size;

  int64_t sketch_bytes() const { return (key_size + 7) / 8; }
  int64_t scan_bytes() const { return kSegment * (sketch_bytes() + 1); }
  int64_t data_bytes() const { return kSegment * (8 + key_size + value_size); }
};

class HeadMemory {
 public:
  HeadMemory() = default;
  // `head` is the index within the group.
  HeadMemory(const AttentionLayer& layer, const Slots& slots, int64_t head)
      : layout_{layer.head_size, layer.value_size}, segments_(slots.memory_segments) {
    if (!segments_) return;
    count_ = slots.memory_counts + head;
    centre_ = slots.memory_centres + head * (layer.head_size + 1);
    scan_ = slots.memory_scan + head * layout_.scan_bytes(), data_ = slots.memory_data + head * layout_.data_bytes();
  }

  bool exists() const { return segments_; }
  int64_t count() const { return segments_ ? *count_ : 0; }
  int64_t key_size() const { return layout_.key_size; }
  int64_t value_size() const { return layout_.value_size; }

  // The first of the newest tokens that are compared exactly.
  int64_t first_near(const AttentionLayer& layer) const {
    const int64_t count = this->count();
    return count <= kCentring ? 0 : std::max<int64_t>(0, count - layer.memory_distance);
  }

  int32_t index(int64_t place) const { return indices(place / kSegment)[place % kSegment]; }
  float key_scale(int64_t place) const { return simd::to_float(scales(place / kSegment)[place % kSegment]); }
  float value_scale(int64_t place) const { return simd::to_float(scales(place / kSegment)[kSegment + place % kSegment]); }
  const int8_t* key(int64_t place) const { return keys(place / kSegment) + place % kSegment * layout_.key_size; }
  const int8_t* value(int64_t place) const { return values(place / kSegment) + place % kSegment * layout_.value_size; }
  const uint8_t* sketches(int64_t block) const {
    const int64_t place = block * kBlock;
    return scan(place / kSegment) + place % kSegment * layout_.sketch_bytes();
  }
  void prefetch_sketches(int64_t block) const {
    simd::prefetch(sketches(block), kBlock * layout_.sketch_bytes());
    simd::prefetch(norms(block), kBlock);
  }
  const uint8_t* norms(int64_t block) const {
    const int64_t place = block * kBlock;
    return scan(place / kSegment) + kSegment * layout_.sketch_bytes() + place % kSegment;
  }

  // Appends an evicted token; there must be room.
  void append(int32_t index, const float* key, const float* value) const;

 private:
  uint8_t* scan(int64_t segment) const { return reinterpret_cast<uint8_t*>(segments_[segment]) + scan_; }
  uint8_t* data(int64_t segment) const { return reinterpret_cast<uint8_t*>(segments_[segment]) + data_; }
  int32_t* indices(int64_t segment) const { return reinterpret_cast<int32_t*>(data(segment)); }
  simd::Half* scales(int64_t segment) const { return reinterpret_cast<simd::Half*>(data(segment) + 4 * kSegment); }
  int8_t* keys(int64_t segment) const { return reinterpret_cast<int8_t*>(data(segment) + 8 * kSegment); }
  int8_t* values(int64_t segment) const { return keys(segment) + kSegment * layout_.key_size; }
  void set_centre() const;
  void write_sketch(int64_t place) const;

  Layout layout_{};
  const int64_t* segments_ = nullptr;
  int64_t* count_ = nullptr;
  float* centre_ = nullptr;
  int64_t scan_ = 0, data_ = 0;
};

// Whether a token that is evicted is remembered: not if it was transient, because then it repeats another.
bool is_remembered(const Slots& slots, int32_t index);

// A token that a query attends to.
struct Match {
  float logit;
  int32_t place;
};

// Products of queries [heads][padded head_size] with near keys, from the one at place `first` up to `end`, each at its own
// distance from token `newest`: near[q * stride + place - first_near].
void multiply_near(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* queries,
                   int64_t heads, int64_t first, int64_t end, float* near, int64_t stride);

// Most tokens of a memory that are compared exactly, and the room for their products.
inline int64_t max_near(const AttentionLayer& layer) { return std::max(layer.memory_distance, kCentring); }
inline int64_t near_stride(const AttentionLayer& layer) { return simd::padded(max_near(layer), 64) + 16; }

// Finds what queries attend to. One for each thread.
class Search {
 public:
  void reserve(const AttentionLayer& layer);

  // The tokens that a query [head_size], un-rotated, attends to, best first, with logits: products times `scaling`.
  // `near` has its products with the near keys.
  std::vector<Match>& find(const AttentionLayer& layer, const HeadMemory& memory, const float* query, float scaling,
                           const float* near);

 private:
  void find_far(const AttentionLayer& layer, const HeadMemory& memory, const float* query, int64_t end);
  void scan(const HeadMemory& memory, int64_t end, int64_t wanted);
  void set_tables(const float* query, int64_t size);
  void score_block(const HeadMemory& memory, int64_t block, int16_t* scores) const;
  int32_t threshold(const HeadMemory& memory, int64_t end, int64_t wanted);
  void keep_best(int64_t wanted);
  template <class Place>
  void select(const float* products, int64_t count, int64_t wanted, Place place);

  Buffer<float> query_;
  Buffer<uint8_t> tables_;        // [sketch bytes][2][16]: sums for the low and the high four signs of a byte
  int32_t bias_ = 0, shift_ = 0;  // the sum of a product of 0; bits to the left that sums have room for
  Buffer<int16_t> sample_;        // scores of some blocks
  std::vector<int64_t> found_;    // scores and places of far tokens, in one number each
  Buffer<int32_t> far_;           // their places
  Buffer<float> products_;        // and products
  std::vector<Match> matches_;
};

// accum += sum of the values of matches, each times what its logit was replaced by.
void add_values(const HeadMemory& memory, const std::vector<Match>& matches, float* accum);

}  // namespace memory
