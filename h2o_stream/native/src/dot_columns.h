// What products with many vectors multiply at a time: some columns of a register of rows, and of one or two vectors.

#pragma once

#include "dot.h"
#include "simd_functions.h"

namespace dot {

// Vectors have `kParts` bytes for each code, highest first, or one number of 16 bits. A register of sums is that of
// rows, or of half as many, each with both vectors of a tile.
#if defined(H2O_NEON_I8MM)
constexpr int64_t kParts = 2, kColumns = 8, kTile = 2;
using Factor = int64_t;
#elif defined(H2O_NEON_DOT)
constexpr int64_t kParts = 2, kColumns = 4, kTile = 1;
using Factor = int32_t;
#else
constexpr int64_t kParts = 1, kColumns = 2, kTile = 1;
using Factor = int32_t;
#endif

#if defined(H2O_NEON_DOT)
using Columns = Bytes;
using Factors = VectorGroup;
#else
using Columns = Pairs;
using Factors = PairGroup;
#endif

// Adds products with the `tile`th vectors.
[[gnu::always_inline]] inline Ints multiply_columns(Ints sums, Columns columns, const Factor* factors, int64_t tile) {
#if defined(H2O_NEON_I8MM)
  return simd::add_products_of_eight(sums, columns, factors + 2 * tile);
#elif defined(H2O_NEON_DOT)
  return simd::add_quad_products(sums, columns, reinterpret_cast<const int8_t*>(factors), tile);
#else
  return simd::add_pair_products(sums, columns, factors + tile);
#endif
}

// Unpacks a group for a register of rows; `at(i)` is where columns from `kColumns` * i on go to.
template <int64_t kind, class At>
[[gnu::always_inline]] inline void unpack_group(const uint8_t* lower, const uint8_t* upper, At at) {
#if defined(H2O_NEON_I8MM)
  Ints quads[packed::kGroup / 4];
  for_each_quad<kind, 1>(lower, upper, [&](int64_t half, int64_t quad, int64_t, Bytes bytes) {
    quads[4 * half + quad] = Ints(signed_bytes<kind>(bytes));
  });
  for (int64_t i = 0; i < packed::kGroup / kColumns; ++i) {
    const auto both = simd::interleaved(quads[2 * i], quads[2 * i + 1]);
    at(i)[0] = Columns(both.first), at(i)[1] = Columns(both.second);
  }
#else
  for_each_quad<kind, 1>(lower, upper, [&](int64_t half, int64_t quad, int64_t, Bytes bytes) {
#if defined(H2O_NEON_DOT)
    *at(4 * half + quad) = signed_bytes<kind>(bytes);
#else
    const FourColumns columns = widen<kind>(bytes);
    *at(8 * half + 2 * quad) = columns.even;
    *at(8 * half + 2 * quad + 1) = columns.odd;
#endif
  });
#endif
}

// Puts numbers of rows where sums of these rows are.
inline void spread(simd::Floats numbers, simd::Floats* to) {
#if defined(H2O_NEON_I8MM)
  const auto both = simd::interleaved(numbers, numbers);
  to[0] = both.first, to[1] = both.second;
#else
  to[0] = numbers;
#endif
}

// Of numbers of vectors those of a tile, as sums with it are multiplied by them.
inline auto of_tile(const float* numbers, int64_t tile) {
#if defined(H2O_NEON_I8MM)
  const float *both = numbers + 2 * tile;
  return simd::Floats{both[0], both[1], both[0], both[1]};
#else
  return numbers[tile];
#endif
}

// The `number`th register of rows of a vector, out of the sums with its tile.
inline simd::Floats of_vector(const simd::Floats* sums, int64_t number, [[maybe_unused]] int64_t vector) {
#if defined(H2O_NEON_I8MM)
  const auto both = simd::separated(sums[2 * number], sums[2 * number + 1]);
  return vector % 2 ? both.second : both.first;
#else
  return sums[number];
#endif
}

}  // namespace dot
