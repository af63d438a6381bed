// Vectors that matrices are multiplied with.

#pragma once

#include <array>

#include "buffer.h"
#include "rounding.h"
#include "threads.h"
#include "vector_group.h"

// Vectors of `size` elements and, for packed matrices, the same rounded in groups of 32 (rounding.h). Vectors
// may be longer than a matrix has columns; the excess is ignored.
class Vectors {
 public:
  Vectors() = default;
  Vectors(int64_t count, int64_t size);

  // Grows to this size; growing discards the contents.
  void reserve(int64_t count, int64_t size);

  // A vector, aligned to a cache line and initially zero.
  float* at(int64_t vector) const { return numbers_.at(vector * stride_); }
  int64_t count() const { return count_; }
  int64_t size() const { return size_; }

  // Quantizes the groups of a vector that start in a range. Different threads may quantize different ranges.
  void quantize(int64_t vector, Range numbers) const;

  // The results of `quantize`.
  const dot::VectorGroup* groups(int64_t vector) const { return groups_.at(vector * group_stride_); }
  const rounding::Scale* scales(int64_t vector) const { return scales_.at(vector * group_stride_); }

  // What products with some columns of a matrix read of a vector.
  struct Part {
    void* data;
    int64_t bytes;
  };
  std::array<Part, 2> parts(int64_t vector, int64_t columns, bool packed) const;

 private:
  int64_t count_ = 0, size_ = 0, stride_ = 0, group_stride_ = 0;
  Buffer<float> numbers_;
  Buffer<dot::VectorGroup> groups_;
  Buffer<rounding::Scale> scales_;
};
