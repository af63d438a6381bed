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

// Scales of as many rows of a tile as `Floats` holds: value = scale * (code - code_bias) + offset.
template <int64_t kind, class Floats>
class BlockScales {
 public:
  static constexpr bool kHasOffsets = kind == kInt4 || kind == kQ4K;
  static constexpr int64_t kScales = kind == kQ6K ? 2 : 1;  // per group

  // `row` is the first row within the tile.
  BlockScales(const uint8_t* block, int64_t groups, int64_t row) : groups_(groups) {
    constexpr int64_t kHalves = 2 * kRows;
    if constexpr (kHalfScales) {
      group_scales_ = block + 2 * row;
    } else {
      scale_ = load_as<Floats, simd::Half>(block + 2 * row);
      if (kind == kQ4K) offset_ = -load_as<Floats, simd::Half>(block + kHalves + 2 * row);
      group_scales_ = block + (kind == kQ4K ? 2 : 1) * kHalves + row;
    }
  }

  // Scale of the first or second half of a group.
  Floats scale(int64_t group, int64_t half) const {
    if constexpr (kHalfScales) {
      return load_as<Floats, simd::Half>(group_scales_ + group * (kind == kInt4 ? 4 : 2) * kRows);
    } else if constexpr (kind == kQ4K) {
      return scale_ * load_as<Floats, uint8_t>(group_scales_ + group * kRows);
    } else {
      return scale_ * load_as<Floats, int8_t>(group_scales_ + (2 * group + half) * kRows);
    }
  }

  Floats offset(int64_t group) const {
    if constexpr (kind == kInt4) {
      return load_as<Floats, simd::Half>(group_scales_ + (2 * group + 1) * 2 * kRows);
    } else if constexpr (kind == kQ4K) {
      return offset_ * load_as<Floats, uint8_t>(group_scales_ + (groups_ + group) * kRows);
    } else {
      return Floats{};
    }
  }

 private:
  static constexpr bool kHalfScales = kind == kInt8 || kind == kInt4 || kind == kMxFp4;

  const uint8_t* group_scales_;
  const int64_t groups_;
  Floats scale_{}, offset_{};
};

}  // namespace packed
