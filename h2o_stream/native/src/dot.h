// Dot products of packed codes and rounded vectors. Each SIMD lane belongs to a row.

#pragma once

#include "packed.h"
#include "simd_bytes.h"
#include "vector_group.h"

#if defined(H2O_NO_PRODUCTS)
#error "CMakeLists.txt does not list this source under `products`"
#endif

namespace dot {

using simd::Ints;

// Codes of four columns in each of `simd::kWidth` rows, and of two.
using Bytes = simd::Quads;
using simd::Pairs;

// Columns c and c + 2, and c + 1 and c + 3: splitting bytes into even and odd ones costs least.
struct FourColumns {
  Pairs even, odd;
};

// What `for_each_quad` adds to numbers, so that bytes are unsigned where products need that.
template <int64_t kind>
constexpr int32_t kBias = simd::kSignedProducts && packed::has_table(kind) ? 0 : packed::code_bias(kind);

// Moves some bits of every byte from bit `from` on to bit `to` on.
[[gnu::always_inline]] inline Bytes move_bits(Bytes bytes, int64_t bits, int64_t from, int64_t to) {
#if defined(H2O_NEON)  // bytes can be shifted; what leaves them needs no mask
  const auto all = simd::QuadBytes(bytes);
  const auto moved = from < to ? all << uint8_t(to - from) : all >> uint8_t(from - to);
  const bool whole = std::min(from, to) == 0 && std::max(from, to) + bits == 8;
  return Bytes(whole ? moved : moved & uint8_t(((1 << bits) - 1) << to));
#endif
  const uint16_t mask = uint16_t(0x0101 * ((1 << bits) - 1) << to);
  return (from < to ? bytes << uint16_t(to - from) : bytes >> uint16_t(from - to)) & mask;
}

#if defined(H2O_NEON)
// The low or the high four bits of bytes, below the upper bits of the same columns.
template <int64_t bits>
[[gnu::always_inline]] inline Bytes with_upper_bits(Bytes lower, const Bytes* upper, int64_t half, int64_t quad) {
  const int64_t from = bits == 2 ? 2 * quad : 4 * half + quad, to = 4 * half;
  const auto all = simd::QuadBytes(upper[bits == 2 ? half : 0]);
  const Bytes moved = Bytes(from < to ? all << uint8_t(to - from) : all >> uint8_t(from - to));
  const Bytes codes = half ? simd::insert_high_nibbles(moved, lower) : simd::insert_low_nibbles(moved, lower);
  const bool highest = from == 8 - bits;  // so that no other bits are above
  return highest ? codes : codes & uint16_t(0x0101 * ((16 << bits) - 1));
}
#endif

// Calls body(half, quad, row, bytes) for columns 16 * half + 4 * quad to 16 * half + 4 * quad + 3 of a group, in the
// order of memory, and `rows` registers of rows. The bytes are signed for kInt8, else unsigned with the bias of the
// kind. `lower` and `upper` are the group's low and high bits.
template <int64_t kind, int64_t rows, class Body>
[[gnu::always_inline]] inline void for_each_quad(const uint8_t* lower, const uint8_t* upper, Body body) {
  using packed::kLine;
  constexpr int64_t kLower = packed::lower_bits(kind), kUpper = packed::upper_bits(kind), kRegister = sizeof(Bytes);
  if constexpr (kind == kInt8) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < 8; ++i) {
#pragma GCC unroll 4
      for (int64_t row = 0; row < rows; ++row) {
        body(i / 4, i % 4, row, simd::load_quads(lower + i * kLine + row * kRegister));
      }
    }
    return;
  }
  Bytes high[rows][2]{};
#pragma GCC unroll 4
  for (int64_t row = 0; row < rows; ++row) {
    if constexpr (kUpper) high[row][0] = simd::load_quads(upper + row * kRegister);
    if constexpr (kUpper == 2) high[row][1] = simd::load_quads(upper + kLine + row * kRegister);
  }
  const auto with_upper = [&](int64_t half, int64_t quad, int64_t row, Bytes bytes) {
    if constexpr (kUpper == 1) bytes |= move_bits(high[row][0], 1, 4 * half + quad, kLower);
    if constexpr (kUpper == 2) bytes |= move_bits(high[row][half], 2, 2 * quad, kLower);
    if constexpr (packed::has_table(kind)) {
      bytes = simd::look_up(bytes, packed::numbers(kind), packed::code_bias(kind) - kBias<kind>);
    }
    body(half, quad, row, bytes);
  };
  constexpr int64_t kOuter = kLower == 2 ? 2 : 4;
