// Layout of packed matrices; see `MatrixKind` in abi.h.

#pragma once

#include "abi.h"

namespace packed {

constexpr int64_t kRows = 16;    // per tile
constexpr int64_t kGroup = 32;   // columns per group
constexpr int64_t kBlock = 256;  // columns per block
constexpr int64_t kLine = 64;    // bytes; alignment of every part of a block

constexpr bool is_packed(int64_t kind) { return kind >= kInt8 && kind <= kMxFp4; }

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

}  // namespace packed
