// GGUF block formats, one struct each.
//
// repack(rows, scales, lower, upper) reads one block of each of 16 rows and writes its groups as packed tiles. A word
// holds four columns of a row, lowest byte first. Any bytes are a valid block.

#pragma once

#include "tile_quantize.h"

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

// Dequantizes columns 4i to 4i + 3 of a group.
inline void store_values(Group& group, int64_t i, int64_t row, Words codes, Floats scale, Floats offset) {
  for (int64_t k = 0; k < 4; ++k) simd::store(to_floats(byte_of(codes, k)) * scale + offset, group[4 * i + k] + row);
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

// d, the fifth bits of 32 codes, their low nibbles; value = d * (code - 16).
struct Q5_0 {
  static constexpr int64_t kBytes = 22, kColumns = 32, kKind = kInt8;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    Column fifth[1], codes[4];
    load_columns<1>(rows, 2, fifth);
    load_columns<4>(rows, 6, codes);
    for (int64_t r = 0; r < kRows; r += kWidth) {
      const Words unset = ~words_at(fifth[0], r);
      for (uint32_t i = 0; i < kWords; ++i) {
        const Words nibbles = words_at(codes[i % 4], r) >> i / 4 * 4 & 0xf * kOnes;
        store(nibbles | spread_bits(unset >> 4 * i) * 0xf0, lower + 4 * (i * kRows + r));
      }
    }
  }
};

// d, m, the fifth bits of 32 codes, their low nibbles; value = d * code + m.
struct Q5_1 {
  static constexpr int64_t kBytes = 24, kColumns = 32, kKind = kInt8;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    uint8_t halves[4 * kRows];
    copy_halves(rows, 0, halves);
    copy_halves(rows, 2, halves + 2 * kRows);
    Column fifth[1], codes[4];
    load_columns<1>(rows, 4, fifth);
    load_columns<4>(rows, 8, codes);
    Group group;
    for (int64_t r = 0; r < kRows; r += kWidth) {
      const Floats scale = load_halves(halves + 2 * r), offset = load_halves(halves + 2 * (kRows + r));
      const Words set = words_at(fifth[0], r);
      for (uint32_t i = 0; i < kWords; ++i) {
        const Words nibbles = words_at(codes[i % 4], r) >> i / 4 * 4 & 0xf * kOnes;
        store_values(group, i, r, nibbles | spread_bits(set >> 4 * i) << 4, scale, offset);
      }
    }
    quantize_int8(group, scale_out, lower);
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

// 4-bit scale and minimum per 16 columns, 256 2-bit codes, d, dmin; value = (d * scale) * code - dmin * min.
struct Q2_K {
  static constexpr int64_t kBytes = 84, kColumns = 256, kKind = kInt8;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    Column scales[4], codes[16];
    load_columns<4>(rows, 0, scales);
    load_columns<16>(rows, 16, codes);
    uint8_t halves[4 * kRows];
    copy_halves(rows, 80, halves);
    copy_halves(rows, 82, halves + 2 * kRows);
    for (int64_t g = 0; g < 8; ++g) {
      Group group;
      for (int64_t r = 0; r < kRows; r += kWidth) {
        const Floats d = load_halves(halves + 2 * r), dmin = load_halves(halves + 2 * (kRows + r));
        for (int64_t i = 0; i < kWords; ++i) {
          const int64_t subgroup = 2 * g + i / 4;
          const Words packed_scales = byte_of(words_at(scales[subgroup / 4], r), subgroup % 4);
          const Words two_bits = words_at(codes[g / 4 * kWords + i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes;
          store_values(group, i, r, two_bits, d * to_floats(packed_scales & 0xf),
                       -(dmin * to_floats(packed_scales >> 4)));
        }
      }
      quantize_int8(group, scale_out + g * 2 * kRows, lower + g * packed::kGroup * kRows);
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

// d, dmin, scales and minima, 256 4-bit codes; value = (d * scale) * code - dmin * min.
struct Q4_K {
  static constexpr int64_t kBytes = 144, kColumns = 256, kKind = kQ4K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    copy_halves(rows, 0, scale_out);
    copy_halves(rows, 2, scale_out + 2 * kRows);
    Column columns[4 + 32];
    load_columns<4>(rows, 0, columns);
    load_columns<32>(rows, 16, columns + 4);
    const Column* codes = columns + 4;
    for (int64_t r = 0; r < kRows; r += kWidth) {
      const ScalesAndMinima six_bits(columns, r);
      for (int64_t half = 0; half < 2; ++half) {
        store_bytes(six_bits.scales[half], scale_out + (4 + 4 * half) * kRows + r);
        store_bytes(six_bits.minima[half], scale_out + (12 + 4 * half) * kRows + r);
      }
      for (int64_t g = 0; g < 8; ++g) {
        store_nibbles(lower + g * packed::kGroup / 2 * kRows, r, [&](int64_t i) {
          return words_at(codes[g / 2 * kWords + i], r) >> uint32_t(g % 2 * 4) & 0xf * kOnes;
        });
      }
    }
  }
};

// Like Q4_K, with the fifth bits of all codes before the low nibbles.
struct Q5_K {
  static constexpr int64_t kBytes = 176, kColumns = 256, kKind = kInt8;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t*) {
    uint8_t halves[4 * kRows];
    copy_halves(rows, 0, halves);
    copy_halves(rows, 2, halves + 2 * kRows);
    Column columns[4], fifth[kWords], codes[32];
    load_columns<4>(rows, 0, columns);
    load_columns<kWords>(rows, 16, fifth);
    load_columns<32>(rows, 48, codes);
    for (int64_t g = 0; g < 8; ++g) {
      Group group;
      for (int64_t r = 0; r < kRows; r += kWidth) {
        const ScalesAndMinima six_bits(columns, r);
        const Floats scale = load_halves(halves + 2 * r) * to_floats(byte_of(six_bits.scales[g / 4], g % 4));
        const Floats minimum =
            load_halves(halves + 2 * (kRows + r)) * to_floats(byte_of(six_bits.minima[g / 4], g % 4));
        for (int64_t i = 0; i < kWords; ++i) {
          const Words nibbles = words_at(codes[g / 2 * kWords + i], r) >> uint32_t(g % 2 * 4) & 0xf * kOnes;
          const Words set = words_at(fifth[i], r) >> uint32_t(g) & kOnes;
          store_values(group, i, r, nibbles | set << 4, scale, -minimum);
        }
      }
      quantize_int8(group, scale_out + g * 2 * kRows, lower + g * packed::kGroup * kRows);
    }
  }
};

// Writes the high two bits of a group's codes: bits(i) returns columns 4i to 4i + 3.
template <class Bits>
[[gnu::always_inline]] inline void store_upper(uint8_t* to, int64_t row, Bits bits) {
  for (int64_t h = 0; h < 2; ++h) {
    const int64_t i = kWords / 2 * h;
    store(bits(i) | bits(i + 1) << 2 | bits(i + 2) << 4 | bits(i + 3) << 6, to + 4 * (h * kRows + row));
  }
}

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
        store_nibbles(lower + g * packed::kGroup / 2 * kRows, r,
                      [&](int64_t i) { return words_at(nibbles[i], r) >> uint32_t(g % 4 / 2 * 4) & 0xf * kOnes; });
        store_upper(upper + g * packed::kGroup / 4 * kRows, r,
                    [&](int64_t i) { return words_at(bits[i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes; });
      }
    }
  }
};

// The third bits of 256 codes, the low two, 16 6-bit scales, d; value = (d * (scale - 32)) * (code - 4).
struct Q3_K {
  static constexpr int64_t kBytes = 110, kColumns = 256, kKind = kQ6K;

