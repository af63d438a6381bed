// Products of one vector with some rows of several matrices, in chunks that threads can take. Rows follow one another.

#pragma once

#include "matrix.h"
#include "tiles.h"

// A product: out[v * stride + row] for all vectors and all rows of a matrix.
struct Product {
  const Matrix* matrix;
  float* out;
  int64_t stride;
};

// Tiles of 16 rows are numbered through all matrices; a chunk is some of them.
struct RowJob {
  static constexpr int64_t kMaxMatrices = 10, kMaxRows = 32768, kMaxChunks = 256;

  int64_t count = 0, tiles = 0, chunk_tiles = 1;
  Matrix matrices[kMaxMatrices];

  int64_t chunks() const { return (tiles + chunk_tiles - 1) / chunk_tiles; }
  bool full() const { return count == kMaxMatrices || tiles * packed::kRows == kMaxRows; }

  // Adds rows of a matrix from `begin` on, as many as there is room for; returns the first one for which there was
  // none.
  int64_t add(const Matrix& matrix, int64_t begin) {
    const int64_t end = std::min(matrix.rows, begin + kMaxRows - tiles * packed::kRows);
    Matrix& part = matrices[count++] = matrix;
    part.weights = tile_address(matrix, begin);
    part.bias = matrix.bias ? matrix.bias + begin : nullptr;
    part.rows = end - begin;
    tiles += tiles_of(part);
    return end;
  }

  // Makes chunks of about so many bytes of weights.
  void divide(int64_t bytes) {
    chunk_tiles = std::max((tiles * bytes + nbytes() - 1) / nbytes(), (tiles + kMaxChunks - 1) / kMaxChunks);
  }

  int64_t nbytes() const {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t strides = packed::is_packed(matrices[i].kind) ? 1 : packed::kRows;  // of a tile
      bytes += tiles_of(matrices[i]) * strides * stride_bytes(matrices[i]);
    }
    return bytes;
  }

  // Calls `visit(number of the matrix, rows, number of its first tile)` for all rows in a range of chunks.
  template <class Visit>
  void for_each_part(Range range, Visit visit) const {
    const int64_t begin = range.begin * chunk_tiles, end = std::min(range.end * chunk_tiles, tiles);
    for (int64_t i = 0, first = 0; i < count; first += tiles_of(matrices[i++])) {
      const Range rows{std::max<int64_t>(begin - first, 0) * packed::kRows,
                       std::min((end - first) * packed::kRows, matrices[i].rows)};
      if (rows.begin < rows.end) visit(i, rows, first);
    }
  }

 private:
  static int64_t tiles_of(const Matrix& matrix) { return simd::padded(matrix.rows, packed::kRows) / packed::kRows; }
};
