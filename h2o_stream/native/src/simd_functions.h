// Elements of SIMD vectors moved, reduced and put through functions, by what every instruction set has (simd.h).

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#include "simd.h"

namespace simd {

// Interleaves the halves of two vectors that begin at element `first`.
template <int64_t first, class Vector, size_t... i>
Vector interleave(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, (first + int64_t(i) / 2 + int64_t(i) % 2 * int64_t(sizeof...(i)))...);
}

template <class Vector, size_t... i>
std::pair<Vector, Vector> separated(Vector a, Vector b, std::index_sequence<i...>) {
  return {__builtin_shufflevector(a, b, 2 * i...), __builtin_shufflevector(a, b, 2 * i + 1 ...)};
}

// The even and the odd elements of two vectors in a row.
inline std::pair<Floats, Floats> separated(Floats a, Floats b) {
  return separated(a, b, std::make_index_sequence<kWidth>());
}

// The first and the second elements of both vectors in turn.
template <class Vector>
std::pair<Vector, Vector> interleaved(Vector a, Vector b) {
  constexpr auto kIndices = std::make_index_sequence<kWidth>();
  return {interleave<0>(a, b, kIndices), interleave<kWidth / 2>(a, b, kIndices)};
}

// Transposes a square matrix of `width` vectors in place. Each stage rotates the bits of (row, column) by one.
template <class Vector, size_t width>
[[gnu::always_inline]] inline void transpose(Vector (&rows)[width]) {
  constexpr auto kIndices = std::make_index_sequence<width>();
#pragma GCC unroll 4
  for (size_t stage = 1; stage < width; stage *= 2) {
    Vector interleaved[width];
#pragma GCC unroll 8
    for (size_t i = 0; i < width / 2; ++i) {
      interleaved[2 * i] = interleave<0>(rows[i], rows[i + width / 2], kIndices);
      interleaved[2 * i + 1] = interleave<width / 2>(rows[i], rows[i + width / 2], kIndices);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < width; ++i) rows[i] = interleaved[i];
  }
}

// The elements of two vectors whose index has this bit, taken from the other place: those of a move up, of b down; or
// those of a without it, and of b with it, in their places.
template <int64_t bit, bool crossed, class Vector, size_t... i>
Vector halves(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(
      a, b, (int64_t(i) & bit ? kWidth + int64_t(i) - crossed * bit : int64_t(i) + crossed * bit)...);
}

// Adds up the elements of each of `count` vectors that are `count` apart.
template <int64_t count, class Vector>
[[gnu::always_inline]] inline Vector sums_of_rows(Vector* rows) {
  constexpr auto kIndices = std::make_index_sequence<kWidth>();
  if constexpr (count == 1) {
    return rows[0];
  } else {
    constexpr int64_t half = count / 2;
#pragma GCC unroll 8
    for (int64_t i = 0; i < half; ++i) {
      rows[i] = halves<half, false>(rows[i], rows[i + half], kIndices) +
                halves<half, true>(rows[i], rows[i + half], kIndices);
    }
    return sums_of_rows<half>(rows);
  }
}

// Adds the elements of each of kWidth vectors. Each stage halves the number of vectors.
template <class Vector>
[[gnu::always_inline]] inline Vector sums_of_rows(const Vector* from) {
  Vector rows[kWidth];
#pragma GCC unroll 16
  for (int64_t i = 0; i < kWidth; ++i) rows[i] = from[i];
  return sums_of_rows<kWidth>(rows);
}

// Interleaves the lower or the upper halves of each 16 bytes of two vectors.
template <bool upper, class Vector, size_t... i>
Vector interleave_bytes(Vector a, Vector b, std::index_sequence<i...>) {
  return __builtin_shufflevector(a, b, int(i / 16 * 16 + 8 * upper + i % 16 / 2 + i % 2 * sizeof...(i))...);
}

