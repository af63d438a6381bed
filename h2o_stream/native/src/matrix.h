// Matrices times few vectors, read at the speed of memory.
//
// A result does not depend on the number of threads. Of packed matrices it does not depend on the other vectors either;
// dense ones add up a single vector in another order.

#pragma once

#include "abi.h"
#include "buffer.h"
#include "packed.h"
#include "threads.h"

// Vectors of `size` numbers, and the same rounded to 8 bits with a scale for every group of 32, for packed matrices.
// They may be longer than a matrix has columns: the rest is ignored.
class Vectors {
 public:
  Vectors() = default;
  Vectors(int64_t count, int64_t size);

  // Makes room for as much; what was there is lost where there is more to hold.
  void reserve(int64_t count, int64_t size);

  // The numbers of a vector, aligned to a cache line; zeros until something is written.
  float* at(int64_t vector) const { return numbers_.at(vector * stride_); }
  int64_t count() const { return count_; }
  int64_t size() const { return size_; }

  // Rounds the groups of a vector that begin in a range of numbers. Threads may share them.
  void quantize(int64_t vector, Range numbers) const;

  // What `round` wrote.
  const int8_t* codes(int64_t vector) const { return codes_.at(vector * stride_); }
  const float* scales(int64_t vector) const { return scales_.at(vector * group_stride_); }
  const float* sums(int64_t vector) const { return sums_.at(vector * group_stride_); }  // of the numbers of a group
  const int32_t* code_sums(int64_t vector) const { return code_sums_.at(2 * vector * group_stride_); }  // of 16 codes

 private:
  int64_t count_ = 0, size_ = 0, stride_ = 0, group_stride_ = 0;
  Buffer<float> numbers_, scales_, sums_;
  Buffer<int8_t> codes_;
  Buffer<int32_t> code_sums_;
};

// out[v * stride + row] = matrix[row] . vectors[v] + bias[row] for some rows and vectors 0 to count - 1, which must be
// rounded for packed matrices. `rows.begin` is a multiple of 16.
void skinny_gemm(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out, int64_t stride);

// Fetches what a thread will read first of its next matrix, before it waits at a barrier.
void prefetch(const Matrix& matrix, Range rows);

// Bytes from a row to the next, or from a tile to the next.
int64_t stride_bytes(const Matrix& matrix);

// Writes a row of the matrix, in float32.
void read_row(const Matrix& matrix, int64_t row, float* out);
