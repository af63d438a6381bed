// Matrices in float32 and bfloat16 times vectors in float32.

#include "dot.h"
#include "tiles.h"

namespace {

using packed::kTile;
using simd::Floats;
using simd::kWidth;

// What a single vector is multiplied in: memory is quicker in 32 bytes at a time than in 64.
#if defined(H2O_AVX512)
using Narrow = float __attribute__((vector_size(32)));
inline Narrow load_narrow(const float* from) { return Narrow(_mm256_loadu_ps(from)); }
inline Narrow load_narrow(const simd::BFloat16* from) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return Narrow(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
#else
using Narrow = Floats;
template <class Number>
Narrow load_narrow(const Number* from) {
  return simd::load(from);
}
#endif

constexpr int64_t kNarrow = sizeof(Narrow) / sizeof(float);

// The first `count` numbers of a register, zeros behind them.
template <class Number>
Floats load_some(const Number* from, int64_t count) {
  Number some[kWidth] = {};
  std::memcpy(some, from, count * sizeof(Number));
  return simd::load(some);
}

template <class Number>
Narrow load_some_narrow(const Number* from, int64_t count) {
  Number some[kNarrow] = {};
  std::memcpy(some, from, count * sizeof(Number));
  return load_narrow(some);
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
    // Memory is quickest in the order of addresses, and then fetched by the processor itself: for a single vector a row
    // at a time, in sums that do not wait for each other. More vectors are multiplied by all rows.
    if constexpr (count == 1) {
      Narrow sums[kTile];
      for (int64_t r = 0; r < kTile; ++r) sums[r] = multiply_row(rows_[r], vectors.at(first));
      dot::totals(sums, products);
    } else {
      multiply_rows<count>(vectors, first, products);
    }
  }

 private:
  Narrow multiply_row(const Number* row, const float* vector) const {
    constexpr int64_t kSums = 4;
    Narrow sums[kSums] = {};
    int64_t column = 0;
    for (; column + kSums * kNarrow <= columns_; column += kSums * kNarrow) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kSums; ++i) {
        sums[i] += load_narrow(row + column + i * kNarrow) * load_narrow(vector + column + i * kNarrow);
      }
    }
    for (; column + kNarrow <= columns_; column += kNarrow) {
      sums[0] += load_narrow(row + column) * load_narrow(vector + column);
    }
    const int64_t left = columns_ - column;
    if (left) sums[1] += load_some_narrow(row + column, left) * load_some_narrow(vector + column, left);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  template <int64_t count>
  void multiply_rows(const Vectors& vectors, int64_t first, float* products) const {
    Floats sums[count][kTile] = {};
    const auto add = [&](int64_t column, auto load) {
      Floats weights[kTile];
#pragma GCC unroll 4
      for (int64_t r = 0; r < kTile; ++r) weights[r] = load(rows_[r] + column);
#pragma GCC unroll 8
      for (int64_t v = 0; v < count; ++v) {
        const Floats numbers = load(vectors.at(first + v) + column);
#pragma GCC unroll 4
        for (int64_t r = 0; r < kTile; ++r) sums[v][r] += weights[r] * numbers;
      }
    };
    int64_t column = 0;
    for (; column + kWidth <= columns_; column += kWidth) {
      if (first == 0) {  // what comes later is fetched once for all vectors
        simd::prefetch(reinterpret_cast<const uint8_t*>(rows_[0] + kTile * column) + kAhead,
                       kTile * kWidth * int64_t(sizeof(Number)));
      }
      add(column, [](const auto* from) { return simd::load(from); });
    }
    const int64_t left = columns_ - column;
    if (left) add(column, [&](const auto* from) { return load_some(from, left); });
    for (int64_t v = 0; v < count; ++v) dot::totals(sums[v], products + v * kTile);
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