  static void repack(const Rows& rows, uint8_t* scale_out, uint8_t* lower, uint8_t* upper) {
    Column third[kWords], two[16], scales[3];
    load_columns<kWords>(rows, 0, third);
    load_columns<16>(rows, 32, two);
    load_columns<3>(rows, 96, scales);
    copy_halves(rows, 108, scale_out);
    for (int64_t r = 0; r < kRows; r += kWidth) {
      for (uint32_t i = 0; i < 4; ++i) {
        const Words nibbles = words_at(scales[i % 2], r) >> i / 2 * 4 & 0xf * kOnes;
        const Words code = nibbles | (words_at(scales[2], r) >> 2 * i & 3 * kOnes) << 4;
        const Words sign = ~code & 0x20 * kOnes;  // code - 32 as int8
        store_bytes((code & 0x1f * kOnes) | sign | sign << 1 | sign << 2, scale_out + (2 + 4 * i) * kRows + r);
      }
      for (int64_t g = 0; g < 8; ++g) {  // code + 28: 28 to 31 without the third bit, 32 to 35 with it
        const auto unset = [&](int64_t i) { return ~words_at(third[i], r) >> uint32_t(g) & kOnes; };
        store_nibbles(lower + g * packed::kGroup / 2 * kRows, r, [&](int64_t i) {
          return (words_at(two[g / 4 * kWords + i], r) >> uint32_t(g % 4 * 2) & 3 * kOnes) | unset(i) * 0xc;
        });
        store_upper(upper + g * packed::kGroup / 4 * kRows, r, [&](int64_t i) { return 2 * kOnes - unset(i); });
      }
    }
  }
};

}  // namespace gguf
