// What dense and packed matrices have in common: some rows at a time, a tile, are multiplied by as many vectors as
// there are registers for, while the rows are in the cache.

#pragma once

#include "matrix.h"
#include "simd.h"

// The tile of a packed matrix that begins with a row or, of a dense one, the row.
inline const uint8_t* address(const Matrix& matrix, int64_t row) {
  return static_cast<const uint8_t*>(matrix.weights) +
         (packed::is_packed(matrix.kind) ? row / packed::kRows : row) * stride_bytes(matrix);
}

// The products of a tile and the vectors from `first` on, as many of them as there are, at most `most`; gives how many.
template <int64_t most, class Tile>
int64_t multiply_tile(const Tile& tile, const Vectors& vectors, int64_t first, int64_t count, float* products) {
  if constexpr (most > 1) {
    if (count < most) return multiply_tile<most - 1>(tile, vectors, first, count, products);
  }
  tile.template multiply<most>(vectors, first, products);
  return most;
}

// See `multiply`. A `Tile` is made of a matrix and its first row; its `multiply<count>` writes products [count][kRows].
template <class Tile>
void multiply_tiles(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                    int64_t stride) {
  constexpr int64_t kRows = Tile::kRows;
  alignas(simd::kCacheLine) float products[Tile::kMostVectors * kRows];
  for (int64_t row = rows.begin; row < rows.end; row += kRows) {
    const int64_t in_tile = std::min(rows.end - row, kRows);
    float bias[kRows] = {};
    if (matrix.bias) std::copy_n(matrix.bias + row, in_tile, bias);
    const Tile tile(matrix, row);
    for (int64_t first = 0; first < count;) {
      const int64_t some = multiply_tile<Tile::kMostVectors>(tile, vectors, first, count - first, products);
      for (int64_t v = 0; v < some; ++v) {
        float* to = out + (first + v) * stride + row;
        for (int64_t i = 0; i < in_tile; ++i) to[i] = products[v * kRows + i] + bias[i];
      }
      first += some;
    }
  }
}

// The halves of `multiply`.
void multiply_dense(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                    int64_t stride);
void multiply_packed(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                     int64_t stride);
