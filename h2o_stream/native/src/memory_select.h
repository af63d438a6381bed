// The largest of some numbers.

#pragma once

#include <cmath>

#include "simd.h"

namespace memory {

// The elements of a vector of floats above a threshold.
inline uint32_t passing(const float* from, float threshold) {
#if defined(H2O_AVX512)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(from), _mm512_set1_ps(threshold), _CMP_GT_OQ);
#elif defined(H2O_AVX2)
  return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(from), _mm256_set1_ps(threshold), _CMP_GT_OQ)));
#elif defined(H2O_NEON)
  const uint32x4_t lanes = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcgtq_f32(vld1q_f32(from), vdupq_n_f32(threshold)), lanes));
#else
  uint32_t lanes = 0;
  for (int64_t i = 0; i < simd::kWidth; ++i) lanes |= uint32_t(from[i] > threshold) << i;
  return lanes;
#endif
}

// Calls `visit` with the numbers of vectors and their elements above a threshold.
template <class Visit>
void for_each_passing(const float* x, int64_t count, float threshold, Visit visit) {
  for (int64_t first = 0; first < count; first += simd::kWidth) {
    uint32_t lanes = passing(x + first, threshold);
    if (count - first < simd::kWidth) lanes &= (1u << (count - first)) - 1;
    visit(first, lanes);
  }
}

// Calls `take` with the places of the `wanted` largest of some numbers, of equal ones with the first. A vector past the
// end may be read.
template <class Take>
void select_largest(const float* x, int64_t count, int64_t wanted, Take take) {
  const auto take_lanes = [&](int64_t first, uint32_t lanes) {
    for (; lanes; lanes &= lanes - 1) take(first + __builtin_ctz(lanes));
  };
  if (count <= wanted) {
    for (int64_t i = 0; i < count; ++i) take(i);
    return;
  }
  // At least `wanted` numbers are above `low`, fewer above `high`.
  float low = std::nextafter(simd::reduce_min(x, count), simd::kMinusInfinity), high = simd::reduce_max(x, count);
  for (;;) {
    const float middle = low + (high - low) / 2;
    if (!(middle > low && middle < high)) break;
    int64_t above = 0;
    for_each_passing(x, count, middle, [&](int64_t, uint32_t lanes) { above += __builtin_popcount(lanes); });
    if (above == wanted) return for_each_passing(x, count, middle, take_lanes);
    (above > wanted ? low : high) = middle;
  }
  int64_t missing = wanted;  // some of equal numbers
  for_each_passing(x, count, high, [&](int64_t, uint32_t lanes) { missing -= __builtin_popcount(lanes); });
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] > high || (x[i] > low && missing-- > 0)) take(i);
  }
}

}  // namespace memory
