// Scales and offsets of a block of a packed matrix; see `MatrixKind` in abi.h.

#pragma once

#include <type_traits>

#include "packed.h"
#include "simd.h"

namespace packed {

// Loads a register of numbers, or a single one if `Floats` is float.
template <class Floats, class Element>
Floats load_as(const uint8_t* from) {
  if constexpr (std::is_same_v<Floats, float>) {
    Element element;
    std::memcpy(&element, from, sizeof element);
    return simd::to_float(element);
  } else {
    return simd::load(reinterpret_cast<const Element*>(from));
  }
}

// Loads a register of nibbles, or a single one.
template <class Floats>
Floats load_nibbles(const uint8_t* from, int64_t shift) {
  if constexpr (std::is_same_v<Floats, float>) {
    return float(*from >> shift & 15);
  } else {
    return __builtin_convertvector(simd::load_ints(from) >> int32_t(shift) & 15, Floats);
  }
}

// Scales of as many rows of a tile as `Floats` holds; see `has_offsets`.
template <int64_t kind, class Floats>
class BlockScales {
 public:
  static constexpr bool kHasOffsets = has_offsets(kind);
  static constexpr int64_t kScales = scales_per_group(kind);
  static constexpr int64_t kOffsets = kind == kQ2K ? 2 : 1;  // per group, if there are any

  // `row` is the first row within the tile.
  BlockScales(const uint8_t* block, int64_t groups, int64_t row) : groups_(groups) {
    constexpr int64_t kHalves = 2 * kRows;
    if constexpr (has_half_scales(kind)) {
      group_scales_ = block + 2 * row;
    } else {
      scale_ = load_as<Floats, simd::Half>(block + 2 * row);
      if (kHasOffsets) offset_ = -load_as<Floats, simd::Half>(block + kHalves + 2 * row);
      group_scales_ = block + (kHasOffsets ? 2 : 1) * kHalves + row;
    }
  }

  // Scale of the first or second half of a group.
  Floats scale(int64_t group, int64_t half) const {
    if constexpr (has_half_scales(kind)) {
      return load_as<Floats, simd::Half>(group_scales_ + group * (kHasOffsets ? 4 : 2) * kRows);
    } else if constexpr (kind == kQ2K) {
      return scale_ * load_nibbles<Floats>(group_scales_ + (2 * group + half) * kRows, 0);
    } else if constexpr (kHasOffsets) {
      return scale_ * load_as<Floats, uint8_t>(group_scales_ + group * kRows);
    } else {
      return scale_ * load_as<Floats, int8_t>(group_scales_ + (kScales * group + (kScales - 1) * half) * kRows);
    }
  }

  // Offset of the first or second half of a group.
  Floats offset(int64_t group, int64_t half) const {
    if constexpr (!kHasOffsets) {
      return Floats{};
    } else if constexpr (has_half_scales(kind)) {
      return load_as<Floats, simd::Half>(group_scales_ + (2 * group + 1) * 2 * kRows);
    } else if constexpr (kind == kQ2K) {
      return offset_ * load_nibbles<Floats>(group_scales_ + (2 * group + half) * kRows, 4);
    } else {
      return offset_ * load_as<Floats, uint8_t>(group_scales_ + (groups_ + group) * kRows);
    }
  }

 private:
  const uint8_t* group_scales_;
  const int64_t groups_;
  Floats scale_{}, offset_{};
};

}  // namespace packed
