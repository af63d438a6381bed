// Layout of packed matrices; see `MatrixKind` in abi.h.

#pragma once

#include <algorithm>
#include <type_traits>

#include "abi.h"

namespace packed {

constexpr int64_t kRows = 16;    // per tile
constexpr int64_t kGroup = 32;   // columns per group
constexpr int64_t kBlock = 256;  // columns per block
constexpr int64_t kLine = 64;    // bytes; alignment of every part of a block

constexpr bool is_packed(int64_t kind) { return (kind >= kInt8 && kind <= kMxFp4) || kind >= kInt5; }
constexpr bool has_columns(int64_t kind) { return kind == kFloat32Columns || kind == kBFloat16Columns; }

// Bits of the lower and the upper part of a code.
constexpr int64_t lower_bits(int64_t kind) { return kind == kInt8 ? 8 : kind == kQ2K || kind == kQ3K ? 2 : 4; }
constexpr int64_t upper_bits(int64_t kind) {
  return kind == kQ6K ? 2 : kind == kInt5 || kind == kQ5K || kind == kQ3K ? 1 : 0;
}

// value = scale * (number - code_bias) + offset, where the number is the code, or that of a table.
constexpr bool has_offsets(int64_t kind) {
  return kind == kInt4 || kind == kInt5 || kind == kQ2K || kind == kQ4K || kind == kQ5K;
}
constexpr int64_t scales_per_group(int64_t kind) { return kind == kQ2K || kind == kQ3K || kind == kQ6K ? 2 : 1; }

// Whether scales and offsets are numbers of 16 bits each, without a factor for a block.
constexpr bool has_half_scales(int64_t kind) {
  return kind == kInt8 || kind == kInt4 || kind == kInt5 || kind == kMxFp4 || kind == kIq4Nl;
}

// The numbers of codes, plus their bias.
constexpr bool has_table(int64_t kind) { return kind == kMxFp4 || kind == kIq4Nl || kind == kIq4Xs; }
constexpr int8_t kMxFp4Bias = 12, kIq4Bias = 127;
constexpr uint8_t kMxFp4Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr uint8_t kIq4Numbers[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
constexpr const uint8_t* numbers(int64_t kind) { return kind == kMxFp4 ? kMxFp4Numbers : kIq4Numbers; }

constexpr int8_t code_bias(int64_t kind) {
  if (kind == kQ6K) return 32;
  if (kind == kQ3K) return 4;
  return kind == kMxFp4 ? kMxFp4Bias : has_table(kind) ? kIq4Bias : 0;
}

// Bytes of the scales of a block of `groups` groups.
constexpr int64_t scale_bytes(int64_t kind, int64_t groups) {
  const int64_t halves = 2 * kRows * (has_offsets(kind) ? 2 : 1);  // of a group, or of a block
  const int64_t bytes_per_group = kind == kIq4Xs ? 1 : 2;
  const int64_t bytes = has_half_scales(kind) ? groups * halves : halves + bytes_per_group * groups * kRows;
  return (bytes + kLine - 1) / kLine * kLine;
}

// Bytes of the lower and upper parts of the codes of a block.
constexpr int64_t lower_bytes(int64_t kind, int64_t groups) { return groups * kRows * kGroup * lower_bits(kind) / 8; }
constexpr int64_t upper_bytes(int64_t kind, int64_t groups) { return groups * kRows * kGroup * upper_bits(kind) / 8; }
constexpr int64_t code_bytes(int64_t kind, int64_t groups) {
  return lower_bytes(kind, groups) + upper_bytes(kind, groups);
}

constexpr int64_t block_bytes(int64_t kind, int64_t groups) {
  return scale_bytes(kind, groups) + code_bytes(kind, groups);
}

constexpr int64_t tile_bytes(int64_t kind, int64_t columns) {
  const int64_t rest = columns % kBlock;
  return columns / kBlock * block_bytes(kind, kBlock / kGroup) + (rest ? block_bytes(kind, rest / kGroup) : 0);
}

// Calls `body(block, groups, column)` for the blocks of a tile, or of so many of its columns from a whole block on.
template <int64_t kind, class Body>
void for_each_block(const uint8_t* tile, int64_t columns, Body body) {
  for (int64_t column = 0; column < columns; column += kBlock) {
    const int64_t groups = std::min(columns - column, kBlock) / kGroup;
    body(tile, groups, column);
    tile += block_bytes(kind, groups);
  }
}

// Calls `body` with the kind as a compile-time constant.
template <class Body>
void dispatch_kind(int64_t kind, Body body) {
  switch (kind) {
    case kInt8: return body(std::integral_constant<int64_t, kInt8>());
    case kInt4: return body(std::integral_constant<int64_t, kInt4>());
    case kQ4K: return body(std::integral_constant<int64_t, kQ4K>());
    case kMxFp4: return body(std::integral_constant<int64_t, kMxFp4>());
    case kInt5: return body(std::integral_constant<int64_t, kInt5>());
    case kQ5K: return body(std::integral_constant<int64_t, kQ5K>());
    case kQ2K: return body(std::integral_constant<int64_t, kQ2K>());
    case kQ3K: return body(std::integral_constant<int64_t, kQ3K>());
    case kIq4Nl: return body(std::integral_constant<int64_t, kIq4Nl>());
    case kIq4Xs: return body(std::integral_constant<int64_t, kIq4Xs>());
    default: return body(std::integral_constant<int64_t, kQ6K>());
  }
}

}  // namespace packed
