// Products of packed matrices with rounded vectors.

#include "dot.h"
#include "block_scales.h"
#include "simd_functions.h"
#include "tiles.h"

namespace {

using packed::kBlock;
using packed::kGroup;
using packed::kLine;
using simd::Floats;
using simd::kWidth;

// Prefetch distance in bytes for several vectors, with which memory would not be read while they are multiplied. A
// single one reads in memory order, as the hardware prefetcher expects: it is given the next block, but not on Arm,
// where instructions were counted and nothing was timed yet.
constexpr int64_t kPrefetchDistance = 12 << 10;
#if defined(H2O_NEON)
constexpr bool kPrefetchesNext = false;
#else
constexpr bool kPrefetchesNext = true;
#endif

// A tile of 16 rows.
template <int64_t kind>
class PackedTile {
 public:
  static constexpr int64_t kRows = packed::kRows;
#if defined(H2O_AVX512) || defined(H2O_NEON_DOT)
  static constexpr int64_t kMaxVectors = 4;
#else
  static constexpr int64_t kMaxVectors = 2;
#endif

  PackedTile(const Matrix& matrix, int64_t row)
      : blocks_(tile_address(matrix, row)), groups_(matrix.columns / kGroup) {}

  template <int64_t count>
  void multiply(const Vectors& vectors, int64_t first, bool prefetch, float* products) const {
    constexpr int64_t kGroups = kBlock / kGroup, kBytes = packed::block_bytes(kind, kGroups);
    Sums<count> sums = {};
    const uint8_t* block = blocks_;
    for (int64_t group = 0; group < groups_; group += kGroups, block += kBytes) {
      add_block<count>(block, group, std::min(kGroups, groups_ - group), vectors, first, prefetch, sums);
    }
    *reinterpret_cast<Sums<count>*>(products) = sums;
  }

 private:
  using Scales = packed::BlockScales<kind, Floats>;
  static constexpr int64_t kVectorsPerTile = kRows / kWidth;  // registers per column of a tile
  static constexpr int64_t kMaxRowVectors = std::min<int64_t>(kVectorsPerTile, 2);
  template <int64_t count>
  using Dots = dot::Accumulator<kind>[Scales::kScales][count];
  // Copied as a whole: GCC keeps no array in registers that a function is given.
  template <int64_t count>
  struct [[gnu::may_alias]] Sums {
    Floats rows[count][kVectorsPerTile];
  };
  // Of the registers of a column, those that a broadcast number of a single vector is multiplied by at a time.
  template <int64_t count>
  static constexpr int64_t kRowVectors = count == 1 ? kMaxRowVectors : 1;
  static constexpr int64_t kLowerBytes = packed::lower_bytes(kind, 1), kUpperBytes = packed::upper_bytes(kind, 1);

  template <int64_t count>
  [[gnu::always_inline]] static void add_block(const uint8_t* block, int64_t begin, int64_t groups,
                                               const Vectors& vectors, int64_t first, bool prefetch,
                                               Sums<count>& sums) {
    constexpr int64_t kBytes = packed::block_bytes(kind, kBlock / kGroup);
    constexpr int64_t kPrefetchBytes = simd::padded(kBytes * kGroup / kBlock, kLine);  // per group
    const uint8_t* lower = block + packed::scale_bytes(kind, groups);
    const uint8_t* upper = lower + groups * kLowerBytes;
    const dot::VectorGroup* vector_groups[count];
    const rounding::Scale* vector_scales[count];
    for (int64_t v = 0; v < count; ++v) {
      vector_groups[v] = vectors.groups(first + v) + begin, vector_scales[v] = vectors.scales(first + v) + begin;
    }
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* group_lower = lower + group * kLowerBytes;
      const uint8_t* group_upper = upper + group * kUpperBytes;
      if (prefetch && kPrefetchesNext && count == 1) {
        simd::prefetch(block + kBytes + group * kPrefetchBytes, kPrefetchBytes);
      } else if (prefetch && count > 1) {
        simd::prefetch<2>(block + kPrefetchDistance + group * kPrefetchBytes, kPrefetchBytes);
      }
#pragma GCC unroll 4
      for (int64_t row_vector = 0; row_vector < kVectorsPerTile; row_vector += kRowVectors<count>) {
        const int64_t offset = row_vector * 4 * kWidth;
        add_group<count>(block, groups, group, group_lower + offset, group_upper + offset, vector_groups,
                         vector_scales, row_vector, sums);
      }
    }
  }

  // Adds the products of a group for kRowVectors registers of rows.
  template <int64_t count>
  [[gnu::always_inline]] static void add_group(const uint8_t* block, int64_t groups, int64_t group,
                                               const uint8_t* lower, const uint8_t* upper,
                                               const dot::VectorGroup* const* vectors,
                                               const rounding::Scale* const* vector_scales, int64_t row_vector,
                                               Sums<count>& sums) {
    constexpr int64_t kScales = Scales::kScales, kRegisters = kRowVectors<count>;
    Dots<count> dots[kRegisters];
    int64_t call = 0;
    dot::for_each_quad<kind, kRegisters>(
        lower, upper, [&](int64_t half, int64_t quad, int64_t row, dot::Bytes bytes) {
#pragma GCC unroll 4
          for (int64_t v = 0; v < count; ++v) {
            dots[row][kScales == 2 ? half : 0][v].add(bytes, vectors[v][group],
                                                      16 * half + 4 * quad, kScales == 2 ? quad : call);
          }
          call += row + 1 == kRegisters;
        });
#pragma GCC unroll 4
    for (int64_t row = 0; row < kRegisters; ++row) {
      const Scales block_scales(block, groups, (row_vector + row) * kWidth);
      add_scaled<count>(block_scales, group, dots[row], vector_scales, row_vector + row, sums);
    }
  }

  // Adds products of codes times scales, and offsets.
  template <int64_t count>
  [[gnu::always_inline]] static void add_scaled(const Scales& block_scales, int64_t group, const Dots<count>& dots,
                                                const rounding::Scale* const* vector_scales, int64_t row_vector,
                                                Sums<count>& sums) {
    constexpr int64_t kScales = Scales::kScales;
    Floats scales[kScales];
    for (int64_t i = 0; i < kScales; ++i) scales[i] = block_scales.scale(group, i);
    Floats offsets[Scales::kOffsets];
    for (int64_t i = 0; i < Scales::kOffsets; ++i) offsets[i] = block_scales.offset(group, i);
#pragma GCC unroll 4
    for (int64_t v = 0; v < count; ++v) {
      Floats& sum = sums.rows[v][row_vector];
      const rounding::Scale& scale = vector_scales[v][group];
      for (int64_t i = 0; i < kScales; ++i) {
        const int32_t code_sum = kScales == 2 ? scale.code_sums[i] : scale.code_sums[0] + scale.code_sums[1];
        sum += to_floats(dots[i][v].sums(code_sum)) * (scales[i] * scale.scale);
      }
      if constexpr (Scales::kOffsets == 2) {
        for (int64_t i = 0; i < 2; ++i) sum += offsets[i] * scale.half_sum(i);
      } else if constexpr (Scales::kHasOffsets) {
        sum += offsets[0] * scale.sum;
      }
    }
  }

  static Floats to_floats(simd::Ints ints) { return __builtin_convertvector(ints, Floats); }

  const uint8_t* const blocks_;
  const int64_t groups_;
};

}  // namespace

void skinny_gemm_packed(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                        int64_t stride) {
  packed::dispatch_kind(matrix.kind, [&](auto kind) {
    gemm_tiles<PackedTile<kind>>(matrix, vectors, range, rows, out, stride);
  });
}
