// Common loop of dense and packed products: a tile of rows is multiplied by as many vectors as registers allow while it
// is in the cache.

#pragma once

#include "matrix.h"
#include "simd.h"

// Address of a row, or of the packed tile that contains it. Where columns follow one another, `row` is the first of a
// matrix in a sequence of matrices.
inline const uint8_t* tile_address(const Matrix& matrix, int64_t row) {
  return static_cast<const uint8_t*>(matrix.weights) +
         (packed::is_packed(matrix.kind) ? row / packed::kRows : row) * stride_bytes(matrix);
}

// Multiplies a tile by up to max_vectors vectors of a range; returns how many.
template <int64_t max_vectors, class Tile>
int64_t gemm_tile(const Tile& tile, const Vectors& vectors, Range range, bool prefetch, float* products) {
  if constexpr (max_vectors > 1) {
    if (range.size() < max_vectors) return gemm_tile<max_vectors - 1>(tile, vectors, range, prefetch, products);
  }
  tile.template multiply<max_vectors>(vectors, range.begin, prefetch, products);
  return max_vectors;
}

// See `skinny_gemm`. A `Tile` is built from a matrix and its first row; its `multiply<count>` writes products
// [count][kRows] and may prefetch the next tile.
template <class Tile>
void gemm_tiles(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out, int64_t stride) {
  constexpr int64_t kRows = Tile::kRows;
  alignas(simd::kCacheLine) float products[Tile::kMaxVectors * kRows];
  for (int64_t row = rows.begin; row < rows.end; row += kRows) {
    const int64_t rows_in_tile = std::min(rows.end - row, kRows);
    float bias[kRows] = {};
    if (matrix.bias) std::copy_n(matrix.bias + row, rows_in_tile, bias);
    const Tile tile(matrix, row);
    for (int64_t first = range.begin; first < range.end;) {
      const bool prefetch = first == range.begin;  // once for all vectors
      const int64_t multiplied =
          gemm_tile<Tile::kMaxVectors>(tile, vectors, {first, range.end}, prefetch, products);
      for (int64_t v = 0; v < multiplied; ++v) {
        float* to = out + (first - range.begin + v) * stride + row;
        for (int64_t i = 0; i < rows_in_tile; ++i) to[i] = products[v * kRows + i] + bias[i];
      }
      first += multiplied;
    }
  }
}

// The implementations of `skinny_gemm`.
void skinny_gemm_dense(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                       int64_t stride);
void skinny_gemm_columns(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                         int64_t stride);
void skinny_gemm_packed(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                        int64_t stride);
