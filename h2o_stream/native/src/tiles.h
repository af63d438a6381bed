// What dense and packed matrices have in common: four rows at a time are multiplied by as many vectors as there are
// registers for, while the rows are in the cache.

#pragma once

#include "matrix.h"
#include "simd.h"

// The first row of a tile or, of a dense matrix, the row.
inline const uint8_t* address(const Matrix& matrix, int64_t row) {
  return static_cast<const uint8_t*>(matrix.weights) +
         (is_packed(matrix.kind) ? row / packed::kTile : row) * stride_bytes(matrix);
}

// Bytes that a matrix is fetched ahead: what the processor does by itself ends with a page.
constexpr int64_t kAhead = 4096;

// The products of a tile and the vectors from `first` on, as many of them as there are, at most `most`; gives how many.
template <int64_t most, class Tile>
int64_t multiply_tile(const Tile& tile, const Vectors& vectors, int64_t first, int64_t count, float* products) {
  if constexpr (most > 1) {
    if (count < most) return multiply_tile<most - 1>(tile, vectors, first, count, products);
  }
  tile.template multiply<most>(vectors, first, products);
  return most;
}

// See `multiply`. A `Tile` is made of a matrix and a row; its `multiply<count>` writes products [count][4].
template <class Tile>
void multiply_tiles(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                    int64_t stride) {
  using packed::kTile;
  float products[Tile::kMostVectors * kTile];
  for (int64_t row = rows.begin; row < rows.end; row += kTile) {
    const int64_t in_tile = rows.end - row < kTile ? rows.end - row : kTile;
    float bias[kTile] = {};
    for (int64_t i = 0; matrix.bias && i < in_tile; ++i) bias[i] = matrix.bias[row + i];
    const Tile tile(matrix, row);
    for (int64_t first = 0; first < count;) {
      const int64_t some = multiply_tile<Tile::kMostVectors>(tile, vectors, first, count - first, products);
      for (int64_t v = 0; v < some; ++v) {
        float* to = out + (first + v) * stride + row;
        for (int64_t i = 0; i < in_tile; ++i) to[i] = products[v * kTile + i] + bias[i];
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
