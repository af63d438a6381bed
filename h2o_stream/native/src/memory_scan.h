// The scan of codes: sums of table entries, for 64 tokens and some queries at a time.

#pragma once

#include "memory.h"
#include "memory_codes.h"
#include "simd.h"

namespace memory {

// Compares blocks of codes with `queries` queries, by their tables. `kBytes` are those of a code, or 0 if they are not
// known to the compiler, which otherwise keeps the tables in registers where there are enough.
template <int64_t queries, int64_t kBytes>
class Scanner {
 public:
  static constexpr int64_t kQueries = queries;

  // Limits of sums are at most 255.
  Scanner(const Table* tables, const int32_t* limits, int64_t bytes)
      : tables_(tables), limits_(limits), bytes_(kBytes ? kBytes : bytes) {
#if defined(H2O_AVX512)
    for (int64_t q = 0; q < queries; ++q) {
      for (int64_t group = 0; group < 2 * this->bytes(); ++group) {
        vectors_[q][group] =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables[q].bytes[group])));
      }
      limit_vectors_[q] = _mm512_set1_epi8(char(limits[q]));
    }
#endif
  }

  // Finds the tokens of a block whose sums reach the limits, for each query. The sums [queries][kBlock] are written if
  // there are any such tokens.
  [[gnu::always_inline]] void scan(const uint8_t* codes, uint8_t* sums, uint64_t* tokens) const {
#if defined(H2O_AVX512)
    const __m512i four = _mm512_set1_epi8(15);
    __m512i added[queries];
    for (int64_t i = 0; i < bytes(); ++i) {
      const __m512i both = _mm512_loadu_si512(codes + i * kBlock);
      const __m512i low = _mm512_and_si512(both, four), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), four);
      for (int64_t q = 0; q < queries; ++q) {
        const __m512i sum = _mm512_add_epi8(_mm512_shuffle_epi8(vectors_[q][2 * i], low),
                                            _mm512_shuffle_epi8(vectors_[q][2 * i + 1], high));
        added[q] = i ? _mm512_add_epi8(added[q], sum) : sum;
      }
    }
    for (int64_t q = 0; q < queries; ++q) {
      tokens[q] = _mm512_cmpge_epu8_mask(added[q], limit_vectors_[q]);
      if (tokens[q]) _mm512_storeu_si512(sums + q * kBlock, added[q]);
    }
#elif defined(H2O_AVX2)
    const __m256i four = _mm256_set1_epi8(15);
    const auto table = [&](int64_t q, int64_t group) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tables_[q].bytes[group])));
    };
    for (int64_t half = 0; half < kBlock; half += 32) {
      __m256i added[queries];
      for (int64_t i = 0; i < bytes(); ++i) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i * kBlock + half));
        const __m256i low = _mm256_and_si256(both, four), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), four);
        for (int64_t q = 0; q < queries; ++q) {
          const __m256i sum = _mm256_add_epi8(_mm256_shuffle_epi8(table(q, 2 * i), low),
                                              _mm256_shuffle_epi8(table(q, 2 * i + 1), high));
          added[q] = i ? _mm256_add_epi8(added[q], sum) : sum;
        }
      }
      for (int64_t q = 0; q < queries; ++q) {
        const __m256i limit = _mm256_set1_epi8(char(limits_[q]));
        const __m256i reach = _mm256_cmpeq_epi8(_mm256_max_epu8(added[q], limit), added[q]);
        const uint64_t lanes = uint64_t(uint32_t(_mm256_movemask_epi8(reach))) << half;
        tokens[q] = half ? tokens[q] | lanes : lanes;
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + q * kBlock + half), added[q]);
      }
    }
#elif defined(H2O_NEON)
    constexpr int64_t kParts = kBlock / 16;
    uint8x16_t added[queries][kParts];
    for (int64_t i = 0; i < bytes(); ++i) {
      uint8x16_t low[kParts], high[kParts];
      for (int64_t part = 0; part < kParts; ++part) {
        const uint8x16_t both = vld1q_u8(codes + i * kBlock + 16 * part);
        low[part] = vandq_u8(both, vdupq_n_u8(15)), high[part] = vshrq_n_u8(both, 4);
      }
      for (int64_t q = 0; q < queries; ++q) {
        const uint8x16_t first = vld1q_u8(tables_[q].bytes[2 * i]), second = vld1q_u8(tables_[q].bytes[2 * i + 1]);
        for (int64_t part = 0; part < kParts; ++part) {
          const uint8x16_t sum = vaddq_u8(vqtbl1q_u8(first, low[part]), vqtbl1q_u8(second, high[part]));
          added[q][part] = i ? vaddq_u8(added[q][part], sum) : sum;
        }
      }
    }
    for (int64_t q = 0; q < queries; ++q) {
      const uint8x16_t limit = vdupq_n_u8(uint8_t(limits_[q])), bits = vreinterpretq_u8_u64(vdupq_n_u64(kBitOfLane));
      uint8x16_t reach[kParts];
      for (int64_t part = 0; part < kParts; ++part) {
        vst1q_u8(sums + q * kBlock + 16 * part, added[q][part]);
        reach[part] = vandq_u8(vcgeq_u8(added[q][part], limit), bits);
      }
      const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(reach[0], reach[1]), vpaddq_u8(reach[2], reach[3]));
      tokens[q] = vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
    }
#else
    for (int64_t q = 0; q < queries; ++q) {
      uint8_t* added = sums + q * kBlock;
      std::fill_n(added, kBlock, uint8_t(0));
      for (int64_t i = 0; i < bytes(); ++i) {
        const uint8_t *low = tables_[q].bytes[2 * i], *high = tables_[q].bytes[2 * i + 1];
        for (int64_t token = 0; token < kBlock; ++token) {
          const uint8_t code = codes[i * kBlock + token];
          added[token] = uint8_t(added[token] + low[code & 15] + high[code >> 4]);
        }
      }
      tokens[q] = 0;
      for (int64_t token = 0; token < kBlock; ++token) tokens[q] |= uint64_t(added[token] >= limits_[q]) << token;
    }
#endif
  }

 private:
  static constexpr uint64_t kBitOfLane = 0x8040201008040201;

  int64_t bytes() const { return kBytes ? kBytes : bytes_; }

  const Table* tables_;
  const int32_t* limits_;
  int64_t bytes_;
#if defined(H2O_AVX512)
  __m512i vectors_[queries][kBytes ? 2 * kBytes : kMaxGroups], limit_vectors_[queries];
#endif
};

// Calls a function with a scanner.
template <class Function>
void with_scanner(const Table* tables, const int32_t* limits, int64_t queries, int64_t bytes, Function function) {
  with_constant(queries, [&](auto constant) {
    if (bytes == 4) return function(Scanner<constant, 4>(tables, limits, bytes));
    if (bytes == 8) return function(Scanner<constant, 8>(tables, limits, bytes));
    function(Scanner<constant, 0>(tables, limits, bytes));
  });
}

}  // namespace memory
