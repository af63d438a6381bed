// Repacks GGUF matrices into tiles, without dequantizing where the formats match.

#include "gguf_blocks.h"

namespace {

using namespace tiles;

template <class Type>
int64_t repack(const Matrix& matrix, const uint8_t* blocks, const int64_t* order, int64_t threads) {
  static const uint8_t zeros[Type::kBytes] = {};
  constexpr int64_t kGroups = Type::kColumns / packed::kGroup;
  constexpr int64_t kScaleBytes = (packed::has_offsets(Type::kKind) ? 4 : 2) * kRows;  // per group, if it is a block
  constexpr int64_t kLowerBytes = packed::lower_bytes(Type::kKind, 1);
  constexpr int64_t kUpperBytes = packed::upper_bytes(Type::kKind, 1);
  if (matrix.kind != Type::kKind || matrix.columns <= 0 || matrix.columns % Type::kColumns) return 1;
  const int64_t row_bytes = matrix.columns / Type::kColumns * Type::kBytes;
  for_each_block(matrix, threads, [&](const BlockTarget& target) {
    for (int64_t g = 0; g < target.groups; g += kGroups) {
      const int64_t first = (target.column + g * packed::kGroup) / Type::kColumns * Type::kBytes;
      Rows rows;
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t row = target.tile * kRows + r;
        rows[r] = row < matrix.rows ? blocks + (order ? order[row] : row) * row_bytes + first : zeros;
      }
      Type::repack(rows, target.scales + g * kScaleBytes, target.lower + g * kLowerBytes,
                   target.upper + g * kUpperBytes);
    }
  });
  return 0;
}

}  // namespace

// Repacks the blocks of a matrix [rows] into tiles of out->kind. Row i of the result is row order[i] of the blocks, or
// row i if order is null. `ggml_type` is a ggml_type value. Returns 0, or 1 if this type cannot be stored as this kind
// or the columns are not whole blocks.
extern "C" int64_t h2o_repack(const Matrix* out, const void* blocks, int64_t ggml_type, const int64_t* order,
                              int64_t threads) {
  const auto* bytes = static_cast<const uint8_t*>(blocks);
  switch (ggml_type) {
    case 2: return repack<gguf::Q4_0>(*out, bytes, order, threads);
    case 3: return repack<gguf::Q4_1>(*out, bytes, order, threads);
    case 6: return repack<gguf::Q5_0>(*out, bytes, order, threads);
    case 7: return repack<gguf::Q5_1>(*out, bytes, order, threads);
    case 8: return repack<gguf::Q8_0>(*out, bytes, order, threads);
    case 10: return repack<gguf::Q2_K>(*out, bytes, order, threads);
    case 11: return repack<gguf::Q3_K>(*out, bytes, order, threads);
    case 12: return repack<gguf::Q4_K>(*out, bytes, order, threads);
    case 13: return repack<gguf::Q5_K>(*out, bytes, order, threads);
    case 14: return repack<gguf::Q6_K>(*out, bytes, order, threads);
    case 20: return repack<gguf::Iq4Nl>(*out, bytes, order, threads);
    case 23: return repack<gguf::Iq4Xs>(*out, bytes, order, threads);
    case 39: return repack<gguf::MxFp4>(*out, bytes, order, threads);
    default: return 1;
  }
}
