// Products of float32 and bfloat16 matrices, whose columns follow one another, with float32 vectors.

#include "tiles.h"

namespace {

using simd::kWidth;

constexpr int64_t kColumns = 4;  // added to the results at a time

// Adds `count` columns times their numbers to a range of the results.
template <int64_t count, class Element>
void add_columns(const Element* columns, int64_t rows_in_column, Range rows, const float* numbers, float* out) {
  int64_t row = rows.begin;
  for (; row + kWidth <= rows.end; row += kWidth) {
    simd::Floats sum = simd::load(out + row);
#pragma GCC unroll 4
    for (int64_t c = 0; c < count; ++c) sum += simd::load(columns + c * rows_in_column + row) * numbers[c];
    simd::store(sum, out + row);
  }
  for (; row < rows.end; ++row) {
    for (int64_t c = 0; c < count; ++c) out[row] += simd::to_float(columns[c * rows_in_column + row]) * numbers[c];
  }
}

template <class Element>
void multiply_columns(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                      int64_t stride) {
  const Element* weights = static_cast<const Element*>(matrix.weights);
  for (int64_t v = range.begin; v < range.end; ++v) {
    float* to = out + (v - range.begin) * stride;
    for (int64_t row = rows.begin; row < rows.end; ++row) to[row] = matrix.bias ? matrix.bias[row] : 0.f;
  }
  int64_t column = 0;
  const auto add = [&](auto count) {
    for (int64_t v = range.begin; v < range.end; ++v) {
      add_columns<count.value>(weights + column * matrix.rows, matrix.rows, rows, vectors.at(v) + column,
                               out + (v - range.begin) * stride);
    }
    column += count.value;
  };
  while (column + kColumns <= matrix.columns) add(std::integral_constant<int64_t, kColumns>());
  while (column < matrix.columns) add(std::integral_constant<int64_t, 1>());
}

}  // namespace

void skinny_gemm_columns(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                         int64_t stride) {
  if (matrix.kind == kFloat32Columns) {
    multiply_columns<float>(matrix, vectors, range, rows, out, stride);
  } else {
    multiply_columns<simd::BFloat16>(matrix, vectors, range, rows, out, stride);
  }
}
