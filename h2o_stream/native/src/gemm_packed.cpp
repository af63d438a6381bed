// Products of packed matrices with many vectors, such as the tokens of a prompt; limited by arithmetic.
//
// Tiles of 16 rows are unpacked to codes, some columns at a time, and multiplied from the cache by all tokens of a
// panel. Every number is the same sum, in the same order, as in matrix_packed.cpp.

#include "block_scales.h"
#include "dot_columns.h"
#include "rounding.h"
#include "simd_functions.h"
#include "tiles.h"

namespace {

using packed::kGroup;
using simd::Floats;
using simd::kWidth;

// Rows and tokens multiplied at a time: as many sums as fit into registers.
#if defined(H2O_AVX512)
constexpr int64_t kRows = 2 * packed::kRows, kTokens = 6;
#elif defined(H2O_AVX2) || defined(H2O_NEON_DOT)
constexpr int64_t kRows = packed::kRows, kTokens = 4;
#else
constexpr int64_t kRows = packed::kRows, kTokens = 2;
#endif

using dot::Factor;
using dot::kColumns;
using dot::kParts;
using dot::kTile;

constexpr int64_t kRegisters = kTile * kRows / kWidth;  // of products with `kTile` tokens
constexpr int64_t kGroupsPerBlock = packed::kBlock / kGroup;
constexpr int64_t kSteps = kGroup / kColumns;

// Groups of a tile that are unpacked at a time, and bytes of a panel of tokens: both stay in the L2 cache.
constexpr int64_t kMaxGroups = 4 * kGroupsPerBlock;
constexpr int64_t kPanelBytes = 1 << 18;

// A rounded group of `kTokens` vectors.
struct VectorGroup {
  Factor codes[kParts][kSteps][kTokens];
  float scales[kTokens], sums[2][kTokens];  // of the group, or of both halves where offsets are theirs
};

// An unpacked group of `kRows` rows.
template <int64_t kind>
struct WeightGroup {
  static constexpr bool kHasOffsets = packed::BlockScales<kind, Floats>::kHasOffsets;
  static constexpr int64_t kScales = packed::BlockScales<kind, Floats>::kScales;

  static constexpr int64_t kOffsets = packed::BlockScales<kind, Floats>::kOffsets;

  dot::Columns codes[kSteps][kRegisters];
  Floats scales[kScales][kRegisters], offsets[kOffsets][kRegisters];
};

// Products of `kRows` rows with `kTokens` vectors.
using Sums = Floats[kTokens / kTile][kRegisters];

// A product, and the rounded vectors [blocks][groups]: a block is `kTokens` vectors.
struct Product {
  const Matrix& matrix;
  const float* x;
  float* out;
  int64_t stride, count;
  VectorGroup* vectors;

  int64_t groups() const { return matrix.columns / kGroup; }
  int64_t blocks() const { return simd::padded(count, kTokens) / kTokens; }
  VectorGroup* block(int64_t index) const { return vectors + index * groups(); }
};

void round_block(const Product& product, int64_t block) {
  const int64_t first = block * kTokens, tokens = std::min(kTokens, product.count - first);
  VectorGroup* groups = product.block(block);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* x = product.x + (first + t) * product.matrix.columns;
    for (int64_t g = 0; g < product.groups(); ++g) {
      dot::Factors factors;
      const rounding::Scale scale = rounding::round_group(x + g * kGroup, [&](int64_t i, rounding::Codes rounded) {
        factors.store(i, rounded);
      });
      groups[g].scales[t] = scale.scale, groups[g].sums[0][t] = scale.sum;
      if (product.matrix.kind == kQ2K) {
        groups[g].sums[0][t] = scale.half_sum(0), groups[g].sums[1][t] = scale.half_sum(1);
      }
      for (int64_t part = 0; part < kParts; ++part) {
        for (int64_t i = 0; i < kSteps; ++i) {
          std::memcpy(&groups[g].codes[part][i][t], factors.part(part) + kColumns * i, sizeof(Factor));
        }
      }
    }
  }
}

