// Skinny matrix products (GEMV and GEMM with few vectors), limited by memory bandwidth.
//
// Results do not depend on the number of threads. For packed matrices they do not depend on the other vectors either;
// dense matrices sum a single vector in another order.

#pragma once

#include <algorithm>
#include <initializer_list>

#include "abi.h"
#include "buffer.h"
#include "dot.h"
#include "packed.h"
#include "threads.h"

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

 private:
  int64_t count_ = 0, size_ = 0, stride_ = 0, group_stride_ = 0;
  Buffer<float> numbers_;
  Buffer<dot::VectorGroup> groups_;
  Buffer<rounding::Scale> scales_;
};

// out[(v - range.begin) * stride + row] = scale * (matrix[row] . vectors[v] + bias[row]) for ranges of vectors and rows.
// Vectors must be quantized if the matrix is packed. `rows.begin` is a multiple of 16.
void skinny_gemm(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out, int64_t stride);

// The same for vectors [0, count).
inline void skinny_gemm(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                        int64_t stride) {
  skinny_gemm(matrix, vectors, Range{0, count}, rows, out, stride);
}

// Quantizes a range of a vector if any of these matrices needs it.
inline void quantize_for(std::initializer_list<const Matrix*> matrices, const Vectors& vectors, int64_t vector,
                         Range range) {
  const auto reads_codes = [](const Matrix* matrix) { return matrix->weights && packed::is_packed(matrix->kind); };
  if (std::any_of(matrices.begin(), matrices.end(), reads_codes)) vectors.quantize(vector, range);
}

// The same for vectors [count][columns] and all rows, on up to `threads` threads; rounds the vectors by itself.
//
// With `in_bfloat16` vectors and packed matrices may be rounded to bfloat16, where that is faster.
void multiply(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, bool in_bfloat16,
              int64_t threads);

// `multiply` for packed matrices and many vectors, with the numbers of `skinny_gemm`, but without the matrix's scale.
void gemm_packed(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads);

// The same, rounded to bfloat16; where `amx::available()`.
void gemm_bfloat16(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads);

// `multiply` for dense matrices and many vectors, without the matrix's scale. With `in_bfloat16` vectors may be rounded
// if the matrix is.
void gemm_dense(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, bool in_bfloat16,
                int64_t threads);

// Prefetches the start of the next matrix; call it before waiting at a barrier.
void prefetch(const Matrix& matrix, Range rows);

// Bytes between rows, or between tiles.
int64_t stride_bytes(const Matrix& matrix);

// Dequantizes a row of a matrix whose rows follow one another.
void read_row(const Matrix& matrix, int64_t row, float* out);
