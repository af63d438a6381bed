// Quantizes dense weights to int8 and int4 tiles.

#include "simd_functions.h"
#include "tile_quantize.h"

namespace {

using namespace tiles;

inline Floats load_floats(const float* from) { return simd::load(from); }
inline Floats load_floats(const simd::BFloat16* from) { return simd::load(from); }
inline Floats load_floats(const Half* from) { return load_halves(from); }

template <class Element>
void load_group(const Element* const (&rows)[kRows], int64_t column, Group& group) {
  for (int64_t c = 0; c < kGroup; c += kWidth) {
    for (int64_t r = 0; r < kRows; r += kWidth) {
      Floats block[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) block[i] = load_floats(rows[r + i] + column + c);
      simd::transpose(block);
      for (int64_t i = 0; i < kWidth; ++i) simd::store(block[i], group[c + i] + r);
    }
  }
}

template <class Element>
void pack(const Matrix& matrix, const Element* weights, int64_t threads) {
  static const Element zeros[packed::kBlock] = {};
  for_each_block(matrix, threads, [&](const BlockTarget& target) {
    const Element* rows[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t row = target.tile * kRows + r;
      rows[r] = row < matrix.rows ? weights + row * matrix.columns + target.column : zeros;
    }
    Group group;
    for (int64_t g = 0; g < target.groups; ++g) {
      load_group(rows, g * kGroup, group);
      if (matrix.kind == kInt8) {
        quantize_int8(group, target.scales + g * 2 * kRows, target.lower + g * kGroup * kRows);
      } else {
        quantize_int4(group, target.scales + g * 4 * kRows, target.lower + g * kGroup / 2 * kRows);
      }
    }
  });
}

}  // namespace

// Quantizes weights [rows][columns] (dtype 0: float32, 1: bfloat16, 2: float16) to kInt8 or kInt4.
extern "C" void h2o_pack(const Matrix* out, const void* weights, int64_t dtype, int64_t threads) {
  if (dtype == 0) pack(*out, static_cast<const float*>(weights), threads);
  if (dtype == 1) pack(*out, static_cast<const simd::BFloat16*>(weights), threads);
  if (dtype == 2) pack(*out, static_cast<const Half*>(weights), threads);
}
