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

#if defined(H2O_STREAM_AVX2) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define H2O_STREAM_AVX512
#endif

namespace {

constexpr int64_t kGroup = 32;

// How many numbers of a group lie in a byte.
enum Packing : int64_t { kEightBits = 1, kFourBits = 2 };

// Scales and offsets of groups are handled so many at once, with zeros behind the last.
constexpr int64_t kTogether = 8;

int64_t padded(int64_t groups, int64_t together = kTogether) { return (groups + together - 1) / together * together; }

// Bytes that are multiplied at once.
#ifdef H2O_STREAM_AVX512
constexpr int64_t kBytes = 64;
#else
constexpr int64_t kBytes = 32;
#endif

// Sums of the products of every four bytes, as whole numbers and not.
using Whole = int32_t __attribute__((vector_size(kBytes)));
using Sums = float __attribute__((vector_size(kBytes)));

constexpr int64_t kSums = kBytes / 4;

Sums load(const float* from) {
  Sums some;
  std::memcpy(&some, from, sizeof some);
  return some;
}

// How many bytes ahead a matrix is fetched from memory.
constexpr int64_t kAhead = 4096;

#ifdef H2O_STREAM_AVX2

__m256 eight_halves(const uint16_t* halves) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

void from_halves(const uint16_t* halves, float* numbers, int64_t count) {
  for (int64_t i = 0; i < count; i += kTogether) _mm256_storeu_ps(numbers + i, eight_halves(halves + i));
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

#endif

#ifdef H2O_STREAM_AVX512

// The next scales or offsets, one for each sum; `kTogether` of them if there are no more.
Sums next_halves(const uint16_t* halves, int64_t count) {
  if (count < kSums) return Sums(_mm512_zextps256_ps512(eight_halves(halves)));
  return Sums(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))));
}

Sums permuted(Sums some, Whole places) { return Sums(_mm512_permutexvar_ps(__m512i(places), __m512(some))); }

using Bytes = __m512i;

Bytes load(const void* from) { return _mm512_loadu_si512(from); }

Bytes load_some(const void* from, int64_t bytes) { return _mm512_maskz_loadu_epi8((uint64_t(1) << bytes) - 1, from); }

Bytes lower_halves(Bytes bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }

Bytes upper_halves(Bytes bytes) { return lower_halves(_mm512_srli_epi16(bytes, 4)); }

Whole multiplied_halves(Bytes bytes, Bytes lower, Bytes upper) {
  const Bytes sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), lower_halves(bytes), lower);
  return Whole(_mm512_dpbusd_epi32(sums, upper_halves(bytes), upper));
}

Whole multiplied(Bytes one, Bytes other) {
  const Bytes none = _mm512_setzero_si512();
  const Bytes turned = _mm512_mask_sub_epi8(other, _mm512_movepi8_mask(one), none, other);
  return Whole(_mm512_dpbusd_epi32(none, _mm512_abs_epi8(one), turned));
}

#elif defined(H2O_STREAM_AVX2)

Sums next_halves(const uint16_t* halves, int64_t) { return Sums(eight_halves(halves)); }

Sums permuted(Sums some, Whole places) { return Sums(_mm256_permutevar8x32_ps(__m256(some), __m256i(places))); }

using Bytes = __m256i;

Bytes load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

Bytes load_some(const void* from, int64_t) {  // half of them: no less is multiplied
  return _mm256_zextsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

Bytes lower_halves(Bytes bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }

Bytes upper_halves(Bytes bytes) { return lower_halves(_mm256_srli_epi16(bytes, 4)); }

Whole of_pairs(Bytes sums) { return Whole(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }

Whole multiplied_halves(Bytes bytes, Bytes lower, Bytes upper) {
  return of_pairs(_mm256_add_epi16(_mm256_maddubs_epi16(lower_halves(bytes), lower),
                                   _mm256_maddubs_epi16(upper_halves(bytes), upper)));
}

Whole multiplied(Bytes one, Bytes other) {
  return of_pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(one), _mm256_sign_epi8(other, one)));
}

#else

Sums next_halves(const uint16_t* halves, int64_t) {
  float numbers[kSums];
  from_halves(halves, numbers, kSums);
  return load(numbers);
}

using Bytes = int8_t __attribute__((vector_size(kBytes)));

Bytes load_some(const void* from, int64_t bytes) {
  Bytes some{};
  std::memcpy(&some, from, bytes);
  return some;
}

Bytes load(const void* from) { return load_some(from, kBytes); }

