// Dequantizes packed matrices: ranges of rows for large products, single rows for embeddings.

#include "block_scales.h"
#include "tiles.h"

namespace {

using packed::kBlock;
using packed::kGroup;
using packed::kLine;
using packed::kRows;
using simd::Floats;
using simd::Ints;
using simd::kWidth;
using simd::Words;

// A block of a tile, for as many rows as `Floats` holds: a register or a single row.
template <int64_t kind, class Ints, class Floats>
class Block {
 public:
  Block(const uint8_t* block, int64_t groups, int64_t row)
      : scales_(block, groups, row),
        codes_(block + packed::scale_bytes(kind, groups) + 4 * row),
        upper_(codes_ + groups * kGroupBytes) {}

  // Dequantizes columns 16 * half + 4 * quad to 16 * half + 4 * quad + 3 of a group.
  [[gnu::always_inline]] void read(int64_t group, int64_t half, int64_t quad, Floats* four) const {
    const uint8_t* group_codes = codes_ + group * kGroupBytes;
    const Ints codes = load(group_codes + (kind == kInt8 ? 4 * half + quad : quad) * kLine);
    Ints upper{};
    if (kind == kQ6K) upper = load(upper_ + (2 * group + half) * kLine) >> int32_t(2 * quad);
    const Floats scale = scales_.scale(group, half), offset = scales_.offset(group);
    for (int32_t i = 0; i < 4; ++i) {
      Ints code;
      if constexpr (kind == kInt8) {
        code = Ints(bits_of(codes) << uint32_t(24 - 8 * i)) >> 24;
      } else {
        code = codes >> int32_t(8 * i + 4 * half) & 15;
      }
      if (kind == kQ6K) code |= (upper >> (8 * i) & 3) << 4;
      code -= Scales::kBias;
      four[i] = scale * to_floats(code) + offset;
    }
  }

 private:
  using Scales = packed::BlockScales<kind, Floats>;
  static constexpr int64_t kGroupBytes = kRows * kGroup / (kind == kInt8 ? 1 : 2);  // without the upper bits

  static Ints load(const uint8_t* from) {
    Ints ints;
    std::memcpy(&ints, from, sizeof ints);
    return ints;
  }
  // Unsigned, so that a shift to the left of a negative number is defined.
  static uint32_t bits_of(int32_t codes) { return uint32_t(codes); }
  static Words bits_of(simd::Ints codes) { return Words(codes); }
  static float to_floats(int32_t code) { return float(code); }
  static simd::Floats to_floats(simd::Ints codes) { return __builtin_convertvector(codes, simd::Floats); }

  const Scales scales_;
  const uint8_t *codes_, *upper_;
};

// Calls `body(block, groups, column)` for the blocks of a tile.
template <int64_t kind, class Body>
void for_each_block(const uint8_t* tile, int64_t columns, Body body) {
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t groups = std::min(columns - column, kBlock) / kGroup;
    body(tile, groups, column);
    tile += packed::block_bytes(kind, groups);
  }
}

template <int64_t kind, class Element>
void read_row(const Matrix& matrix, int64_t row, Element* out) {
  for_each_block<kind>(tile_address(matrix, row), matrix.columns,
                       [&](const uint8_t* block_data, int64_t groups, int64_t column) {
                         const Block<kind, int32_t, float> block(block_data, groups, row % kRows);
                         for (int64_t i = 0; i < groups * kGroup; i += 4) {
                           float four[4];
                           block.read(i / kGroup, i / 16 % 2, i / 4 % 4, four);
                           for (int64_t k = 0; k < 4; ++k) simd::from_float(four[k], out[column + i + k]);
                         }
                       });
}

// Converts adjacent columns to words of one float32 or two bfloat16.
inline void to_words(const Floats* columns, float*, Words& word) { word = Words(columns[0]); }

inline void to_words(const Floats* columns, simd::BFloat16*, Words& word) {
  const auto rounded = [](Floats floats) { return Words(floats) + 0x7fff + (Words(floats) >> 16 & 1); };
  word = rounded(columns[0]) >> 16 | (rounded(columns[1]) & 0xffff0000);
}

// Dequantizes a group for one register of rows; writes only the rows in `rows`.
template <int64_t kind, class Element>
void write_group(const Block<kind, Ints, Floats>& block, int64_t group, Range rows, Element* out, int64_t stride) {
  constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(Element), kColumns = kWidth * kPerWord;
#pragma GCC unroll 8
  for (int64_t column = 0; column < kGroup; column += kColumns) {
    Words words[kWidth];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kColumns; i += 4) {
      const int64_t position = column + i;
      Floats four[4];
      block.read(group, position / 16, position / 4 % 4, four);
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; k += kPerWord) to_words(four + k, out, words[(i + k) / kPerWord]);
    }
    simd::transpose(words);
