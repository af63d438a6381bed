// Products of packed matrices with many vectors, both rounded to bfloat16, on units for that.
//
// Tiles of rows are unpacked some columns at a time, and multiplied from the cache by all tokens.

#include "bfloat16_units.h"
#include "block_scales.h"
#include "dot.h"
#include "simd_functions.h"
#include "tiles.h"

#if defined(H2O_BFLOAT16_UNITS)

namespace {

namespace units = bfloat16_units;

using packed::kGroup;
using simd::BFloat16;
using simd::Floats;

constexpr int64_t kGroupsPerBlock = packed::kBlock / kGroup;
static_assert(packed::kRows == units::kSize && kGroup == units::kDepth);

// Groups that are unpacked at a time: they stay in the L1 cache, and those of the tokens in the L2 cache.
constexpr int64_t kMaxGroups = 3 * kGroupsPerBlock;

// A product, and the rounded vectors: tiles [count / 16][groups].
struct Product {
  const Matrix& matrix;
  const float* x;
  float* out;
  int64_t stride, count;
  BFloat16* vectors;

  int64_t groups() const { return matrix.columns / kGroup; }
};

// Rounds 16 vectors. Columns are in the order of `dot::FourColumns`.
H2O_BFLOAT16_TARGET void round_panel(const Product& product, int64_t panel) {
  const int64_t first = panel * units::kSize, groups = product.groups();
  BFloat16* tiles = product.vectors + panel * groups * units::kTile;
  for (int64_t t = 0; t < std::min(units::kSize, product.count - first); ++t) {
    const float* x = product.x + (first + t) * product.matrix.columns;
    for (int64_t i = 0; i < product.matrix.columns; i += simd::kWidth) {
      dot::store_pairs(reinterpret_cast<int16_t*>(tiles + i / kGroup * units::kTile + t * kGroup + i % kGroup),
                       rounding::Codes(units::round(simd::load(x + i))));
    }
  }
}

// Unpacks a block of 256 columns, or `groups` groups, of 16 rows.
template <int64_t kind>
H2O_BFLOAT16_TARGET void unpack_block(const uint8_t* block, int64_t groups, BFloat16* tiles) {
  using Scales = packed::BlockScales<kind, Floats>;
  constexpr int64_t kLowerBytes = packed::lower_bytes(kind, 1), kUpperBytes = packed::upper_bytes(kind, 1);
  const uint8_t* lower = block + packed::scale_bytes(kind, groups);
  const uint8_t* upper = lower + groups * kLowerBytes;
  const Scales scales(block, groups, 0);
  for (int64_t g = 0; g < groups; ++g, tiles += units::kTile) {
    dot::Pairs pairs[kGroup / 2];
    dot::for_each_quad<kind, 1>(lower + g * kLowerBytes, upper + g * kUpperBytes,
                             [&](int64_t half, int64_t quad, int64_t, dot::Bytes bytes) {
                               const dot::FourColumns columns = dot::widen<kind>(bytes);
                               pairs[8 * half + 2 * quad] = columns.even;
                               pairs[8 * half + 2 * quad + 1] = columns.odd;
                             });
#pragma GCC unroll 16
    for (int64_t i = 0; i < kGroup / 2; ++i) {
      const int64_t half = i / (kGroup / 4);
      const Floats scale = scales.scale(g, half), offset = scales.offset(g, half);
      const simd::Ints codes = simd::Ints(pairs[i]);
      const Floats low = __builtin_convertvector(codes << 16 >> 16, Floats) * scale + offset;
      const Floats high = __builtin_convertvector(codes >> 16, Floats) * scale + offset;
      units::round_pairs(low, high, tiles + i * kGroup);
    }
  }
}

// Unpacks `groups` groups, starting at a whole block, of 32 rows; missing rows are left as they are. Prefetches those
// of the next 32.
template <int64_t kind>
void unpack(const Matrix& matrix, int64_t row, int64_t first, int64_t groups, BFloat16* tiles) {
  const int64_t offset = first / kGroupsPerBlock * packed::block_bytes(kind, kGroupsPerBlock);
  const int64_t next = units::kBlock / packed::kRows * stride_bytes(matrix);
  for (int64_t end = std::min(row + units::kBlock, matrix.rows); row < end; row += packed::kRows) {
    packed::for_each_block<kind>(tile_address(matrix, row) + offset, groups * kGroup,
                                 [&](const uint8_t* block, int64_t count, int64_t column) {
                                   simd::prefetch(block + next, packed::block_bytes(kind, count));
                                   unpack_block<kind>(block, count, tiles + column / kGroup * units::kTile);
                                 });
    tiles += groups * units::kTile;
  }
}

template <int64_t kind>
H2O_BFLOAT16_TARGET void multiply_rows(const Product& product, Range rows, BFloat16* weights) {
  const units::InUse in_use;
  const int64_t all_groups = product.groups();
  alignas(simd::kCacheLine) float products[units::kBlock * units::kBlock];
  for (int64_t first = 0; first < all_groups; first += kMaxGroups) {
    const int64_t groups = std::min(kMaxGroups, all_groups - first);
    for (int64_t row = rows.begin; row < rows.end; row += units::kBlock) {
      const int64_t rows_in_block = std::min(product.matrix.rows - row, units::kBlock);
      const float* bias = product.matrix.bias ? product.matrix.bias + row : nullptr;
      unpack<kind>(product.matrix, row, first, groups, weights);
      for (int64_t token = 0; token < product.count; token += units::kBlock) {
        const BFloat16* vectors = product.vectors + (token * all_groups + first * units::kSize) * kGroup;
        units::multiply(vectors, all_groups * units::kTile, weights, groups * units::kTile, groups,
                        product.count - token, products, units::kBlock);
        units::add_block(products, first == 0, bias, std::min(product.count - token, units::kBlock), rows_in_block,
                         product.out + token * product.stride + row, product.stride);
      }
    }
  }
}

template <int64_t kind>
void gemm(Product product, int64_t threads) {
  const int64_t panels = simd::padded(product.count, units::kBlock) / units::kSize;
  constexpr int64_t kWeights = 2 * kMaxGroups * units::kTile;
  static thread_local Buffer<BFloat16> vectors, weights;
  vectors.reserve(panels * product.groups() * units::kTile), weights.reserve(threads * kWeights);
  product.vectors = vectors.data();
  BFloat16* all_weights = weights.data();  // of this thread, for all workers
  parallel(threads, [&](const Worker& worker) {
    const Range range = worker.partition(panels);
    for (int64_t panel = range.begin; panel < range.end; ++panel) round_panel(product, panel);
    worker.barrier();
    multiply_rows<kind>(product, worker.partition(product.matrix.rows, units::kBlock),
                        all_weights + worker.index * kWeights);
  });
}

}  // namespace

void gemm_bfloat16(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads) {
  const Product product{matrix, x, out, stride, count, nullptr};
  packed::dispatch_kind(matrix.kind, [&](auto kind) { gemm<kind>(product, threads); });
}

#endif
