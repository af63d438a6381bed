// Skinny matrix products (GEMV and GEMM with few vectors), limited by memory bandwidth.
//
// Results do not depend on the number of threads. For packed matrices they do not depend on the other vectors either;
// dense matrices sum a single vector in another order.

#pragma once

#include <algorithm>
#include <initializer_list>

#include "abi.h"
#include "packed.h"
#include "threads.h"
#include "vectors.h"

// out[(v - range.begin) * stride + row] = scale * (matrix[row] . vectors[v] + bias[row]) for ranges of vectors and
// rows. Vectors must be quantized if the matrix is packed. `rows.begin` is a multiple of 16.
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

// The same, rounded to bfloat16; where `bfloat16_units::available()`.
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
