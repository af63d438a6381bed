// Helpers for writing packed tiles: iteration over blocks, and transposed loads from 16 rows.

#pragma once

#include "packed.h"
#include "simd.h"
#include "simd_functions.h"
#include "threads.h"

namespace tiles {

using packed::kRows;
using simd::Floats;
using simd::Half;
using simd::kWidth;
using simd::Words;

template <int64_t count>
struct WordsOf {
  typedef uint32_t Type __attribute__((vector_size(4 * count)));
};

// One pointer per row of a tile.
using Rows = const uint8_t* [kRows];

// Four bytes of every row.
using Column = uint32_t[kRows];

// Where a block is written; `lower` and `upper` are the low and high bits of the codes.
struct BlockTarget {
  uint8_t *scales, *lower, *upper;
  int64_t tile, column, groups;
};

// Calls write(target) for every block of a matrix, on several threads.
template <class Write>
void for_each_block(const Matrix& matrix, int64_t threads, Write write) {
  const int64_t kind = matrix.kind, columns = matrix.columns;
  parallel(threads, [&](const Worker& worker) {
    const Range tiles = worker.partition((matrix.rows + kRows - 1) / kRows);
    auto* block = const_cast<uint8_t*>(static_cast<const uint8_t*>(matrix.weights)) +
                  tiles.begin * packed::tile_bytes(kind, columns);
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      for (int64_t column = 0; column + packed::kGroup <= columns; column += packed::kBlock) {
        const int64_t groups = std::min(packed::kBlock, columns - column) / packed::kGroup;
        const int64_t scale_bytes = packed::scale_bytes(kind, groups), bytes = packed::block_bytes(kind, groups);
        std::memset(block + scale_bytes - packed::kLine, 0, packed::kLine);  // padding after the scales
        uint8_t* upper = block + bytes - packed::upper_bytes(kind, groups);
        write(BlockTarget{block, block + scale_bytes, upper, tile, column, groups});
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

inline Floats load_halves(const void* from) { return simd::load(static_cast<const Half*>(from)); }
inline void store_halves(Floats floats, void* to) { simd::store(floats, static_cast<Half*>(to)); }

// Reads 4 * count bytes at `from` of every row.
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
        using Vector = typename WordsOf<width>::Type;
        Vector square[width];
        for (int64_t j = 0; j < width; ++j) square[j] = load<Vector>(rows[r + j] + from + 4 * i);
        simd::transpose(square);
        for (int64_t j = 0; j < width; ++j) store(square[j], columns[i + j] + r);
      }
    }
  }
}

// Copies an fp16 number of every row.
inline void copy_halves(const Rows& rows, int64_t from, uint8_t* to) {
  for (int64_t r = 0; r < kRows; ++r) std::memcpy(to + 2 * r, rows[r] + from, 2);
}

// Byte `number` of every word.
inline Words byte_of(Words words, int64_t number) { return words >> uint32_t(8 * number) & 0xff; }

// Writes the bytes of words as [4][kRows], for `kWidth` of the rows.
inline void store_bytes(Words words, uint8_t* to) {
  for (int64_t k = 0; k < 4; ++k) store(__builtin_convertvector(byte_of(words, k), simd::Bytes), to + k * kRows);
}

// Valid below 2^31.
inline Floats to_floats(Words words) {
  return __builtin_convertvector(__builtin_convertvector(words, simd::Ints), Floats);
}

}  // namespace tiles