// Unpacks a block of 256 columns, or `groups` groups, of the tile that starts at register `first` of `out`.
template <int64_t kind>
void unpack_block(const uint8_t* block, int64_t groups, int64_t first, WeightGroup<kind>* out) {
  constexpr int64_t kLowerBytes = packed::lower_bytes(kind, 1), kUpperBytes = packed::upper_bytes(kind, 1);
  const uint8_t* lower = block + packed::scale_bytes(kind, groups);
  const uint8_t* upper = lower + groups * kLowerBytes;
  for (int64_t r = first; r < first + kTile * packed::kRows / kWidth; r += kTile) {
    const int64_t row = (r - first) / kTile * kWidth, offset = 4 * row;
    const packed::BlockScales<kind, Floats> scales(block, groups, row);
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t i = 0; i < WeightGroup<kind>::kScales; ++i) dot::spread(scales.scale(g, i), &out[g].scales[i][r]);
      for (int64_t i = 0; i < WeightGroup<kind>::kOffsets; ++i) {
        if (WeightGroup<kind>::kHasOffsets) dot::spread(scales.offset(g, i), &out[g].offsets[i][r]);
      }
      dot::unpack_group<kind>(lower + g * kLowerBytes + offset, upper + g * kUpperBytes + offset,
                              [&](int64_t step) { return &out[g].codes[step][r]; });
    }
  }
}

// Adds the products with the first `tokens` vectors of a block.
template <int64_t kind, int64_t tokens>
void add_products(const WeightGroup<kind>* weights, const VectorGroup* vectors, int64_t groups, Sums& total) {
  using Group = WeightGroup<kind>;
  constexpr int64_t kTiles = tokens / kTile;
  Floats sums[kTiles][kRegisters];
  std::memcpy(&sums, &total, sizeof sums);
  for (int64_t g = 0; g < groups; ++g) {
    const Group& group = weights[g];
    const VectorGroup& vector = vectors[g];
#pragma GCC unroll 2
    for (int64_t i = 0; i < Group::kScales; ++i) {
      simd::Ints dots[kTiles][kRegisters] = {};
      constexpr int64_t kStepsPerScale = kSteps / Group::kScales;
#pragma GCC unroll 2
      for (int64_t part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
        for (int64_t step = i * kStepsPerScale; step < (i + 1) * kStepsPerScale; ++step) {
#pragma GCC unroll 12
          for (int64_t t = 0; t < kTiles; ++t) {
#pragma GCC unroll 8
            for (int64_t r = 0; r < kRegisters; ++r) {
              dots[t][r] = dot::multiply_columns(dots[t][r], group.codes[step][r], vector.codes[part][step], t);
            }
          }
        }
        if (part + 1 < kParts) {
          for (auto& tile : dots) {
            for (simd::Ints& products : tile) products <<= 7;
          }
        }
      }
#pragma GCC unroll 12
      for (int64_t t = 0; t < kTiles; ++t) {
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRegisters; ++r) {
          sums[t][r] += __builtin_convertvector(dots[t][r], Floats) * (group.scales[i][r] * dot::of_tile(vector.scales, t));
        }
      }
    }
    if constexpr (Group::kHasOffsets) {
#pragma GCC unroll 12
      for (int64_t t = 0; t < kTiles; ++t) {
#pragma GCC unroll 8
        for (int64_t r = 0; r < kRegisters; ++r) {
#pragma GCC unroll 2
          for (int64_t i = 0; i < Group::kOffsets; ++i) sums[t][r] += group.offsets[i][r] * dot::of_tile(vector.sums[i], t);
        }
      }
    }
  }
  std::memcpy(&total, &sums, sizeof sums);
}

