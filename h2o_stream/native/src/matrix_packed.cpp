// Matrices in 8 and 4 bits times vectors in 8 bits.

#include "dot.h"
#include "tiles.h"

namespace {

using dot::Packing;
using dot::Sums;
using packed::kGroup;
using packed::kTile;

// Four rows of a matrix. Codes come first, then the grid of every row: scales, in 4 bits followed by offsets.
template <Packing packing>
class PackedTile {
 public:
#if defined(H2O_AVX512)
  static constexpr int64_t kMostVectors = 4;
#else
  static constexpr int64_t kMostVectors = 2;
#endif

  PackedTile(const Matrix& matrix, int64_t row)
      : codes_(address(matrix, row)),
        groups_(matrix.columns / kGroup),
        row_bytes_(matrix.columns / packing),
        grid_(codes_ + kTile * row_bytes_),
        grid_bytes_(2 * packing * groups_) {}

  template <int64_t count>
  void multiply(const Vectors& vectors, int64_t first, float* products) const {
    constexpr int64_t rows = count == 1 ? 2 : kTile;  // side by side: as many as memory delivers, or fill registers
    Sums sums[count][kTile];
#pragma GCC unroll 4
    for (int64_t row = 0; row < kTile; row += rows) multiply_rows<rows, count>(vectors, first, row, sums);
    for (int64_t v = 0; v < count; ++v) dot::totals(sums[v], products + v * kTile);
  }

 private:
  static constexpr int64_t kGroups = dot::kGroups<packing>, kSteps = dot::kSums / kGroups;

  template <int64_t rows, int64_t count>
  [[gnu::always_inline]] void multiply_rows(const Vectors& vectors, int64_t first, int64_t row,
                                            Sums (&sums)[count][kTile]) const {
    Sums some[count][rows] = {};
    int64_t group = 0;
    for (; group + dot::kSums <= groups_; group += dot::kSums) add<true>(vectors, first, row, group, some);
    if (group < groups_) add<false>(vectors, first, row, group, some);
    for (int64_t v = 0; v < count; ++v) std::copy_n(some[v], rows, sums[v] + row);
  }

  // Adds the products of the next groups: of as many as a register holds scales of, or of the last ones.
  template <bool all, int64_t rows, int64_t count>
  [[gnu::always_inline]] void add(const Vectors& vectors, int64_t first, int64_t row, int64_t group,
                                  Sums (&sums)[count][rows]) const {
    const int64_t left = groups_ - group;
    const auto halves = [&](const uint8_t* from) {
      return all ? dot::load_halves(from) : dot::load_halves(from, left);
    };
    const auto floats = [&](const float* from) { return all ? dot::load(from) : dot::first(dot::load(from), left); };
    Sums factors[count][rows];
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* grid = grid_ + (row + r) * grid_bytes_ + 2 * group;
      const Sums scales = halves(grid);
      const Sums offsets = packing == dot::kFourBits ? halves(grid + 2 * groups_) : scales * float(-dot::kBias);
#pragma GCC unroll 8
      for (int64_t v = 0; v < count; ++v) {
        factors[v][r] = scales * floats(vectors.scales(first + v) + group);
        if (packing == dot::kFourBits || dot::kBias) {
          sums[v][r] += offsets * floats(vectors.sums(first + v) + group);
        }
      }
    }
    const auto step = [&](int64_t begin, auto load) {
      if (first == 0) fetch<rows>(row, group + begin);
      const uint8_t* codes = codes_ + row * row_bytes_ + (group + begin) * (kGroup / packing);
#pragma GCC unroll 4
      for (int64_t r = 0; r < rows; ++r) {
        const dot::Weights<packing> weights(load(codes + r * row_bytes_));
#pragma GCC unroll 8
        for (int64_t v = 0; v < count; ++v) {
          const dot::Integers dots = weights.multiply(vectors.codes(first + v) + (group + begin) * kGroup);
          sums[v][r] += dot::spread<kGroups>(factors[v][r], begin) * __builtin_convertvector(dots, Sums);
        }
      }
    };
    const auto whole = [](const uint8_t* from) { return dot::load_bytes(from); };
    if constexpr (all) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < kSteps; ++i) step(i * kGroups, whole);
    } else {
      int64_t begin = 0;
      for (; begin + kGroups <= left; begin += kGroups) step(begin, whole);
      const int64_t bytes = (left - begin) * (kGroup / packing);
      if (bytes) step(begin, [&](const uint8_t* from) { return dot::load_bytes(from, bytes); });
    }
  }

  // Fetches as much of what comes later as is read in a step of some rows; once for all vectors.
  template <int64_t rows>
  void fetch(int64_t row, int64_t group) const {
    constexpr int64_t kGroupBytes = kGroup / packing + 2 * packing;
    simd::prefetch(codes_ + kAhead + (row * groups_ + group * rows) * kGroupBytes, rows * kGroups * kGroupBytes);
  }

  const uint8_t* const codes_;
  const int64_t groups_, row_bytes_;
  const uint8_t* const grid_;
  const int64_t grid_bytes_;
};

}  // namespace

void multiply_packed(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out,
                     int64_t stride) {
  if (matrix.kind == kInt4) {
    multiply_tiles<PackedTile<dot::kFourBits>>(matrix, vectors, count, rows, out, stride);
  } else {
    multiply_tiles<PackedTile<dot::kEightBits>>(matrix, vectors, count, rows, out, stride);
  }
}
