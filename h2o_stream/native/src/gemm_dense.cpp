// Products of dense matrices with many vectors.
//
// Some columns of a panel of rows are transposed to the cache, and multiplied from there by all vectors.

#include "bfloat16_units.h"
#include "gemm.h"
#include "tiles.h"

namespace {

namespace units = bfloat16_units;

// Columns that are transposed at a time: they stay in the L2 cache beside vectors.
constexpr int64_t kDepth = 512;

// Transposes columns [first, first + depth) of up to `gemm::kPanel` rows to [depth][gemm::kPanel]; others are zero.
template <class Element>
void load_panel(const Matrix& matrix, int64_t row, int64_t rows, int64_t first, int64_t depth, float* panel) {
  for (int64_t r = 0; r < gemm::kPanel; ++r) {
    const Element* from = static_cast<const Element*>(matrix.weights) + (row + r) * matrix.columns + first;
    for (int64_t i = 0; i < depth; ++i) panel[i * gemm::kPanel + r] = r < rows ? simd::to_float(from[i]) : 0.f;
  }
}

// Multiplies up to `gemm::kPanel` rows by all vectors. `panel` is [kDepth][gemm::kPanel], `sums` [count][gemm::kPanel].
template <class Element>
void multiply_panel(const Matrix& matrix, const float* x, int64_t count, int64_t row, float* panel, float* sums,
                    float* out, int64_t stride) {
  const int64_t rows = std::min(matrix.rows - row, gemm::kPanel), columns = matrix.columns;
  for (int64_t first = 0; first < columns; first += kDepth) {
    const int64_t depth = std::min(kDepth, columns - first);
    load_panel<Element>(matrix, row, rows, first, depth, panel);
    const gemm::View vectors{x + first, columns}, weights{panel, gemm::kPanel};
    if (first) {
      gemm::multiply<true>(vectors, weights, sums, gemm::kPanel, count, depth, gemm::kPanel);
    } else {
      gemm::multiply<false>(vectors, weights, sums, gemm::kPanel, count, depth, gemm::kPanel);
    }
  }
  float bias[gemm::kPanel] = {};
  if (matrix.bias) std::copy_n(matrix.bias + row, rows, bias);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t r = 0; r < rows; ++r) out[t * stride + row + r] = sums[t * gemm::kPanel + r] + bias[r];
  }
}

template <class Element>
void gemm_floats(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads) {
  static thread_local Buffer<float> panels, sums;
  panels.reserve(threads * kDepth * gemm::kPanel), sums.reserve(threads * count * gemm::kPanel);
  float *all_panels = panels.data(), *all_sums = sums.data();  // of this thread, for all workers
  parallel(threads, [&](const Worker& worker) {
    const Range rows = worker.partition(matrix.rows, gemm::kPanel);
    for (int64_t row = rows.begin; row < rows.end; row += gemm::kPanel) {
      multiply_panel<Element>(matrix, x, count, row, all_panels + worker.index * kDepth * gemm::kPanel,
                              all_sums + worker.index * count * gemm::kPanel, out, stride);
    }
  });
}

#if defined(H2O_BFLOAT16_UNITS)

using simd::BFloat16;

// Tiles of columns that are transposed at a time.
constexpr int64_t kSteps = 24;

// Rounds 16 vectors to tiles [steps][units::kSize][units::kDepth]; missing ones are left as they are.
H2O_BFLOAT16_TARGET void round_panel(const float* x, int64_t count, int64_t columns, BFloat16* tiles) {
  for (int64_t t = 0; t < std::min(units::kSize, count); ++t) {
    for (int64_t i = 0; i < columns; i += simd::kWidth) {
      const simd::Halves rounded = units::round(simd::load(x + t * columns + i));
      BFloat16* to = tiles + i / units::kDepth * units::kTile + t * units::kDepth + i % units::kDepth;
      std::memcpy(to, &rounded, sizeof rounded);
    }
  }
}

// Transposes pairs of columns of 16 rows to tiles [steps][units::kDepth / 2][units::kSize][2]; missing rows are zero.
H2O_BFLOAT16_TARGET void load_tiles(const Matrix& matrix, int64_t row, int64_t first, int64_t steps, BFloat16* tiles) {
  const BFloat16* from = static_cast<const BFloat16*>(matrix.weights) + row * matrix.columns + first;
  const int64_t rows = std::clamp<int64_t>(matrix.rows - row, 0, units::kSize), pairs = matrix.columns / 2;
  for (int64_t pair = 0; pair < steps * units::kDepth / 2; ++pair) {
    units::gather_pairs(from + 2 * pair, rows, pairs, tiles + pair * units::kSize * 2);
  }
}

H2O_BFLOAT16_TARGET void multiply_rows(const Matrix& matrix, const BFloat16* vectors, int64_t count, Range rows,
                                  BFloat16* weights, float* out, int64_t stride) {
  const units::InUse in_use;
  const int64_t all = matrix.columns / units::kDepth;
  alignas(simd::kCacheLine) float products[units::kBlock * units::kBlock];
  for (int64_t first = 0; first < all; first += kSteps) {
    const int64_t steps = std::min(kSteps, all - first);
    for (int64_t row = rows.begin; row < rows.end; row += units::kBlock) {
      const int64_t rows_in_block = std::min(matrix.rows - row, units::kBlock);
      const float* bias = matrix.bias ? matrix.bias + row : nullptr;
      for (int64_t half = 0; half < 2; ++half) {
        load_tiles(matrix, row + half * units::kSize, first * units::kDepth, steps,
                   weights + half * steps * units::kTile);
      }
      for (int64_t token = 0; token < count; token += units::kBlock) {
        units::multiply(vectors + (token * all + first * units::kSize) * units::kDepth, all * units::kTile, weights,
                        steps * units::kTile, steps, count - token, products, units::kBlock);
        units::add_block(products, first == 0, bias, std::min(units::kBlock, count - token), rows_in_block,
                         out + token * stride + row, stride);
      }
    }
  }
}

void gemm_tiles(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads) {
  const int64_t panels = simd::padded(count, units::kBlock) / units::kSize, size = units::kSize * matrix.columns;
  constexpr int64_t kWeights = 2 * kSteps * units::kTile;
  static thread_local Buffer<BFloat16> vectors, weights;
  vectors.reserve(panels * size), weights.reserve(threads * kWeights);
  BFloat16 *all_vectors = vectors.data(), *all_weights = weights.data();  // of this thread, for all workers
  parallel(threads, [&](const Worker& worker) {
    const Range range = worker.partition(panels);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      round_panel(x + panel * size, count - panel * units::kSize, matrix.columns, all_vectors + panel * size);
    }
    worker.barrier();
    multiply_rows(matrix, all_vectors, count, worker.partition(matrix.rows, units::kBlock),
                  all_weights + worker.index * kWeights, out, stride);
  });
}

#endif

}  // namespace

void gemm_dense(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride,
                [[maybe_unused]] bool in_bfloat16, int64_t threads) {
#if defined(H2O_BFLOAT16_UNITS)
  if (in_bfloat16 && matrix.kind == kBFloat16 && matrix.columns % units::kDepth == 0 && units::available()) {
    return gemm_tiles(matrix, x, count, out, stride, threads);
  }
#endif
  if (matrix.kind == kBFloat16) return gemm_floats<simd::BFloat16>(matrix, x, count, out, stride, threads);
  gemm_floats<float>(matrix, x, count, out, stride, threads);
}
