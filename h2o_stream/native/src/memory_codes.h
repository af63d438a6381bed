// Codes of keys by product quantization, and their products with queries.
//
// A key is projected to the directions in which products with queries differ most, four of which make a group. Its code
// has four bits for each group: the number of the nearest of 16 centroids. The product with a query is then a sum of
// one number for each group, out of a table that is made for the query.
//
// Directions and centroids are learned from the first keys of a head and from the queries until then.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "buffer.h"

namespace memory {

constexpr int64_t kGroupDims = 4, kCentroids = 16, kMaxGroups = 16;

// Tokens per segment; tokens whose codes lie together.
constexpr int64_t kSegment = 512, kBlock = 64;

// Keys that a codebook is learned from.
constexpr int64_t kTraining = 256;
static_assert(kTraining <= kSegment, "codes of full segments do not change");

// Queries that codes and directions are read for together.
constexpr int64_t kTogether = 4;

// Calls a function with the number of queries that are taken together, as a constant.
template <class Function>
void with_constant(int64_t queries, Function function) {
  static_assert(kTogether == 4);
  if (queries == 1) return function(std::integral_constant<int64_t, 1>());
  if (queries == 2) return function(std::integral_constant<int64_t, 2>());
  if (queries == 3) return function(std::integral_constant<int64_t, 3>());
  function(std::integral_constant<int64_t, 4>());
}

// Sizes for keys of a size: half of their dimensions have codes, but not more than `kMaxGroups` groups.
struct CodeShape {
  int64_t key_size;

  int64_t groups() const { return std::max<int64_t>(2, std::min((key_size / 8 + 1) / 2 * 2, kMaxGroups)); }
  int64_t dims() const { return groups() * kGroupDims; }
  int64_t bytes() const { return groups() / 2; }
  // Of a codebook.
  int64_t floats() const {
    return 1 + key_size + std::max(key_size, 2 * dims()) * key_size + dims() * (1 + kCentroids);
  }
};

// Buffers for learning a codebook.
struct Training {
  void reserve(int64_t key_size);

  Buffer<float> keys;                  // [kTraining][key_size]
  Buffer<float> factor, covariance;    // [key_size][key_size]
  Buffer<float> directions, next;      // [dims][key_size]
  Buffer<float> points;                // [dims][kTraining]
};

// The products of a query with all centroids, as bytes: `offset` + `step` * the sum of one byte of each group.
struct Table {
  uint8_t bytes[kMaxGroups][kCentroids];
  float offset, step;
};

// The codebook of a head, in an array of floats: whether it has been learned; the centre of keys [key_size]; before
// that second moments of queries [key_size][key_size], then directions for keys [dims][key_size] and for queries
// [key_size][dims]; the projected centre [dims]; centroids [groups][kGroupDims][kCentroids].
class Codebook {
 public:
  Codebook() = default;
  Codebook(float* floats, int64_t key_size) : shape_{key_size}, floats_(floats) {}

  bool learned() const { return *floats_ != 0; }

  // Counts a query, rotated as if keys were at the largest distance.
  void count(const float* query) const;

  // Learns from the first keys, which are in `training`.
  void learn(Training& training) const;

  // Writes the code of a key, bytes `stride` apart.
  void encode(const float* key, uint8_t* code, int64_t stride) const;

  // The same for a projected key [dims], from its centre; and what a code says of one.
  void encode_point(const float* point, uint8_t* code, int64_t stride) const;
  void decode(const uint8_t* code, int64_t stride, float* point) const;

  // Makes the tables of rotated queries, `stride` apart.
  void make_tables(const float* queries, int64_t stride, int64_t count, Table* tables) const;

 private:
  float* centre() const { return floats_ + 1; }
  float* moments() const { return centre() + shape_.key_size; }
  float* of_keys() const { return moments(); }
  float* of_queries() const { return of_keys() + shape_.dims() * shape_.key_size; }
  float* projected_centre() const {
    return moments() + std::max(shape_.key_size, 2 * shape_.dims()) * shape_.key_size;
  }
  float* centroids(int64_t group) const {
    return projected_centre() + shape_.dims() + group * kGroupDims * kCentroids;
  }
  template <int64_t count>
  void project(const float* queries, int64_t stride, float (*projected)[kMaxGroups * kGroupDims]) const;
  void fill_table(const float* projected, Table& table) const;
  void factorize_moments(Training& training) const;
  void find_directions(Training& training) const;
  void set_group(int64_t group, const int64_t* directions, Training& training) const;

  CodeShape shape_{};
  float* floats_ = nullptr;
};

}  // namespace memory
