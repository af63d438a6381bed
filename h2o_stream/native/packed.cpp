// Matrices in 8 or 4 bits times vectors.
//
// Every 32 numbers of a row share a scale in half precision, and in 4 bits an offset, as in GGUF's Q8_0 and Q4_1. The
// vectors are rounded to 8 bits with a scale for every 32 of their numbers, so that the inner loop is one of integers.

#include "lanes.h"

#include <vector>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define H2O_STREAM_AVX2
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kGroup = 32;

// How many numbers of a group lie in a byte.
enum Packing : int64_t { kEightBits = 1, kFourBits = 2 };

// Scales and offsets of groups are handled so many at once, with zeros behind the last.
constexpr int64_t kTogether = 8;

int64_t padded(int64_t groups) { return (groups + kTogether - 1) / kTogether * kTogether; }

#ifdef H2O_STREAM_AVX2

void from_halves(const uint16_t* halves, float* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += kTogether) {
    const __m128i some = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
    _mm256_storeu_ps(numbers + i, _mm256_cvtph_ps(some));
  }
}

// The sum of products of two groups, in eight parts.
using Sums = __m256;
using Group = __m256i;

Group load(const int8_t* codes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)); }

// 16 bytes, the first half of the group in their lower halves.
Group load_halves(const uint8_t* codes) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
  return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}

// Adds factor * (unsigned times signed numbers).
Sums add_product(Sums sums, Group positive, Group other, float factor) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  const __m256i products = _mm256_dpbusd_epi32(_mm256_setzero_si256(), positive, other);
#else
  const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(positive, other), _mm256_set1_epi16(1));
#endif
  return _mm256_fmadd_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(products), sums);
}

Sums add_signed_product(Sums sums, Group one, Group other, float factor) {
  return add_product(sums, _mm256_abs_epi8(one), _mm256_sign_epi8(other, one), factor);
}

float total(Sums sums) {
  float parts[8];
  _mm256_storeu_ps(parts, sums);
  return ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
}

#else

float from_half(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  float value;
  std::memcpy(&value, &magnitude, sizeof value);
  value *= 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void from_halves(const uint16_t* halves, float* numbers, int64_t count) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = from_half(halves[i]);
}

using Sums = float;

struct Group {
  int16_t numbers[kGroup];
};

Group load(const int8_t* codes) {
  Group group;
  std::copy(codes, codes + kGroup, group.numbers);
  return group;
}

Group load_halves(const uint8_t* codes) {
  Group group;
  for (int64_t i = 0; i < kGroup / 2; ++i) {
    group.numbers[i] = codes[i] & 15;
    group.numbers[i + kGroup / 2] = codes[i] >> 4;
  }
  return group;
}

Sums add_product(Sums sums, Group one, Group other, float factor) {
  int32_t products = 0;
  for (int64_t i = 0; i < kGroup; ++i) products += int32_t(one.numbers[i]) * other.numbers[i];
  return sums + factor * float(products);
}

Sums add_signed_product(Sums sums, Group one, Group other, float factor) {
  return add_product(sums, one, other, factor);
}

float total(Sums sums) { return sums; }

#endif

void multiply(const float* __restrict one, const float* __restrict other, float* __restrict products, int64_t count) {
  for (int64_t g = 0; g < count; g += kTogether) {
    for (int64_t i = 0; i < kTogether; ++i) products[g + i] = one[g + i] * other[g + i];
  }
}

float dot(const float* one, const float* other, int64_t count) {
  float parts[kTogether] = {};
  for (int64_t g = 0; g < count; g += kTogether) {
    for (int64_t i = 0; i < kTogether; ++i) parts[i] += one[g + i] * other[g + i];
  }
  return ((parts[0] + parts[4]) + (parts[1] + parts[5])) + ((parts[2] + parts[6]) + (parts[3] + parts[7]));
}

// Vectors in 8 bits; scales and sums of the groups of each are padded.
struct Rounded {
  std::vector<int8_t> codes;
  std::vector<float> scales, sums;

  Rounded(const float* numbers, int64_t count, int64_t groups)
      : codes(count * groups * kGroup), scales(count * padded(groups)), sums(scales.size()) {
    int8_t* code = codes.data();
    for (int64_t v = 0; v < count; ++v) {
      for (int64_t g = v * padded(groups); g < v * padded(groups) + groups; ++g, numbers += kGroup, code += kGroup) {
        round(numbers, code, scales[g], sums[g]);
      }
    }
  }

