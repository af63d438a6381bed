// Dequantizes single rows of packed matrices, for embeddings.

#include "block_scales.h"
#include "tiles.h"

namespace {

using packed::kBlock;
using packed::kGroup;
using packed::kLine;
using packed::kRows;

// A row of a block of a tile.
template <int64_t kind>
class Block {
 public:
  Block(const uint8_t* block, int64_t groups, int64_t row)
      : scales_(block, groups, row),
        codes_(block + packed::scale_bytes(kind, groups) + 4 * row),
        upper_(codes_ + packed::lower_bytes(kind, groups)) {}

  // Dequantizes columns 16 * half + 4 * quad to 16 * half + 4 * quad + 3 of a group.
  void read(int64_t group, int64_t half, int64_t quad, float* four) const {
    constexpr int64_t kLower = packed::lower_bits(kind), kUpper = packed::upper_bits(kind);
    constexpr int32_t kShiftPerQuad = kLower == 2 ? 2 : 0, kShiftPerHalf = kLower == 4 ? 4 : 0;
    const int64_t line = kLower == 8 ? 4 * half + quad : kLower == 4 ? quad : half;
    const int32_t codes = load(codes_ + packed::lower_bytes(kind, group) + line * kLine);
    int32_t upper = 0;
    if (kUpper == 1) upper = load(upper_ + group * kLine) >> int32_t(4 * half + quad);
    if (kUpper == 2) upper = load(upper_ + (2 * group + half) * kLine) >> int32_t(2 * quad);
    const float scale = scales_.scale(group, half), offset = scales_.offset(group, half);
    for (int32_t i = 0; i < 4; ++i) {
      int32_t code = codes >> (8 * i + kShiftPerHalf * half + kShiftPerQuad * quad) & ((1 << kLower) - 1);
      if (kind == kInt8) code = int8_t(code);
      if (kUpper) code |= (upper >> (8 * i) & ((1 << kUpper) - 1)) << kLower;
      if (packed::has_table(kind)) code = packed::numbers(kind)[code];
      four[i] = scale * float(code - packed::code_bias(kind)) + offset;
    }
  }

 private:
  static int32_t load(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return four;
  }

  const packed::BlockScales<kind, float> scales_;
  const uint8_t *codes_, *upper_;
};

template <int64_t kind, class Element>
void read_row(const Matrix& matrix, int64_t row, Element* out) {
  const auto copy_block = [&](const uint8_t* block_data, int64_t groups, int64_t column) {
    const Block<kind> block(block_data, groups, row % kRows);
    for (int64_t i = 0; i < groups * kGroup; i += 4) {
      float four[4];
      block.read(i / kGroup, i / 16 % 2, i / 4 % 4, four);
      for (int64_t k = 0; k < 4; ++k) simd::from_float(four[k], out[column + i + k]);
    }
  };
  packed::for_each_block<kind>(tile_address(matrix, row), matrix.columns, copy_block);
}

template <class Element>
void gather(const Matrix& matrix, const int64_t* rows, int64_t count, Element* out, int64_t threads) {
  packed::dispatch_kind(matrix.kind, [&](auto kind) {
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
    default: packed::dispatch_kind(matrix.kind, [&](auto kind) { read_row<kind>(matrix, row, out); });
  }
}

extern "C" {

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