// The bytes of two rows, 4 * kWidth of each, as pairs of numbers: element 4 * i + j of vector k is the pair of column
// 16 * i + 4 * k + j.
[[gnu::always_inline]] inline void load_pairs(const uint8_t* first, const uint8_t* second, Shorts (&pairs)[4]) {
  using Vector = uint8_t __attribute__((vector_size(4 * kWidth)));
  constexpr auto kIndices = std::make_index_sequence<4 * kWidth>();
  Vector a, b, zero{};
  std::memcpy(&a, first, sizeof a), std::memcpy(&b, second, sizeof b);
  const Vector low = interleave_bytes<false>(a, b, kIndices), high = interleave_bytes<true>(a, b, kIndices);
  pairs[0] = Shorts(interleave_bytes<false>(low, zero, kIndices));
  pairs[1] = Shorts(interleave_bytes<true>(low, zero, kIndices));
  pairs[2] = Shorts(interleave_bytes<false>(high, zero, kIndices));
  pairs[3] = Shorts(interleave_bytes<true>(high, zero, kIndices));
}

// Combines (by default, adds) the halves of 16, 8 or 4 elements until four are left.
template <class Vector, class Combine = std::plus<>>
auto fold_to_four(Vector v, Combine combine = {}) {
  if constexpr (sizeof v == 64) {
    return fold_to_four(combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                                __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15)),
                        combine);
  } else if constexpr (sizeof v == 32) {
    return combine(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
  } else {
    return v;
  }
}

// Combines all elements.
template <class Vector, class Combine>
float reduce(Vector v, Combine combine) {
  const auto four = fold_to_four(v, combine);
  const auto pairs = combine(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  return combine(pairs[0], pairs[1]);
}

template <class Vector>
float reduce_add(Vector v) {
  return reduce(v, std::plus<>{});
}

// Minus infinity for an empty array.
inline float reduce_max(const float* values, int64_t count) {
  Floats maxima = splat(kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats vector = load(values + i);
    maxima = vector > maxima ? vector : maxima;
  }
  float maximum = reduce(maxima, [](auto a, auto b) { return a > b ? a : b; });
  for (; i < count; ++i) maximum = std::max(maximum, values[i]);
  return maximum;
}

// Infinity for an empty array.
inline float reduce_min(const float* values, int64_t count) {
  Floats minima = splat(-kMinusInfinity);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const Floats vector = load(values + i);
    minima = vector < minima ? vector : minima;
  }
  float minimum = reduce(minima, [](auto a, auto b) { return a < b ? a : b; });
  for (; i < count; ++i) minimum = std::min(minimum, values[i]);
  return minimum;
}

// exp(x) for x <= 0, accurate to about 1 ulp; zero below -87, NaN for NaN.
inline Floats exp_nonpositive(Floats x) {
  const Ints underflow = x < -87.f;
  const Floats scaled = x * 1.44269504f, magic = splat(12582912.f);  // adding 1.5 * 2^23 rounds to an integer
  const Floats rounded = (scaled + magic) - magic;
  const Floats remainder = (x - rounded * 0.693359375f) + rounded * 2.12194440e-4f;
  Floats polynomial = splat(1.9875691500e-4f);
  for (const float coefficient :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    polynomial = polynomial * remainder + coefficient;
  }
  polynomial = polynomial * remainder * remainder + remainder + 1.f;
  const Ints exponent = (__builtin_convertvector(rounded, Ints) + 127) << 23;
  return underflow ? Floats{} : polynomial * Floats(exponent);
}

// Into all levels of the cache, or into the second one, which has room for what is read later.
template <int level = 1>
void prefetch(const void* from, int64_t bytes) {
  asm volatile("");  // GCC treats functions that only prefetch as pure and removes the calls
  for (int64_t i = 0; i < bytes; i += kCacheLine) {
    __builtin_prefetch(static_cast<const uint8_t*>(from) + i, 0, level == 1 ? 3 : 2);
  }
}

}  // namespace simd