// Writes the products of a block of tokens with `kRows` rows, plus the bias.
void write_products(const Product& product, int64_t block, int64_t row, const Sums& sums) {
  const int64_t rows = std::min(product.matrix.rows - row, kRows), first = block * kTokens;
  constexpr int64_t kVectors = kRows / kWidth;
  Floats bias[kVectors] = {};
  if (product.matrix.bias) std::memcpy(bias, product.matrix.bias + row, rows * sizeof(float));
  for (int64_t t = 0; t < std::min(kTokens, product.count - first); ++t) {
    Floats products[kVectors];
    for (int64_t r = 0; r < kVectors; ++r) products[r] = dot::of_vector(sums[t / kTile], r, t) + bias[r];
    float* to = product.out + (first + t) * product.stride + row;
    if (rows == kRows) {
      std::memcpy(to, products, sizeof products);
    } else {
      std::memcpy(to, products, rows * sizeof(float));
    }
  }
}

// Unpacks `groups` groups, starting at a whole block, of the tiles of `kRows` rows; missing tiles are left as they are.
// Prefetches the next ones.
template <int64_t kind>
void unpack(const Matrix& matrix, int64_t row, int64_t first, int64_t groups, WeightGroup<kind>* weights) {
  const int64_t offset = first / kGroupsPerBlock * packed::block_bytes(kind, kGroupsPerBlock);
  const int64_t next = kRows / packed::kRows * stride_bytes(matrix);
  for (int64_t tile = 0; tile < kRows && row + tile < matrix.rows; tile += packed::kRows) {
    packed::for_each_block<kind>(tile_address(matrix, row + tile) + offset, groups * kGroup,
                                 [&](const uint8_t* block, int64_t count, int64_t column) {
                                   simd::prefetch(block + next, packed::block_bytes(kind, count));
                                   unpack_block<kind>(block, count, tile / kWidth, weights + column / kGroup);
                                 });
  }
}

// Multiplies `kRows` rows by the tokens of some blocks.
template <int64_t kind>
void multiply_rows(const Product& product, int64_t row, Range blocks, WeightGroup<kind>* weights, Sums* sums) {
  std::memset(static_cast<void*>(sums), 0, blocks.size() * sizeof(Sums));
  for (int64_t first = 0; first < product.groups(); first += kMaxGroups) {
    const int64_t groups = std::min(kMaxGroups, product.groups() - first);
    unpack<kind>(product.matrix, row, first, groups, weights);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const bool half = product.count - block * kTokens <= kTokens / 2;
      const auto add = half ? add_products<kind, kTokens / 2> : add_products<kind, kTokens>;
      add(weights, product.block(block) + first, groups, sums[block - blocks.begin]);
    }
  }
  for (int64_t block = blocks.begin; block < blocks.end; ++block) {
    write_products(product, block, row, sums[block - blocks.begin]);
  }
}

template <int64_t kind>
void gemm(Product product, int64_t threads) {
  const int64_t groups = std::min(kMaxGroups, product.groups()), total = product.blocks();
  const int64_t panel = std::clamp<int64_t>(kPanelBytes / (groups * int64_t(sizeof(VectorGroup))), 1, total);
  static thread_local Buffer<VectorGroup> vectors;
  static thread_local Buffer<WeightGroup<kind>> weights;
  static thread_local Buffer<Sums> sums;
  vectors.reserve(total * product.groups()), weights.reserve(threads * groups), sums.reserve(threads * panel);
  product.vectors = vectors.data();
  WeightGroup<kind>* all_weights = weights.data();  // of this thread, for all workers
  Sums* all_sums = sums.data();
  parallel(threads, [&](const Worker& worker) {
    const Range blocks = worker.partition(total), rows = worker.partition(product.matrix.rows, kRows);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) round_block(product, block);
    worker.barrier();
    for (int64_t first = 0; first < total; first += panel) {
      for (int64_t row = rows.begin; row < rows.end; row += kRows) {
        multiply_rows<kind>(product, row, {first, std::min(first + panel, total)}, all_weights + worker.index * groups,
                            all_sums + worker.index * panel);
      }
    }
  });
}

}  // namespace

void gemm_packed(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride, int64_t threads) {
  const Product product{matrix, x, out, stride, count, nullptr};
  packed::dispatch_kind(matrix.kind, [&](auto kind) { gemm<kind>(product, threads); });
}
