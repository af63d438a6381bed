// The scan of codes: sums of table entries, for 64 tokens and some queries at a time.

#pragma once

#include "memory.h"
#include "memory_codes.h"
#include "simd.h"

namespace memory {

// Queries that a block of codes is loaded for together.
constexpr int64_t kTogether = 4;

// Finds the tokens of a block whose sums reach `limits`, at most 255, for each of `queries` queries. Their sums
// [queries][kBlock] are written if there are any.
template <int64_t queries>
void scan_block(const uint8_t* codes, int64_t bytes, const Table* tables, const int32_t* limits, uint8_t* sums,
                uint64_t* tokens) {
#if defined(H2O_AVX512)
  const __m512i four = _mm512_set1_epi8(15);
  const auto table = [&](int64_t q, int64_t group) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables[q].bytes[group])));
  };
  __m512i added[queries];
  for (int64_t i = 0; i < bytes; ++i) {
    const __m512i both = _mm512_loadu_si512(codes + i * kBlock);
    const __m512i low = _mm512_and_si512(both, four), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), four);
    for (int64_t q = 0; q < queries; ++q) {
      const __m512i a = _mm512_shuffle_epi8(table(q, 2 * i), low), b = _mm512_shuffle_epi8(table(q, 2 * i + 1), high);
      const __m512i sum = _mm512_add_epi8(a, b);
      added[q] = i ? _mm512_add_epi8(added[q], sum) : sum;
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    tokens[q] = _mm512_cmpge_epu8_mask(added[q], _mm512_set1_epi8(char(limits[q])));
    if (tokens[q]) _mm512_storeu_si512(sums + q * kBlock, added[q]);
  }
#elif defined(H2O_AVX2)
  const __m256i four = _mm256_set1_epi8(15);
  const auto table = [&](int64_t q, int64_t group) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables[q].bytes[group])));
  };
  for (int64_t half = 0; half < kBlock; half += 32) {
    __m256i added[queries];
    for (int64_t i = 0; i < bytes; ++i) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i * kBlock + half));
      const __m256i low = _mm256_and_si256(both, four), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), four);
      for (int64_t q = 0; q < queries; ++q) {
        const __m256i a = _mm256_shuffle_epi8(table(q, 2 * i), low), b = _mm256_shuffle_epi8(table(q, 2 * i + 1), high);
        const __m256i sum = _mm256_add_epi8(a, b);
        added[q] = i ? _mm256_add_epi8(added[q], sum) : sum;
      }
    }
    for (int64_t q = 0; q < queries; ++q) {
      const __m256i reach = _mm256_cmpeq_epi8(_mm256_max_epu8(added[q], _mm256_set1_epi8(char(limits[q]))), added[q]);
      const uint64_t lanes = uint64_t(uint32_t(_mm256_movemask_epi8(reach))) << half;
      tokens[q] = half ? tokens[q] | lanes : lanes;
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + q * kBlock + half), added[q]);
    }
  }
#else
  for (int64_t q = 0; q < queries; ++q) {
    uint8_t* added = sums + q * kBlock;
    std::fill_n(added, kBlock, uint8_t(0));
    for (int64_t i = 0; i < bytes; ++i) {
      const uint8_t *low = tables[q].bytes[2 * i], *high = tables[q].bytes[2 * i + 1];
      for (int64_t token = 0; token < kBlock; ++token) {
        const uint8_t code = codes[i * kBlock + token];
        added[token] = uint8_t(added[token] + low[code & 15] + high[code >> 4]);
      }
    }
    tokens[q] = 0;
    for (int64_t token = 0; token < kBlock; ++token) tokens[q] |= uint64_t(added[token] >= limits[q]) << token;
  }
#endif
}

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

}  // namespace memory
