// Which sums of table entries as many tokens reach as are wanted.

#pragma once

#include <algorithm>
#include <cstring>

#include "memory_codes.h"
#include "simd.h"

namespace memory {

// The number of sums of a block that reach a limit.
inline int64_t count_reaching(const uint8_t* sums, int32_t limit) {
#if defined(H2O_AVX512)
  return __builtin_popcountll(_mm512_cmpge_epu8_mask(_mm512_loadu_si512(sums), _mm512_set1_epi8(char(limit))));
#else
  int64_t count = 0;
  for (int64_t i = 0; i < kBlock; ++i) count += sums[i] >= limit;
  return count;
#endif
}

// The largest sum that at least `best` of those of blocks, `stride` apart, reach.
inline int32_t reached_by(const uint8_t* sums, int64_t blocks, int64_t stride, int64_t best) {
  int32_t low = 0, high = 256;  // `best` reach `low`, fewer `high`
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    int64_t count = 0;
    for (int64_t i = 0; i < blocks; ++i) count += count_reaching(sums + i * stride, middle);
    (count >= best ? low : high) = middle;
  }
  return low;
}

// The same. Moves the blocks that matter to the front: those that reach what so many of the largest sums in the same
// place of any block do.
inline int32_t estimate_limit(uint8_t* sums, int64_t blocks, int64_t stride, int64_t best) {
  simd::Bytes largest[kBlock / simd::kWidth] = {};
  for (int64_t i = 0; i < blocks; ++i) {
    for (int64_t v = 0; v < kBlock / simd::kWidth; ++v) {
      simd::Bytes some;
      std::memcpy(&some, sums + i * stride + v * simd::kWidth, sizeof some);
      largest[v] = some > largest[v] ? some : largest[v];
    }
  }
  const uint8_t* all = reinterpret_cast<const uint8_t*>(largest);
  const int32_t minimum = best <= kBlock ? reached_by(all, 1, kBlock, best) : 0;
  int64_t count = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    if (count_reaching(sums + i * stride, minimum)) std::copy_n(sums + i * stride, kBlock, sums + count++ * stride);
  }
  return reached_by(sums, count, stride, best);
}

}  // namespace memory
