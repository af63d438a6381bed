// Small dense float32 matrix products: C = A B or C += A B.
//
// A micro-tile of C stays in registers over the whole depth, so every element of C sums the same products in the same
// order, whichever thread computes it.

#pragma once

#include "simd.h"

namespace gemm {

// Rows and vectors of a micro-tile: what fits into registers beside a row of B.
constexpr int64_t kRows = 6;
#if defined(H2O_AVX512)
constexpr int64_t kVectors = 4;
#else
constexpr int64_t kVectors = 2;
#endif

// Columns of a panel of B.
constexpr int64_t kPanel = kVectors * simd::kWidth;

// A matrix with `stride` elements between rows.
struct View {
  const float* data;
  int64_t stride;
};

template <int kTileRows, int kTileVectors, bool kAdd>
void micro_kernel(View a, View b, float* c, int64_t c_stride, int64_t depth) {
  simd::Floats sums[kTileRows][kTileVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) {
      sums[r][v] = kAdd ? simd::load(c + r * c_stride + v * simd::kWidth) : simd::Floats{};
    }
  }
  const float *left = a.data, *right = b.data;
  for (int64_t k = 0; k < depth; ++k, ++left, right += b.stride) {
    simd::Floats row[kTileVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) row[v] = simd::load(right + v * simd::kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kTileVectors; ++v) sums[r][v] += row[v] * left[r * a.stride];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kTileRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kTileVectors; ++v) simd::store(sums[r][v], c + r * c_stride + v * simd::kWidth);
  }
}

template <int kTileVectors, bool kAdd>
void multiply_panel(View a, View b, float* c, int64_t c_stride, int64_t rows, int64_t depth) {
  int64_t row = 0;
  for (; row + kRows <= rows; row += kRows) {
    micro_kernel<kRows, kTileVectors, kAdd>({a.data + row * a.stride, a.stride}, b, c + row * c_stride, c_stride,
                                            depth);
  }
  a.data += row * a.stride, c += row * c_stride;
  switch (rows - row) {
    case 1: return micro_kernel<1, kTileVectors, kAdd>(a, b, c, c_stride, depth);
    case 2: return micro_kernel<2, kTileVectors, kAdd>(a, b, c, c_stride, depth);
    case 3: return micro_kernel<3, kTileVectors, kAdd>(a, b, c, c_stride, depth);
    case 4: return micro_kernel<4, kTileVectors, kAdd>(a, b, c, c_stride, depth);
    case 5: return micro_kernel<5, kTileVectors, kAdd>(a, b, c, c_stride, depth);
  }
}

// C [rows][columns] = A [rows][depth] times B [depth][columns]; C += with kAdd. Reads and writes whole vectors of B and
// C.
template <bool kAdd>
void multiply(View a, View b, float* c, int64_t c_stride, int64_t rows, int64_t depth, int64_t columns) {
  for (; columns > kPanel; columns -= kPanel, b.data += kPanel, c += kPanel) {
    multiply_panel<kVectors, kAdd>(a, b, c, c_stride, rows, depth);
  }
  switch ((columns + simd::kWidth - 1) / simd::kWidth) {
    case 1: return multiply_panel<1, kAdd>(a, b, c, c_stride, rows, depth);
    case 2: return multiply_panel<2, kAdd>(a, b, c, c_stride, rows, depth);
#if defined(H2O_AVX512)
    case 3: return multiply_panel<3, kAdd>(a, b, c, c_stride, rows, depth);
    case 4: return multiply_panel<4, kAdd>(a, b, c, c_stride, rows, depth);
#endif
  }
}

}  // namespace gemm