  static void round(const float* numbers, int8_t* codes, float& scale, float& sum) {
    int32_t bits[kGroup], most_bits = 0, total = 0;
    std::memcpy(bits, numbers, sizeof bits);
    for (int64_t i = 0; i < kGroup; ++i) most_bits = std::max(most_bits, bits[i] & 0x7fffffff);
    float most;
    std::memcpy(&most, &most_bits, sizeof most);
    const float inverse = most > 0 ? 127 / most : 0;
    for (int64_t i = 0; i < kGroup; ++i) bits[i] = int32_t(std::nearbyint(numbers[i] * inverse));
    for (int64_t i = 0; i < kGroup; ++i) total += bits[i];
    for (int64_t i = 0; i < kGroup; ++i) codes[i] = int8_t(bits[i]);
    scale = most / 127;
    sum = scale * float(total);
  }
};

template <class Number>
void unpack(const void* codes, const uint16_t* grid, Number* matrix, int64_t rows, int64_t columns, int64_t packing,
            int64_t threads) {
  const int64_t groups = columns / kGroup, row_bytes = columns / packing, most = padded(groups);
#pragma omp parallel num_threads(int(threads))
  {
    std::vector<float> both(2 * most);
    const float *scales = both.data(), *offsets = scales + most;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const auto* bytes = static_cast<const uint8_t*>(codes) + row * row_bytes;
      from_halves(grid + row * packing * most, both.data(), packing * most);
      for (int64_t g = 0; g < groups; ++g) {
        Number* numbers = matrix + row * columns + g * kGroup;
        const float scale = scales[g], offset = packing == kFourBits ? offsets[g] : 0;
        const auto put = [&](int64_t i, int code) { lanes::put(float(code) * scale + offset, numbers[i]); };
        if (packing == kFourBits) {
          const uint8_t* group = bytes + g * kGroup / 2;
          for (int64_t i = 0; i < kGroup / 2; ++i) put(i, group[i] & 15);
          for (int64_t i = 0; i < kGroup / 2; ++i) put(i + kGroup / 2, group[i] >> 4);
        } else {
          const auto* group = reinterpret_cast<const int8_t*>(bytes) + g * kGroup;
          for (int64_t i = 0; i < kGroup; ++i) put(i, group[i]);
        }
      }
    }
  }
}

}  // namespace

extern "C" {

// y[count][rows] = x[count][columns] times W'.
//
// codes: [rows][columns / packing] bytes; grid: [rows][packing][columns / 32, padded] halves, scales
// and in 4 bits offsets.
void h2o_stream_multiply_packed(const float* x, const void* codes, const uint16_t* grid, float* y, int64_t count,
                                int64_t rows, int64_t columns, int64_t packing, int64_t threads) {
  const int64_t groups = columns / kGroup, row_bytes = columns / packing, most = padded(groups);
  const Rounded vectors(x, count, groups);
#pragma omp parallel num_threads(int(threads))
  {
    std::vector<float> numbers(3 * most);
    float *scales = numbers.data(), *offsets = scales + most, *factors = offsets + most;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const auto* bytes = static_cast<const uint8_t*>(codes) + row * row_bytes;
      from_halves(grid + row * packing * most, scales, packing * most);
      for (int64_t v = 0; v < count; ++v) {
        const int8_t* vector = vectors.codes.data() + v * columns;
        multiply(scales, vectors.scales.data() + v * most, factors, most);
        const auto add = [&](Sums sums, int64_t g) {
          const Group other = load(vector + g * kGroup);
          if (packing == kFourBits) return add_product(sums, load_halves(bytes + g * kGroup / 2), other, factors[g]);
          return add_signed_product(sums, load(reinterpret_cast<const int8_t*>(bytes) + g * kGroup), other, factors[g]);
        };
        Sums even{}, odd{};  // so that no sum waits for the one before
        for (int64_t g = 0; g + 1 < groups; g += 2) even = add(even, g), odd = add(odd, g + 1);
        if (groups % 2) even = add(even, groups - 1);
        const float rest = packing == kFourBits ? dot(offsets, vectors.sums.data() + v * most, most) : 0;
        y[v * rows + row] = total(even + odd) + rest;
      }
    }
  }
}

// The matrix itself, [rows][columns], in float32 or bfloat16.
void h2o_stream_unpack(const void* codes, const uint16_t* grid, void* matrix, int64_t rows, int64_t columns,
                       int64_t packing, int64_t in_bfloat16, int64_t threads) {
  if (in_bfloat16) {
    unpack(codes, grid, static_cast<lanes::BFloat16*>(matrix), rows, columns, packing, threads);
  } else {
    unpack(codes, grid, static_cast<float*>(matrix), rows, columns, packing, threads);
  }
}

}  // extern "C"
