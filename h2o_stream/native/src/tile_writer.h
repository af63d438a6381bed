// What makes packed tiles: the blocks of a matrix, shared between threads, and the same place of 16 rows side by side.

#pragma once

#include "packed.h"
#include "simd.h"
#include "threads.h"

namespace tiles {

using packed::kRows;
using simd::Floats;
using simd::Half;
using simd::kWidth;

template <class Number, int64_t count>
struct VectorOf {
  typedef Number Type __attribute__((vector_size(count * sizeof(Number))));
};

using Words = VectorOf<uint32_t, kWidth>::Type;

// Where the rows of a tile are read.
using Rows = const uint8_t* [kRows];

// Four bytes of every row.
using Column = uint32_t[kRows];

// Where some columns of a tile are written; `lower` and `upper` are the two parts of the codes of kQ6K.
struct Place {
  uint8_t *grid, *lower, *upper;
  int64_t tile, column, groups;
};

// Calls write(place) for every block of a matrix, from several threads.
template <class Write>
void for_each_block(const Matrix& matrix, int64_t threads, Write write) {
  const int64_t kind = matrix.kind, columns = matrix.columns;
  parallel(threads, [&](const Worker& worker) {
    const Range share = worker.share((matrix.rows + kRows - 1) / kRows);
    auto* block = const_cast<uint8_t*>(static_cast<const uint8_t*>(matrix.weights)) +
                  share.begin * packed::tile_bytes(kind, columns);
    for (int64_t tile = share.begin; tile < share.end; ++tile) {
      for (int64_t column = 0; column + packed::kGroup <= columns; column += packed::kBlock) {
        const int64_t groups = std::min(packed::kBlock, columns - column) / packed::kGroup;
        const int64_t grid_bytes = packed::grid_bytes(kind, groups), bytes = packed::block_bytes(kind, groups);
        std::memset(block + grid_bytes - packed::kLine, 0, packed::kLine);  // what the grid may not fill
        uint8_t* upper = block + bytes - packed::upper_bytes(kind, groups);
        write(Place{block, block + grid_bytes, upper, tile, column, groups});
        block += bytes;
      }
    }
  });
}

template <class Value>
Value load(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Value>
void store(const Value& value, void* to) {
  std::memcpy(to, &value, sizeof value);
}

inline Floats load_halves(const void* from) {
#if defined(H2O_AVX512)  // without a mask GCC 12 warns
  return Floats(_mm512_maskz_cvtph_ps(__mmask16(-1), load<__m256i>(from)));
#elif defined(H2O_AVX2)
  return Floats(_mm256_cvtph_ps(load<__m128i>(from)));
#else
  Half halves[kWidth];
  std::memcpy(halves, from, sizeof halves);
  Floats floats;
  for (int64_t i = 0; i < kWidth; ++i) floats[i] = simd::to_float(halves[i]);
  return floats;
#endif
}

// Rounded to nearest, ties to even; too large becomes infinity.
inline void store_halves(Floats floats, void* to) {
#if defined(H2O_AVX512)
  store(_mm512_maskz_cvtps_ph(__mmask16(-1), __m512(floats), _MM_FROUND_TO_NEAREST_INT), to);
#elif defined(H2O_AVX2)
  store(_mm256_cvtps_ph(__m256(floats), _MM_FROUND_TO_NEAREST_INT), to);
#else
  Half halves[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) simd::from_float(floats[i], halves[i]);
  std::memcpy(to, halves, sizeof halves);
#endif
}

// The numbers of two vectors by turns: all of them in two vectors.
template <class Some>
void zip(Some& a, Some& b) {
  const Some x = a, y = b;
  if constexpr (sizeof(Some) == 64) {
    a = __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    b = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  } else if constexpr (sizeof(Some) == 32) {
    a = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
    b = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
  } else {
    a = __builtin_shufflevector(x, y, 0, 4, 1, 5);
    b = __builtin_shufflevector(x, y, 2, 6, 3, 7);
  }
}

// Rows become columns: two halves, zipped as often as a place has bits, have changed the bits of row and column.
template <class Some, size_t width>
[[gnu::always_inline]] inline void transpose(Some (&rows)[width]) {
  for (size_t stage = 1; stage < width; stage *= 2) {
    Some zipped[width];
    for (size_t i = 0; i < width / 2; ++i) {
      zipped[2 * i] = rows[i], zipped[2 * i + 1] = rows[i + width / 2];
      zip(zipped[2 * i], zipped[2 * i + 1]);
    }
    std::copy_n(zipped, width, rows);
  }
}

// Reads four bytes of every row, `count` times, from a place in each.
template <int64_t count>
void load_columns(const Rows& rows, int64_t from, Column* columns) {
  if constexpr (count % 4) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < kRows; ++r) columns[i][r] = load<uint32_t>(rows[r] + from + 4 * i);
    }
  } else {
    constexpr int64_t width = std::min(kWidth, count);
    for (int64_t i = 0; i < count; i += width) {
      for (int64_t r = 0; r < kRows; r += width) {
        using Some = typename VectorOf<uint32_t, width>::Type;
        Some square[width];
        for (int64_t j = 0; j < width; ++j) square[j] = load<Some>(rows[r + j] + from + 4 * i);
        transpose(square);
        for (int64_t j = 0; j < width; ++j) store(square[j], columns[i + j] + r);
      }
    }
  }
}

// Copies a half of every row.
inline void copy_halves(const Rows& rows, int64_t from, uint8_t* to) {
  for (int64_t r = 0; r < kRows; ++r) std::memcpy(to + 2 * r, rows[r] + from, 2);
}

// A byte of every word.
inline Words byte_of(Words words, int64_t number) { return words >> uint32_t(8 * number) & 0xff; }

// Writes the bytes of some words [4][kRows], of which these are `kWidth` rows.
inline void store_bytes(Words words, uint8_t* to) {
  using Bytes = uint8_t __attribute__((vector_size(kWidth)));
  for (int64_t k = 0; k < 4; ++k) store(__builtin_convertvector(byte_of(words, k), Bytes), to + k * kRows);
}

// As numbers, what is less than 2^31.
inline Floats to_floats(Words words) {
  return __builtin_convertvector(__builtin_convertvector(words, simd::Ints), Floats);
}

}  // namespace tiles