Whole multiplied(Bytes one, Bytes other) {
  using Products = int16_t __attribute__((vector_size(2 * kBytes)));
  using Pairs = int32_t __attribute__((vector_size(2 * kBytes)));
  const auto products = Pairs(__builtin_convertvector(one, Products) * __builtin_convertvector(other, Products));
  const Pairs sums = (products << 16 >> 16) + (products >> 16);
  return __builtin_shufflevector(sums, sums, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(sums, sums, 4, 5, 6, 7, 12, 13, 14, 15);
}

Whole multiplied_halves(Bytes bytes, Bytes lower, Bytes upper) {
  return multiplied(bytes & 15, lower) + multiplied(bytes >> 4 & 15, upper);
}

#endif

// The factors of some groups from `first` on, each for all sums of its group.
template <int64_t groups>
Sums spread(Sums factors, int64_t first) {
#ifdef H2O_STREAM_AVX2
  Whole places{};
  for (int64_t i = 0; i < kSums; ++i) places[i] = int32_t(i * groups / kSums);
  return permuted(factors, places + int32_t(first));
#else
  float each[kSums];
  std::memcpy(each, &factors, sizeof each);
  Sums some;
  for (int64_t i = 0; i < kSums; ++i) some[i] = each[first + i * groups / kSums];
  return some;
#endif
}

// How a matrix is read: so many groups at once.
template <Packing packing>
struct Step {
  static constexpr int64_t kGroupBytes = kGroup / packing, kGroups = kBytes / kGroupBytes;

  // Where a number of a vector is put, so that it meets its weight.
  static int64_t place(int64_t i) {
    if (packing == kEightBits) return i;
    const int64_t group = i / kGroup, half = i % kGroup / (kGroup / 2);
    return (group / kGroups * 2 + half) * kBytes + group % kGroups * kGroupBytes + i % (kGroup / 2);
  }

  // Adds the products of the groups from `first` on, of those that the factors are of.
  static Sums add(Sums sums, Bytes bytes, const int8_t* vector, Sums factors, int64_t first) {
    const Whole products = packing == kEightBits ? multiplied(bytes, load(vector))
                                                 : multiplied_halves(bytes, load(vector), load(vector + kBytes));
    return sums + spread<kGroups>(factors, first) * __builtin_convertvector(products, Sums);
  }
};

// Vectors in 8 bits, in the order in which a matrix is read; scales and sums of the groups of each are padded.
template <Packing packing>
struct Rounded {
  int64_t stride, most;
  std::vector<int8_t> codes;
  std::vector<float> scales, sums;

  Rounded(const float* numbers, int64_t count, int64_t groups)
      : stride(padded(groups, Step<packing>::kGroups) * kGroup),
        most(padded(groups, kSums)),
        codes(count * stride),
        scales(count * most),
        sums(scales.size()) {
    for (int64_t v = 0; v < count; ++v) {
      for (int64_t g = 0; g < groups; ++g, numbers += kGroup) {
        const int64_t own = v * most + g;
        round(numbers, codes.data() + v * stride, g, scales[own], sums[own]);
      }
    }
  }

  static void round(const float* numbers, int8_t* codes, int64_t group, float& scale, float& sum) {
    int32_t bits[kGroup], most_bits = 0, total = 0;
    std::memcpy(bits, numbers, sizeof bits);
    for (int64_t i = 0; i < kGroup; ++i) most_bits = std::max(most_bits, bits[i] & 0x7fffffff);
    float most;
    std::memcpy(&most, &most_bits, sizeof most);
    const float inverse = most > 0 ? 127 / most : 0;
    for (int64_t i = 0; i < kGroup; ++i) bits[i] = int32_t(std::nearbyint(numbers[i] * inverse));
    for (int64_t i = 0; i < kGroup; ++i) total += bits[i];
    for (int64_t half = 0; half < kGroup; half += kGroup / 2) {
      int8_t* to = codes + Step<packing>::place(group * kGroup + half);
      for (int64_t i = 0; i < kGroup / 2; ++i) to[i] = int8_t(bits[half + i]);
    }
    scale = most / 127;
    sum = scale * float(total);
  }
};

template <Packing packing>
void multiply(const float* x, const uint8_t* codes, const uint16_t* grid, float* y, int64_t count, int64_t rows,
              int64_t columns, int64_t threads) {
  using Own = Step<packing>;
  const int64_t groups = columns / kGroup, row_bytes = columns / packing, most = padded(groups);
  const Rounded<packing> vectors(x, count, groups);
  constexpr int64_t kSteps = kSums / Own::kGroups;
#pragma omp parallel for num_threads(int(threads)) schedule(static)
  for (int64_t row = 0; row < rows; ++row) {
    const uint8_t* bytes = codes + row * row_bytes;
    const uint16_t *scales = grid + row * packing * most, *offsets = scales + most;
    for (int64_t v = 0; v < count; ++v) {
      const int8_t* vector = vectors.codes.data() + v * vectors.stride;
      const float *own_scales = vectors.scales.data() + v * vectors.most;
      const float *own_sums = vectors.sums.data() + v * vectors.most;
      Sums sums[2] = {}, rest{};  // so that no sum waits for the one before
      for (int64_t g = 0; g < groups; g += kSums) {
        const Sums factors = next_halves(scales + g, most - g) * load(own_scales + g);
        if (packing == kFourBits) rest += next_halves(offsets + g, most - g) * load(own_sums + g);
        const auto add = [&](int64_t step, Bytes some) {
          const int64_t first = step * Own::kGroups;
          sums[step % 2] = Own::add(sums[step % 2], some, vector + (g + first) * kGroup, factors, first);
        };
        const auto at = [&](int64_t step) {
          const uint8_t* some = bytes + (g + step * Own::kGroups) * Own::kGroupBytes;
          __builtin_prefetch(some + kAhead);
          return some;
        };
        if (g + kSums <= groups) {
#pragma GCC unroll 8
          for (int64_t step = 0; step < kSteps; ++step) add(step, load(at(step)));
        } else {
          int64_t step = 0;
          for (; g + (step + 1) * Own::kGroups <= groups; ++step) add(step, load(at(step)));
          const int64_t left = (groups - g - step * Own::kGroups) * Own::kGroupBytes;
          if (left) add(step, load_some(at(step), left));
        }
      }
      y[v * rows + row] = lanes::total(sums[0] + sums[1] + rest);
    }
  }
}

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
  const auto* bytes = static_cast<const uint8_t*>(codes);
  if (packing == kFourBits) {
    multiply<kFourBits>(x, bytes, grid, y, count, rows, columns, threads);
  } else {
    multiply<kEightBits>(x, bytes, grid, y, count, rows, columns, threads);
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