#pragma GCC unroll 4
  for (int64_t outer = 0; outer < kOuter; ++outer) {
    Bytes loaded[rows];
#pragma GCC unroll 4
    for (int64_t row = 0; row < rows; ++row) loaded[row] = simd::load_quads(lower + outer * kLine + row * kRegister);
#if defined(H2O_NEON)
    if constexpr (kLower == 4 && kUpper) {
#pragma GCC unroll 4
      for (int64_t row = 0; row < rows; ++row) {
        body(1, outer, row, with_upper_bits<kUpper>(loaded[row], high[row], 1, outer));
        body(0, outer, row, with_upper_bits<kUpper>(loaded[row], high[row], 0, outer));
      }
      continue;
    }
#endif
#pragma GCC unroll 4
    for (int64_t inner = 0; inner < 8 / kOuter; ++inner) {
      const int64_t half = kLower == 2 ? outer : inner, quad = kLower == 2 ? inner : outer;
#pragma GCC unroll 4
      for (int64_t row = 0; row < rows; ++row) {
        with_upper(half, quad, row, move_bits(loaded[row], kLower, kLower * inner, 0));
      }
    }
  }
}

// Bytes of `for_each_quad` as signed numbers.
template <int64_t kind>
Bytes signed_bytes(Bytes bytes) {
  return Bytes(simd::QuadBytes(bytes) - uint8_t(kBias<kind>));
}

// Bytes of `for_each_quad` as signed numbers of 16 bits.
template <int64_t kind>
FourColumns widen(Bytes bytes) {
  if constexpr (kind != kInt8 && !packed::code_bias(kind)) return {Pairs(bytes & 255), Pairs(bytes >> 8)};
  const Bytes numbers = signed_bytes<kind>(bytes);
  return {Pairs(numbers << 8) >> 8, Pairs(numbers) >> 8};
}

// Sums of the products of a matrix's codes and a vector's.
template <int64_t kind>
class Accumulator {
 public:
#if defined(H2O_NEON_DOT)
  // Keeps four columns, until `sums`.
  [[gnu::always_inline]] void add(Bytes bytes, const VectorGroup& vector, int64_t column, int64_t) {
    quads_[column / 4] = bytes, vector_ = &vector, last_ = column;
  }

  // Multiplies the codes by one part of the vector's, then by the other: both sums are in one register.
  [[gnu::always_inline]] Ints sums(int32_t code_sum) const {
    constexpr int64_t kQuads = packed::kGroup / 4 / packed::scales_per_group(kind);
    const int64_t begin = last_ / 4 / kQuads * kQuads;
    Ints sums{};
#pragma GCC unroll 2
    for (int64_t part = 0; part < 2; ++part) {
      if (part == 1) sums <<= 7;
#pragma GCC unroll 8
      for (int64_t i = begin; i < begin + kQuads; ++i) {
        sums = simd::add_quad_products(sums, quads_[i], vector_->part(part), i);
      }
    }
    return kBias<kind> ? sums - kBias<kind> * code_sum : sums;
  }

 private:
  Bytes quads_[packed::kGroup / 4];
  const VectorGroup* vector_;
  int64_t last_;
#else
  // Adds the products of four columns; `call` numbers the calls.
  [[gnu::always_inline]] void add(Bytes bytes, const VectorGroup& vector, int64_t column,
                                  [[maybe_unused]] int64_t call) {
#if defined(H2O_AVX2)
    if (kind == kInt8) bytes ^= 0x8080;  // unsigned
#endif
#if defined(H2O_VNNI)
    high_ = simd::add_quad_products(high_, bytes, vector.part(0), column / 4);
    low_ = simd::add_quad_products(low_, bytes, vector.part(1), column / 4);
#elif defined(H2O_AVX2)
    // Products of column pairs are summed in 16 bits as long as they fit.
    constexpr bool kFullBytes = kind == kInt8 || kind == kIq4Nl || kind == kIq4Xs;
    constexpr int64_t kCallsPerSum = kFullBytes ? 1 : packed::scales_per_group(kind) == 2 ? 4 : 8;
    const Pairs high = simd::quad_products(bytes, vector.part(0), column / 4);
    const Pairs low = simd::quad_products(bytes, vector.part(1), column / 4);
    high_ = simd::in_register(call % kCallsPerSum ? high_ + high : high);
    low_ = simd::in_register(call % kCallsPerSum ? low_ + low : low);
    if (call % kCallsPerSum == kCallsPerSum - 1) {
      sums_ = simd::add_pairs(simd::add_pairs(sums_, high_, 128), low_, 1);
    }
#else
    const FourColumns columns = widen<kind>(bytes);
    sums_ = simd::add_pair_products(sums_, columns.even, vector.pair(column));
    sums_ = simd::add_pair_products(sums_, columns.odd, vector.pair(column + 2));
#endif
  }

  // `code_sum`: of the vector's codes that were added.
  Ints sums([[maybe_unused]] int32_t code_sum) const {
#if defined(H2O_VNNI)
    const Ints sums_ = (high_ << 7) + low_;
#endif
#if defined(H2O_AVX2)
    constexpr int32_t kAdded = kind == kInt8 ? 128 : kBias<kind>;
    return kAdded ? sums_ - kAdded * code_sum : sums_;
#else
    return sums_;
#endif
  }

 private:
#if defined(H2O_VNNI)
  Ints high_{}, low_{};
#else
#if defined(H2O_AVX2)
  Pairs high_, low_;
#endif
  Ints sums_{};
#endif
#endif
};

}  // namespace dot
