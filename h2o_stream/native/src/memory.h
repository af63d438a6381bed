// The memory of a head: the keys and values of the tokens it evicted, and the search for those that a query asks for.
//
// Keys are un-rotated. Keys and values have 8 bits and a scale per token. Beside them is a sketch of each key: the signs
// of its difference from a centre, the mean of the head's first keys, and the mean size of that difference. A query
// compares itself with all sketches, and with the keys of the best of these exactly; then it attends to the best of all.
// Every token is seen at its own distance, but none farther than `memory_distance`, so that for older tokens it is the
// query that is rotated, once; sketches of newer ones that lie together are compared at one distance. Queries that follow one another find nearly the same:
// a head searches with one of `memory_period`, the others compare themselves with the surroundings of what was found.
//
// Segments of kSegment tokens of all heads lie in memory that Python maps. Tokens are appended as they are evicted; what
// has been written does not change.

#pragma once

#include <cstring>
#include <vector>

#include "abi.h"
#include "buffer.h"
#include "simd.h"

namespace memory {

// Tokens per segment; tokens whose sketches lie together; first tokens of a head, whose mean is the centre.
constexpr int64_t kSegment = 512, kBlock = 64, kCentring = 256;

// A token that a query attends to.
struct Match {
  float logit;
  int32_t place;
};

// A head's part of a segment. For scanning: sketches [blocks][sketch bytes][kBlock], norms [kSegment]. Data: a record of
// each token, so that looking at one touches one page: its index, the scales of key and value, key and value.
struct Layout {
  int64_t key_size, value_size;

  int64_t sketch_bytes() const { return (key_size + 7) / 8; }
  int64_t scan_bytes() const { return kSegment * (sketch_bytes() + 1); }
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
    centre_ = slots.memory_centres + head * (layer.head_size + 1);
    matches_ = layer.memory_matches;
    found_ = slots.memory_found + head * (layer.query_heads / layer.kv_heads) * matches_;
    number_ = slots.memory_number + head;
    scan_ = slots.memory_scan + head * layout_.scan_bytes(), data_ = slots.memory_data + head * layout_.data_bytes();
  }

  bool exists() const { return segments_; }
  // Tokens that queries search; none if they attend to none.
  int64_t count() const { return segments_ && matches_ ? *count_ : 0; }
  int64_t key_size() const { return layout_.key_size; }
  int64_t value_size() const { return layout_.value_size; }

  // Whether the head searches with the query of a token. Otherwise it looks around what it found with the one before.
  // Heads take turns, so that every step costs the same.
  bool searches(const AttentionLayer& layer, int32_t token) const {
    return (token + number_) % layer.memory_period == 0;
  }

  // What the last query of a query head of this KV head attended to: [memory_matches] places, -1 for none.
  int32_t* found(int64_t query) const { return found_ + query * matches_; }
  void set_found(int64_t query, const std::vector<Match>& matches) const;

  int32_t index(int64_t place) const { return at<int32_t>(place, 0); }
  float key_scale(int64_t place) const { return simd::to_float(at<simd::Half>(place, 4)); }
  float value_scale(int64_t place) const { return simd::to_float(at<simd::Half>(place, 6)); }
  const int8_t* key(int64_t place) const { return reinterpret_cast<const int8_t*>(record(place)) + 8; }
  const int8_t* value(int64_t place) const { return key(place) + layout_.key_size; }
  const float* centre() const { return centre_; }  // [key_size], and the unit of norms
  const uint8_t* sketches(int64_t block) const {
    const int64_t place = block * kBlock;
    return scan(place / kSegment) + place % kSegment * layout_.sketch_bytes();
  }
  void prefetch_sketches(int64_t block) const {
    simd::prefetch(sketches(block), kBlock * layout_.sketch_bytes());
    simd::prefetch(norms(block), kBlock);
  }
  void prefetch_key(int64_t place) const { simd::prefetch(record(place), 8 + layout_.key_size); }
  const uint8_t* norms(int64_t block) const {
    const int64_t place = block * kBlock;
    return scan(place / kSegment) + kSegment * layout_.sketch_bytes() + place % kSegment;
  }

  // Appends an evicted token; there must be room.
  void append(int32_t index, const float* key, const float* value) const;

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
  void set_centre() const;
  void write_sketch(int64_t place) const;

  Layout layout_{};
  const int64_t* segments_ = nullptr;
  int64_t* count_ = nullptr;
  float* centre_ = nullptr;
  int32_t* found_ = nullptr;
  int64_t matches_ = 0, number_ = 0;
  int64_t scan_ = 0, data_ = 0;
};

// Whether a token that is evicted is remembered: not if it was transient, because then it repeats another.
bool is_remembered(const Slots& slots, int32_t index);

// Places and those around them, in order, of a memory with `count` tokens.
void add_surroundings(std::vector<int32_t>& places, int64_t count, std::vector<int32_t>& out);

// Most places around one.
constexpr int64_t kSurroundings = 5;

// Finds what queries attend to. One for each thread.
class Search {
 public:
  void reserve(const AttentionLayer& layer);

  // The tokens that a query [head_size], un-rotated, attends to, best first, with logits: products times `scaling`.
  // Distances are those from token `newest`.
  std::vector<Match>& find(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                           float scaling);

  // The same for a query between two searches, `found` being what the one before it attended to, and `newest` its token.
  std::vector<Match>& follow(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                             float scaling, const int32_t* found);

  // The best of some places, with their products.
  std::vector<Match>& best_of(const AttentionLayer& layer, const std::vector<int32_t>& places, const float* products,
                              float scaling);

 private:
  void multiply(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                const std::vector<int32_t>& places);
  std::vector<Match>& with_logits(const AttentionLayer& layer, float scaling);
  void scan(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query);
  void set_scale(const AttentionLayer& layer, const float* query);
  void set_distance(const AttentionLayer& layer, const HeadMemory& memory, const float* query, int32_t distance);
  void set_tables(const float* query, int64_t size);
  void score_block(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, const float* query,
                   int64_t block, int16_t* scores);
  void write_sums(const HeadMemory& memory, int64_t block, int16_t* scores) const;
  int32_t threshold(int64_t sampled, int64_t best) const;
  void keep_best(int64_t wanted);

  Buffer<float> query_, rotated_;
  std::vector<int32_t> places_, surroundings_;
  Buffer<uint8_t> tables_;        // [sketch bytes][2][16]: sums for the low and the high four signs of a byte
  float inverse_ = 0;             // codes of a sum of 1
  int32_t bias_ = 0, shift_ = 0;  // the sum of a product of 0; bits to the left that sums have room for
  int32_t distance_ = -1;         // of the tables
  float far_offset_ = 0;          // product of the centre and the query at the largest distance
  int32_t offset_ = 0;            // what the centre adds to scores at `distance_`, in place of that
  Buffer<int16_t> sample_;        // scores of some blocks
  std::vector<int64_t> found_;    // scores and places, in one number each
  Buffer<float> products_;        // of places
  std::vector<Match> matches_;
};

// accum += sum of the values of matches, each times what its logit was replaced by.
void add_values(const HeadMemory& memory, const std::vector<Match>& matches, float* accum);

}  // namespace memory
