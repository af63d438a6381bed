// Matrices in float32 and bfloat16 times vectors in float32.

#include "dot.h"
#include "tiles.h"

namespace {

using packed::kTile;
using simd::Floats;
using simd::kWidth;

// The first `count` numbers of a register, zeros behind them.
template <class Number>
Floats load_some(const Number* from, int64_t count) {
  Number some[kWidth] = {};
  std::memcpy(some, from, count * sizeof(Number));
  return simd::load(some);
}

// Four rows of a matrix; where there are no more, the last is multiplied again.
template <class Number>
class DenseTile {
 public:
#if defined(H2O_AVX512)
  static constexpr int64_t kMostVectors = 6;
#else
  static constexpr int64_t kMostVectors = 3;
#endif

  DenseTile(const Matrix& matrix, int64_t row) : columns_(matrix.columns) {
    for (int64_t r = 0; r < kTile; ++r) {
      rows_[r] = static_cast<const Number*>(matrix.weights) + std::min(row + r, matrix.rows - 1) * columns_;
    }
  }

  template <int64_t count>
  void multiply(const Vectors& vectors, int64_t first, float* products) const {
    constexpr int64_t rows = count == 1 ? 1 : kTile;  // side by side: memory is quickest in the order of addresses
    Floats sums[count][kTile];
    for (int64_t row = 0; row < kTile; row += rows) multiply_rows<rows, count>(vectors, first, row, sums);
    for (int64_t v = 0; v < count; ++v) dot::totals(sums[v], products + v * kTile);
  }

 private:
  template <int64_t rows, int64_t count>
  void multiply_rows(const Vectors& vectors, int64_t first, int64_t row, Floats (&sums)[count][kTile]) const {
    Floats some[count][rows] = {};
    const auto add = [&](int64_t column, auto load) {
      Floats weights[rows];
#pragma GCC unroll 4
      for (int64_t r = 0; r < rows; ++r) weights[r] = load(rows_[row + r] + column);
#pragma GCC unroll 8
      for (int64_t v = 0; v < count; ++v) {
        const Floats numbers = load(vectors.at(first + v) + column);
#pragma GCC unroll 4
        for (int64_t r = 0; r < rows; ++r) some[v][r] += weights[r] * numbers;
      }
    };
    const auto whole = [](const auto* from) { return simd::load(from); };
    constexpr int64_t kColumns = simd::kCacheLine / int64_t(sizeof(Number));
    int64_t column = 0;
    for (; column + kColumns <= columns_; column += kColumns) {
      if (first == 0) fetch<rows>(row, column);
#pragma GCC unroll 8
      for (int64_t i = 0; i < kColumns; i += kWidth) add(column + i, whole);
    }
    for (; column + kWidth <= columns_; column += kWidth) add(column, whole);
    const int64_t left = columns_ - column;
    if (left) add(column, [&](const auto* from) { return load_some(from, left); });
    for (int64_t v = 0; v < count; ++v) std::copy_n(some[v], rows, sums[v] + row);
  }

  // Fetches what comes as much later as is read of some rows in a step; once for all vectors.
  template <int64_t rows>
  void fetch(int64_t row, int64_t column) const {
    simd::prefetch(reinterpret_cast<const uint8_t*>(rows_[row] + rows * column) + kAhead, rows * simd::kCacheLine);
  }

  const Number* rows_[kTile];
  const int64_t columns_;
};

}  // namespace

void multiply_dense(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                    int64_t stride) {
  if (matrix.kind == kBFloat16) {
    multiply_tiles<DenseTile<simd::BFloat16>>(matrix, vectors, count, rows, out, stride);
  } else {
    multiply_tiles<DenseTile<float>>(matrix, vectors, count, rows, out, stride);
  }
}