#pragma GCC unroll 16
    for (int64_t row = 0; row < kWidth; ++row) {
      if (row < rows.begin || row >= rows.end) continue;
      std::memcpy(static_cast<void*>(out + row * stride + column), words + row, sizeof(Words));
    }
  }
}

// Dequantizes rows [rows.begin, rows.end) of a tile; `out` is the first of them.
template <int64_t kind, class Element>
void write_tile(const uint8_t* tile, Range rows, int64_t columns, Element* out) {
  for_each_block<kind>(tile, columns, [&](const uint8_t* block_data, int64_t groups, int64_t column) {
    for (int64_t row = 0; row < kRows; row += kWidth) {
      const Block<kind, Ints, Floats> block(block_data, groups, row);
      Element* to = out + (row - rows.begin) * columns + column;
      for (int64_t group = 0; group < groups; ++group) {
        write_group(block, group, {rows.begin - row, rows.end - row}, to + group * kGroup, columns);
      }
    }
  });
}

// Calls `body` with the kind as a compile-time constant.
template <class Body>
void dispatch_kind(int64_t kind, Body body) {
  switch (kind) {
    case kInt8: return body(std::integral_constant<int64_t, kInt8>());
    case kInt4: return body(std::integral_constant<int64_t, kInt4>());
    case kQ4K: return body(std::integral_constant<int64_t, kQ4K>());
    default: return body(std::integral_constant<int64_t, kQ6K>());
  }
}

template <class Element>
void unpack(const Matrix& matrix, Range rows, Element* out, int64_t threads) {
  dispatch_kind(matrix.kind, [&](auto kind) {
    const int64_t begin = rows.begin / kRows;
    parallel(threads, [&](const Worker& worker) {
      const Range range = worker.partition(simd::padded(rows.end, kRows) / kRows - begin);
      for (int64_t tile = begin + range.begin; tile < begin + range.end; ++tile) {
        const int64_t first = std::max(rows.begin, tile * kRows), end = std::min(rows.end, (tile + 1) * kRows);
        write_tile<kind>(tile_address(matrix, tile * kRows), {first - tile * kRows, end - tile * kRows}, matrix.columns,
                         out + (first - rows.begin) * matrix.columns);
      }
    });
  });
}

template <class Element>
void gather(const Matrix& matrix, const int64_t* rows, int64_t count, Element* out, int64_t threads) {
  dispatch_kind(matrix.kind, [&](auto kind) {
    parallel(threads, [&](const Worker& worker) {
      const Range range = worker.partition(count);
      for (int64_t i = range.begin; i < range.end; ++i) read_row<kind>(matrix, rows[i], out + i * matrix.columns);
    });
  });
}

}  // namespace

void read_row(const Matrix& matrix, int64_t row, float* out) {
  const auto copy = [&](const auto* from) {
    for (int64_t i = 0; i < matrix.columns; ++i) out[i] = simd::to_float(from[i]);
  };
  switch (matrix.kind) {
    case kFloat32: return copy(reinterpret_cast<const float*>(tile_address(matrix, row)));
    case kBFloat16: return copy(reinterpret_cast<const simd::BFloat16*>(tile_address(matrix, row)));
    default: dispatch_kind(matrix.kind, [&](auto kind) { read_row<kind>(matrix, row, out); });
  }
}

extern "C" {

// Dequantizes rows [first, first + count) of a packed matrix to [count][columns] in float32 or bfloat16.
void h2o_unpack(const Matrix* matrix, void* out, int64_t first, int64_t count, int64_t in_bfloat16, int64_t threads) {
  const Range rows{first, first + count};
  if (in_bfloat16) {
    unpack(*matrix, rows, static_cast<simd::BFloat16*>(out), threads);
  } else {
    unpack(*matrix, rows, static_cast<float*>(out), threads);
  }
}

// Dequantizes rows by index, to [count][columns] in float32 or bfloat16.
void h2o_gather(const Matrix* matrix, const int64_t* rows, int64_t count, void* out, int64_t in_bfloat16,
                int64_t threads) {
  if (in_bfloat16) {
    gather(*matrix, rows, count, static_cast<simd::BFloat16*>(out), threads);
  } else {
    gather(*matrix, rows, count, static_cast<float*>(out), threads);
  }
}

}  // extern "C"
