// Matrices times few vectors.
//
// A matrix is read once, in blocks of a few rows, each of which is multiplied by all vectors while it is at hand. A
// library's product of matrices is made for many vectors and reads at a third of the memory's speed for few.

#include "lanes.h"

#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

using lanes::BFloat16;
using lanes::kLanes;
using lanes::Lanes;

// As many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int64_t kRows = 4, kVectors = 6;
#else
constexpr int64_t kRows = 2, kVectors = 4;
#endif

// How a block of numbers is multiplied: in float32, whatever the matrix is in.
template <class Weight>
struct InFloats {
  using Number = float;
  using Block = Lanes;
  static constexpr int64_t kWidth = kLanes;

  template <class From>
  static Block load(const From* from) {
    return lanes::load(from);
  }
  static Lanes add(Lanes sum, Block one, Block other) { return sum + one * other; }
};

template <class Weight>
struct Way : InFloats<Weight> {};

#if defined(__AVX512BF16__)
// Two products at a time, which the processor adds up in float32.
template <>
struct Way<BFloat16> {
  using Number = BFloat16;
  using Block = __m512bh;
  static constexpr int64_t kWidth = 32;

  static Block load(const BFloat16* from) { return (__m512bh)_mm512_loadu_si512(from); }
  static Lanes add(Lanes sum, Block one, Block other) { return (Lanes)_mm512_dpbf16_ps((__m512)sum, one, other); }
};
#endif

// The products of some rows and `count` vectors.
template <int64_t rows, int64_t count, class Weight, class Number>
void block(const Weight* matrix, const Number* vectors, Weight* products, int64_t columns, int64_t stride) {
  using Own = Way<Weight>;
  constexpr int64_t kTurns = rows * count == 1 ? 2 : 1;  // so that no sum waits for the one before
  Lanes sums[kTurns][rows][count] = {};
  const auto add = [&](Lanes(&own)[rows][count], int64_t c) {
    typename Own::Block some[count];
    for (int64_t v = 0; v < count; ++v) some[v] = Own::load(vectors + v * columns + c);
    for (int64_t r = 0; r < rows; ++r) {
      const auto row = Own::load(matrix + r * columns + c);
      for (int64_t v = 0; v < count; ++v) own[r][v] = Own::add(own[r][v], row, some[v]);
    }
  };
  int64_t c = 0;
  for (; c + kTurns * Own::kWidth <= columns; c += kTurns * Own::kWidth) {
    for (int64_t turn = 0; turn < kTurns; ++turn) add(sums[turn], c + turn * Own::kWidth);
  }
  for (; c + Own::kWidth <= columns; c += Own::kWidth) add(sums[0], c);
  for (int64_t v = 0; v < count; ++v) {
    for (int64_t r = 0; r < rows; ++r) {
      float sum = lanes::total(kTurns == 1 ? sums[0][r][v] : sums[0][r][v] + sums[kTurns - 1][r][v]);
      for (int64_t i = c; i < columns; ++i) {
        sum += lanes::number(matrix[r * columns + i]) * lanes::number(vectors[v * columns + i]);
      }
      lanes::put(sum, products[v * stride + r]);
    }
  }
}

// Calls the block for `count` vectors, all rows at once if there are enough vectors to make it worth while.
template <int64_t most, class Weight, class Number>
void blocks(int64_t count, int64_t rows, const Weight* matrix, const Number* vectors, Weight* products,
            int64_t columns, int64_t stride) {
  if (count < most) {
    if constexpr (most > 1) blocks<most - 1>(count, rows, matrix, vectors, products, columns, stride);
  } else if (rows == kRows && most > 1) {
    block<kRows, most>(matrix, vectors, products, columns, stride);
  } else {
    for (int64_t r = 0; r < rows; ++r) block<1, most>(matrix + r * columns, vectors, products + r, columns, stride);
  }
}

template <class Weight>
void multiply(const Weight* x, const Weight* matrix, Weight* y, int64_t count, int64_t rows, int64_t columns,
              int64_t threads) {
  using Number = typename Way<Weight>::Number;
  std::vector<Number> converted;
  const Number* vectors;
  if constexpr (std::is_same_v<Number, Weight>) {
    vectors = x;
  } else {
    converted.resize(count * columns);
    for (int64_t i = 0; i < count * columns; ++i) converted[i] = lanes::number(x[i]);
    vectors = converted.data();
  }
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t r = 0; r < rows; r += kRows) {
    for (int64_t v = 0; v < count; v += kVectors) {
      blocks<kVectors>(std::min(kVectors, count - v), std::min(kRows, rows - r), matrix + r * columns,
                       vectors + v * columns, y + v * rows + r, columns, rows);
    }
  }
}

}  // namespace

extern "C" {

// y[count][rows] = x[count][columns] times W', all in float32 or all in bfloat16.
void h2o_stream_multiply_few(const void* x, const void* matrix, void* y, int64_t count, int64_t rows, int64_t columns,
                             int64_t in_bfloat16, int64_t threads) {
  if (in_bfloat16) {
    multiply(static_cast<const BFloat16*>(x), static_cast<const BFloat16*>(matrix), static_cast<BFloat16*>(y), count,
             rows, columns, threads);
  } else {
    multiply(static_cast<const float*>(x), static_cast<const float*>(matrix), static_cast<float*>(y), count, rows,
             columns, threads);
  }
}

}  // extern "C"
