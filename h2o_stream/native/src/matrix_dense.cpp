// Products of float32 and bfloat16 matrices with float32 vectors.

#include "simd_functions.h"
#include "tiles.h"

namespace {

using simd::Floats;
using simd::kWidth;
using simd::load_narrow;
using simd::Narrow;  // of a single vector

// Prefetch distance in bytes; the hardware prefetcher stops at page boundaries.
constexpr int64_t kPrefetchBytes = 4096;

constexpr int64_t kNarrow = sizeof(Narrow) / sizeof(float);

// Calls `load` with `count` elements, padded with zeros.
template <class Element, class Load>
auto load_partial(const Element* from, int64_t count, Load load) {
  Element padded[kWidth] = {};
  std::memcpy(padded, from, count * sizeof(Element));
  return load(padded);
}

// Sums each of four registers.
template <class Vector>
void reduce_add_four(const Vector* vectors, float* to) {
  using Four = float __attribute__((vector_size(16)));
  Four four[4];
  for (int64_t i = 0; i < 4; ++i) four[i] = simd::fold_to_four(vectors[i]);
  simd::transpose(four);
  const Four sums = (four[0] + four[2]) + (four[1] + four[3]);
  std::memcpy(to, &sums, sizeof sums);
}

// Four rows of a matrix; missing rows repeat the last one.
template <class Element>
class DenseTile {
 public:
  static constexpr int64_t kRows = 4;
#if defined(H2O_AVX512)
  static constexpr int64_t kMaxVectors = 6;
#else
  static constexpr int64_t kMaxVectors = 3;
#endif

  DenseTile(const Matrix& matrix, int64_t row) : columns_(matrix.columns) {
    for (int64_t r = 0; r < kRows; ++r) {
      rows_[r] = static_cast<const Element*>(matrix.weights) + std::min(row + r, matrix.rows - 1) * columns_;
    }
  }

  template <int64_t count>
  void multiply(const Vectors& vectors, int64_t first, bool prefetch, float* products) const {
    // The hardware prefetcher favours sequential reads, so a single vector is multiplied row by row, with independent
    // accumulators. More vectors are multiplied by all rows at once.
    if constexpr (count == 1) {
      Narrow sums[kRows];
      for (int64_t r = 0; r < kRows; ++r) sums[r] = multiply_row(rows_[r], vectors.at(first));
      reduce_add_four(sums, products);
    } else {
      multiply_rows<count>(vectors, first, prefetch, products);
    }
  }

 private:
  Narrow multiply_row(const Element* row, const float* vector) const {
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
    const int64_t remaining = columns_ - column;
    if (remaining) {
      const auto load = [&](const auto* from) {
        return load_partial(from, remaining, [](const auto* padded) { return load_narrow(padded); });
      };
      sums[1] += load(row + column) * load(vector + column);
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  }

  template <int64_t count>
  void multiply_rows(const Vectors& vectors, int64_t first, bool prefetch, float* products) const {
    Floats sums[count][kRows] = {};
    const auto add = [&](int64_t column, auto load) {
      Floats weights[kRows];
#pragma GCC unroll 4
      for (int64_t r = 0; r < kRows; ++r) weights[r] = load(rows_[r] + column);
#pragma GCC unroll 8
      for (int64_t v = 0; v < count; ++v) {
        const Floats values = load(vectors.at(first + v) + column);
#pragma GCC unroll 4
        for (int64_t r = 0; r < kRows; ++r) sums[v][r] += weights[r] * values;
      }
    };
    int64_t column = 0;
    for (; column + kWidth <= columns_; column += kWidth) {
      if (prefetch) {
        simd::prefetch(reinterpret_cast<const uint8_t*>(rows_[0] + kRows * column) + kPrefetchBytes,
                       kRows * kWidth * int64_t(sizeof(Element)));
      }
      add(column, [](const auto* from) { return simd::load(from); });
    }
    const int64_t remaining = columns_ - column;
    const auto load_rest = [&](const auto* from) {
      return load_partial(from, remaining, [](const auto* padded) { return simd::load(padded); });
    };
    if (remaining) add(column, load_rest);
    for (int64_t v = 0; v < count; ++v) reduce_add_four(sums[v], products + v * kRows);
  }

  const Element* rows_[kRows];
  const int64_t columns_;
};

}  // namespace

void skinny_gemm_dense(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                       int64_t stride) {
  if (matrix.kind == kBFloat16) {
    gemm_tiles<DenseTile<simd::BFloat16>>(matrix, vectors, range, rows, out, stride);
  } else {
    gemm_tiles<DenseTile<float>>(matrix, vectors, range, rows, out, stride);
  }
}
