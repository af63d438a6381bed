#include "bfloat16_units.h"

#if defined(H2O_BFLOAT16_UNITS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define H2O_AMX_TARGET [[gnu::target("amx-tile,amx-bf16")]]

namespace bfloat16_units {
namespace {

enum class Units { kNone, kDotProducts, kTiles };

// The system call that lets a process use a part of the processor's state, and the number of the tiles.
constexpr long kRequestPermission = 0x1023, kTileData = 18;

// Of all eight tiles: kSize rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {kSize, kSize, kSize, kSize, kSize, kSize, kSize, kSize};
};

Units find() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return Units::kNone;  // AVX512-BF16
  const bool has_amx = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & 1u << 22) && (d & 1u << 24);
  return has_amx && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? Units::kTiles : Units::kDotProducts;
}

Units units() {
  static const Units found = find();
  return found;
}

H2O_AMX_TARGET void load_config() {
  static constexpr TileConfig config;  // in memory: GCC does not know that all of it is read
  _tile_loadconfig(&config);
}

H2O_AMX_TARGET void release() { _tile_release(); }

H2O_AMX_TARGET void multiply_tiles(const simd::BFloat16* a, int64_t a_next, const simd::BFloat16* b, int64_t b_next,
                                   int64_t steps, float* c, int64_t stride) {
  constexpr int64_t kRowBytes = 64;
  asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < steps; ++i, a += kTile, b += kTile) {
    _tile_loadd(4, a, kRowBytes);
    _tile_loadd(6, b, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + b_next, kRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + a_next, kRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, c, stride * sizeof(float));
  _tile_stored(1, c + kSize, stride * sizeof(float));
  _tile_stored(2, c + kSize * stride, stride * sizeof(float));
  _tile_stored(3, c + kSize * stride + kSize, stride * sizeof(float));
}

// Rows of C whose sums are in registers at a time.
constexpr int64_t kRows = 8;

// kRows rows of C.
H2O_BFLOAT16_TARGET void multiply_rows(const simd::BFloat16* a, const simd::BFloat16* b, int64_t b_next, int64_t steps,
                                       float* c, int64_t stride) {
  __m512 sums[kRows][2] = {};
  for (int64_t i = 0; i < steps; ++i, a += kTile, b += kTile) {
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kDepth / 2; ++pair) {
      const __m512bh low = __m512bh(_mm512_load_si512(b + pair * kBlock));
      const __m512bh high = __m512bh(_mm512_load_si512(b + b_next + pair * kBlock));
#pragma GCC unroll 8
      for (int64_t row = 0; row < kRows; ++row) {
        int32_t both;
        std::memcpy(&both, a + row * kDepth + 2 * pair, sizeof both);
        const __m512bh numbers = __m512bh(_mm512_set1_epi32(both));
        sums[row][0] = _mm512_dpbf16_ps(sums[row][0], low, numbers);
        sums[row][1] = _mm512_dpbf16_ps(sums[row][1], high, numbers);
      }
    }
  }
#pragma GCC unroll 8
  for (int64_t row = 0; row < kRows; ++row) {
    _mm512_storeu_ps(c + row * stride, sums[row][0]);
    _mm512_storeu_ps(c + row * stride + kSize, sums[row][1]);
  }
}

}  // namespace

bool available() { return units() != Units::kNone; }

InUse::InUse() {
  if (units() == Units::kTiles) load_config();
}

InUse::~InUse() {
  if (units() == Units::kTiles) release();
}

void multiply(const simd::BFloat16* a, int64_t a_next, const simd::BFloat16* b, int64_t b_next, int64_t steps,
              int64_t rows, float* c, int64_t stride) {
  if (units() == Units::kTiles) return multiply_tiles(a, a_next, b, b_next, steps, c, stride);
  for (int64_t row = 0; row < std::min(rows, kBlock); row += kRows) {
    multiply_rows(a + row / kSize * a_next + row % kSize * kDepth, b, b_next, steps, c + row * stride, stride);
  }
}

}  // namespace bfloat16_units

#else

bool bfloat16_units::available() { return false; }

#endif
