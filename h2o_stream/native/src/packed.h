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

constexpr bool is_packed(int64_t kind) { return kind >= kInt8 && kind <= kMxFp4; }
constexpr bool has_columns(int64_t kind) { return kind == kFloat32Columns || kind == kBFloat16Columns; }

// The numbers of kMxFp4 by code, plus their bias.
constexpr int8_t kMxFp4Bias = 12;
constexpr uint8_t kMxFp4Numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr int8_t code_bias(int64_t kind) { return kind == kQ6K ? 32 : kind == kMxFp4 ? kMxFp4Bias : 0; }

// Bytes of the scales of a block of `groups` groups.
constexpr int64_t scale_bytes(int64_t kind, int64_t groups) {
  const int64_t halves = 2 * kRows;
  int64_t bytes = 0;
  if (kind == kInt8 || kind == kMxFp4) bytes = groups * halves;
  if (kind == kInt4) bytes = 2 * groups * halves;
  if (kind == kQ4K) bytes = 2 * halves + 2 * groups * kRows;
  if (kind == kQ6K) bytes = halves + 2 * groups * kRows;
  return (bytes + kLine - 1) / kLine * kLine;
}

// Bytes of the codes of a block, including the upper bits that follow the lower ones.
constexpr int64_t upper_bytes(int64_t kind, int64_t groups) { return kind == kQ6K ? groups * kRows * kGroup / 4 : 0; }
constexpr int64_t code_bytes(int64_t kind, int64_t groups) {
  return groups * kRows * kGroup / (kind == kInt8 ? 1 : 2) + upper_bytes(kind, groups);
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
    default: return body(std::integral_constant<int64_t, kQ6K>());
  }
}

}  // namespace packed
