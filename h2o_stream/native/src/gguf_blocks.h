// GGUF block formats, one struct each.
//
// repack(rows, scales, lower, upper) reads one block of each of 16 rows and writes its groups as packed tiles. A word
// holds four columns of a row, lowest byte first. Any bytes are a valid block.

#pragma once

#include "tile_writer.h"

namespace gguf {

using namespace tiles;

constexpr int64_t kWords = packed::kGroup / 4;  // per group
constexpr uint32_t kOnes = 0x01010101;          // broadcasts a byte to every byte of a word

inline Words words_at(const Column& column, int64_t row) { return load<Words>(column + row); }

// Moves bit i of four bits to byte i of a word.
inline Words spread_bits(Words bits) { return (bits & 0xf) * 0x00204081 & kOnes; }

// Writes low nibbles: nibbles(i) returns columns 4i to 4i + 3.
template <class Nibbles>
[[gnu::always_inline]] inline void store_nibbles(uint8_t* to, int64_t row, Nibbles nibbles) {
  for (int64_t q = 0; q < kWords / 2; ++q) {
    store(nibbles(q) | nibbles(q + kWords / 2) << 4, to + 4 * (q * kRows + row));
  }
}

// d, 32 4-bit codes; value = d * (code - 8).
struct Q4_0 {
  static constexpr int64_t kBytes = 18, kColumns = 32, kKind = kInt4;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    for (int64_t r = 0; r < kRows; r += kWidth)
      store_halves(load_halves(scale_out + 2 * r) * -8.f, scale_out + 2 * (kRows + r));
    Column codes[4];
    load_columns<4>(rows, 2, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

// An exponent e of 8 bits, 32 4-bit codes; value = 2^(e - 128) * number. Scales are clamped to those of 16 bits.
struct MxFp4 {
  static constexpr int64_t kBytes = 17, kColumns = 32, kKind = kMxFp4;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    constexpr int64_t kBias = 128 - 15, kMaxExponent = 30, kFractionBits = 10;
    for (int64_t r = 0; r < kRows; ++r) {
      const int64_t exponent = std::min(*rows[r] - kBias, kMaxExponent), shift = kFractionBits - 1 + exponent;
      const uint16_t scale = exponent > 0 ? exponent << kFractionBits : shift >= 0 ? 1 << shift : 0;
      store(scale, scale_out + 2 * r);
    }
    Column codes[4];
    load_columns<4>(rows, 1, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

// d, m, 32 4-bit codes; value = d * code + m.
struct Q4_1 {
  static constexpr int64_t kBytes = 20, kColumns = 32, kKind = kInt4;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    copy_halves(rows, 2, scale_out + 2 * kRows);
    Column codes[4];
    load_columns<4>(rows, 4, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

// Writes the high bits of a group's codes: bits(i) returns those of columns 4i to 4i + 3.
template <class Bits>
[[gnu::always_inline]] inline void store_high_bits(uint8_t* to, int64_t row, Bits bits) {
  Words all = bits(0);
  for (uint32_t i = 1; i < kWords; ++i) all |= bits(i) << i;
  store(all, to + 4 * row);
}

// Writes the low nibbles and the fifth bits of a group of 32 codes, that begin at these bytes of a row's block.
inline void repack_five_bits(const Rows& rows, int64_t fifth_at, int64_t nibbles_at, uint8_t* lower, uint8_t* upper) {
  Column fifth[1], codes[4];
  load_columns<1>(rows, fifth_at, fifth);
  load_columns<4>(rows, nibbles_at, codes);
  std::memcpy(lower, codes, sizeof codes);
  for (int64_t r = 0; r < kRows; r += kWidth) {
    const Words set = words_at(fifth[0], r);
    store_high_bits(upper, r, [&](uint32_t i) { return spread_bits(set >> 4 * i); });
  }
}

// d, the fifth bits of 32 codes, their low nibbles; value = d * (code - 16).
struct Q5_0 {
  static constexpr int64_t kBytes = 22, kColumns = 32, kKind = kInt5;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    copy_halves(rows, 0, scale_out);
    for (int64_t r = 0; r < kRows; r += kWidth)
      store_halves(load_halves(scale_out + 2 * r) * -16.f, scale_out + 2 * (kRows + r));
    repack_five_bits(rows, 2, 6, lower, upper);
  }
};

// d, m, the fifth bits of 32 codes, their low nibbles; value = d * code + m.
struct Q5_1 {
  static constexpr int64_t kBytes = 24, kColumns = 32, kKind = kInt5;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    copy_halves(rows, 0, scale_out);
    copy_halves(rows, 2, scale_out + 2 * kRows);
    repack_five_bits(rows, 4, 8, lower, upper);
  }
};

// d, 32 8-bit codes; value = d * code.
struct Q8_0 {
  static constexpr int64_t kBytes = 34, kColumns = 32, kKind = kInt8;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    Column codes[kWords];
    load_columns<kWords>(rows, 2, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

// Writes two bits of a group's codes: bits(i) returns those of columns 4i to 4i + 3.
template <class Bits>
[[gnu::always_inline]] inline void store_two_bits(uint8_t* to, int64_t row, Bits bits) {
  for (int64_t h = 0; h < 2; ++h) {
    const int64_t i = kWords / 2 * h;
    store(bits(i) | bits(i + 1) << 2 | bits(i + 2) << 4 | bits(i + 3) << 6, to + 4 * (h * kRows + row));
  }
}

// 4-bit scale and minimum per 16 columns, 256 2-bit codes, d, dmin; value = (d * scale) * code - dmin * min.
struct Q2_K {
  static constexpr int64_t kBytes = 84, kColumns = 256, kKind = kQ2K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    Column scales[4], codes[16];
    load_columns<4>(rows, 0, scales);
    load_columns<16>(rows, 16, codes);
    copy_halves(rows, 80, scale_out);
    copy_halves(rows, 82, scale_out + 2 * kRows);
    for (int64_t r = 0; r < kRows; r += kWidth) {
      for (int64_t i = 0; i < 4; ++i) store_bytes(words_at(scales[i], r), scale_out + (4 + 4 * i) * kRows + r);
      for (int64_t g = 0; g < 8; ++g) {
        store_two_bits(lower + packed::lower_bytes(kKind, g), r, [&](int64_t i) {
          return words_at(codes[g / 4 * kWords + i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes;
        });
      }
    }
  }
};

// The 6-bit scales and minima of the eight groups of Q4_K and Q5_K.
struct ScalesAndMinima {
  Words scales[2], minima[2];  // four groups per word

  // Stored in the second to fourth word of a block.
  ScalesAndMinima(const Column* columns, int64_t row) {
    const Words a = words_at(columns[1], row), b = words_at(columns[2], row), c = words_at(columns[3], row);
    scales[0] = a & 0x3f * kOnes;
    minima[0] = b & 0x3f * kOnes;
    scales[1] = (c & 0xf * kOnes) | (a >> 6 & 3 * kOnes) << 4;
    minima[1] = (c >> 4 & 0xf * kOnes) | (b >> 6 & 3 * kOnes) << 4;
  }
};

// Writes d, dmin, the scales and minima, and the low nibbles of Q4_K and Q5_K, where those begin at `nibbles_at`.
inline void repack_nibbles_and_scales(const Rows& rows, int64_t nibbles_at, uint8_t* scale_out, uint8_t* lower) {
  copy_halves(rows, 0, scale_out);
  copy_halves(rows, 2, scale_out + 2 * kRows);
  Column columns[4], codes[32];
  load_columns<4>(rows, 0, columns);
  load_columns<32>(rows, nibbles_at, codes);
  for (int64_t r = 0; r < kRows; r += kWidth) {
    const ScalesAndMinima six_bits(columns, r);
    for (int64_t half = 0; half < 2; ++half) {
      store_bytes(six_bits.scales[half], scale_out + (4 + 4 * half) * kRows + r);
      store_bytes(six_bits.minima[half], scale_out + (12 + 4 * half) * kRows + r);
    }
    for (int64_t g = 0; g < 8; ++g) {
      store_nibbles(lower + packed::lower_bytes(kQ4K, g), r, [&](int64_t i) {
        return words_at(codes[g / 2 * kWords + i], r) >> uint32_t(g % 2 * 4) & 0xf * kOnes;
      });
    }
  }
}

// d, dmin, scales and minima, 256 4-bit codes; value = (d * scale) * code - dmin * min.
struct Q4_K {
  static constexpr int64_t kBytes = 144, kColumns = 256, kKind = kQ4K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    repack_nibbles_and_scales(rows, 16, scale_out, lower);
  }
};

// Writes the high bits of eight groups: bit g of a byte is that of group g.
inline void repack_high_bits(const Rows& rows, int64_t from, uint8_t* upper) {
  Column high[kWords];
  load_columns<kWords>(rows, from, high);
  for (int64_t r = 0; r < kRows; r += kWidth) {
    for (uint32_t g = 0; g < 8; ++g) {
      store_high_bits(upper + g * packed::kLine, r, [&](uint32_t i) { return words_at(high[i], r) >> g & kOnes; });
    }
  }
}

// Like Q4_K, with the fifth bits of all codes before the low nibbles.
struct Q5_K {
  static constexpr int64_t kBytes = 176, kColumns = 256, kKind = kQ5K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    repack_nibbles_and_scales(rows, 48, scale_out, lower);
    repack_high_bits(rows, 16, upper);
  }
};

// 256 codes, low four bits and high two, an int8 scale per 16 columns, d; value = (d * scale) * (code - 32).
struct Q6_K {
  static constexpr int64_t kBytes = 210, kColumns = 256, kKind = kQ6K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    Column four[32], two[16], scales[4];
    load_columns<32>(rows, 0, four);
    load_columns<16>(rows, 128, two);
    load_columns<4>(rows, 192, scales);
    copy_halves(rows, 208, scale_out);
    for (int64_t r = 0; r < kRows; r += kWidth) {
      for (int64_t i = 0; i < 4; ++i) store_bytes(words_at(scales[i], r), scale_out + (2 + 4 * i) * kRows + r);
      for (int64_t g = 0; g < 8; ++g) {
        const Column* nibbles = four + (g / 4 * 2 + g % 2) * kWords;
        const Column* bits = two + g / 4 * kWords;
        store_nibbles(lower + packed::lower_bytes(kKind, g), r,
                      [&](int64_t i) { return words_at(nibbles[i], r) >> uint32_t(g % 4 / 2 * 4) & 0xf * kOnes; });
        store_two_bits(upper + packed::upper_bytes(kKind, g), r,
                    [&](int64_t i) { return words_at(bits[i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes; });
      }
    }
  }
};

// The third bits of 256 codes, the low two, 16 6-bit scales, d; value = (d * (scale - 32)) * (code - 4).
struct Q3_K {
  static constexpr int64_t kBytes = 110, kColumns = 256, kKind = kQ3K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    Column two[16], scales[3];
    load_columns<16>(rows, 32, two);
    load_columns<3>(rows, 96, scales);
    copy_halves(rows, 108, scale_out);
    repack_high_bits(rows, 0, upper);
    for (int64_t r = 0; r < kRows; r += kWidth) {
      for (uint32_t i = 0; i < 4; ++i) {
        const Words nibbles = words_at(scales[i % 2], r) >> i / 2 * 4 & 0xf * kOnes;
        const Words code = nibbles | (words_at(scales[2], r) >> 2 * i & 3 * kOnes) << 4;
        const Words sign = ~code & 0x20 * kOnes;  // code - 32 as int8
        store_bytes((code & 0x1f * kOnes) | sign | sign << 1 | sign << 2, scale_out + (2 + 4 * i) * kRows + r);
      }
      for (int64_t g = 0; g < 8; ++g) {
        store_two_bits(lower + packed::lower_bytes(kKind, g), r, [&](int64_t i) {
          return words_at(two[g / 4 * kWords + i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes;
        });
      }
    }
  }
};

// d, 32 4-bit codes; value = d * number.
struct Iq4Nl {
  static constexpr int64_t kBytes = 18, kColumns = 32, kKind = kIq4Nl;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    Column codes[4];
    load_columns<4>(rows, 2, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

// d, the high two bits of eight 6-bit scales, their low nibbles, 256 4-bit codes; value = (d * (scale - 32)) * number.
struct Iq4Xs {
  static constexpr int64_t kBytes = 136, kColumns = 256, kKind = kIq4Xs;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    for (int64_t r = 0; r < kRows; ++r) {
      const uint16_t high = load<uint16_t>(rows[r] + 2);
      for (int64_t g = 0; g < 8; ++g) {
        const int64_t low = rows[r][4 + g / 2] >> g % 2 * 4 & 15;
        scale_out[(2 + g) * kRows + r] = uint8_t((low | (high >> 2 * g & 3) << 4) - 32);
      }
    }
    Column codes[32];
    load_columns<32>(rows, 8, codes);
    std::memcpy(lower, codes, sizeof codes);
  }
};

}  // namespace gguf
