#include "matrix.h"

#include "dot.h"
#include "tiles.h"

namespace {

using packed::kGroup;
using packed::kTile;

// Bytes of a matrix that are worth fetching while a thread waits.
constexpr int64_t kFetched = 4096;

// A thread that has less to read than this is not worth waking.
constexpr int64_t kBytesOfThread = 32768;

// Rounds a group; gives its scale and the sum of its numbers.
template <dot::Packing packing>
void round_group(const float* from, int64_t group, int8_t* codes, float& scale, float& sum) {
  using simd::Floats;
  using simd::Ints;
  constexpr int64_t kParts = kGroup / simd::kWidth;
  Floats numbers[kParts];
  Ints top{};
  for (int64_t i = 0; i < kParts; ++i) {
    numbers[i] = simd::load(from + i * simd::kWidth);
    const Ints bits = Ints(numbers[i]) & 0x7fffffff;  // integers are in the order of the numbers, NaN above all
    top = bits > top ? bits : top;
  }
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < simd::kWidth; ++i) largest_bits = std::max(largest_bits, int32_t(top[i]));
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const Floats inverse = simd::splat(largest > 1e-36f ? 127 / largest : 0), magic = simd::splat(12582912.f);
  using Unsigned = uint32_t __attribute__((vector_size(4 * simd::kWidth)));  // NaN is no number to count with
  Unsigned total{};
  alignas(16) int8_t rounded[kGroup];
  for (int64_t i = 0; i < kParts; ++i) {
    const Unsigned whole = Unsigned(numbers[i] * inverse + magic) - Unsigned(magic);  // 1.5 * 2^23 rounds to integers
    total += whole;
    using Bytes = int8_t __attribute__((vector_size(simd::kWidth)));
    const Bytes bytes = __builtin_convertvector(Ints(whole), Bytes);
    std::memcpy(rounded + i * simd::kWidth, &bytes, sizeof bytes);
  }
  constexpr int64_t kHalf = kGroup / 2;
  for (int64_t i = 0; i < kGroup; i += kHalf) {
    std::memcpy(codes + dot::place<packing>(group * kGroup + i), rounded + i, kHalf);
  }
  scale = largest / 127;
  sum = scale * simd::total(__builtin_convertvector(Ints(total), Floats));
}

template <class Number>
void unpack_row(const uint8_t* codes, const uint8_t* grid, int64_t groups, int64_t packing, Number* row) {
  const auto half = [&](int64_t place) {
    simd::Half number;
    std::memcpy(&number, grid + 2 * place, sizeof number);
    return simd::to_float(number);
  };
  for (int64_t group = 0; group < groups; ++group, row += kGroup) {
    const float scale = half(group), offset = packing == dot::kFourBits ? half(groups + group) : 0;
    const auto put = [&](int64_t i, int code) { simd::from_float(float(code) * scale + offset, row[i]); };
    if (packing == dot::kFourBits) {
      for (int64_t i = 0; i < kGroup / 2; ++i) put(i, codes[i] & 15);
      for (int64_t i = 0; i < kGroup / 2; ++i) put(i + kGroup / 2, codes[i] >> 4);
    } else {
      for (int64_t i = 0; i < kGroup; ++i) put(i, int8_t(codes[i]));
    }
    codes += kGroup / packing;
  }
}

template <class Number>
void unpack(const Matrix& matrix, Number* out, int64_t threads) {
  const int64_t packing = matrix.kind == kInt4 ? dot::kFourBits : dot::kEightBits;
  const int64_t groups = matrix.columns / kGroup, row_bytes = matrix.columns / packing;
  parallel(threads, [&](const Worker& worker) {
    const Range rows = worker.share(matrix.rows, kTile);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      const uint8_t *tile = address(matrix, row), *codes = tile + row % kTile * row_bytes;
      const uint8_t* grid = tile + kTile * row_bytes + row % kTile * 2 * packing * groups;
      unpack_row(codes, grid, groups, packing, out + row * matrix.columns);
    }
  });
}

int64_t useful_threads(const Matrix& matrix, int64_t threads) {
  const int64_t tiles = (matrix.rows + kTile - 1) / kTile;
  const int64_t bytes = is_packed(matrix.kind) ? tiles * stride_bytes(matrix) : matrix.rows * stride_bytes(matrix);
  return std::max<int64_t>(1, std::min(threads, bytes / kBytesOfThread));
}

}  // namespace

Vectors::Vectors(int64_t count, int64_t size) { reserve(count, size); }

void Vectors::reserve(int64_t count, int64_t size) {
  const int64_t groups = simd::padded(size, kGroup) / kGroup;
  count_ = count, size_ = size;
  stride_ = simd::padded(size, 128);  // of numbers and codes: whole registers, and whole lines of the cache
  group_stride_ = simd::padded(groups, dot::kSums);
  if (numbers_.size() < count * stride_) {
    numbers_ = Buffer<float>(count * stride_);
    codes_ = Buffer<int8_t>(count * stride_);
  }
  if (scales_.size() < count * group_stride_) {
    scales_ = Buffer<float>(count * group_stride_);
    sums_ = Buffer<float>(count * group_stride_);
  }
}

void Vectors::round(int64_t kind, int64_t vector, Range groups) const {
  if (!is_packed(kind)) return;
  float *scales = scales_.at(vector * group_stride_), *sums = sums_.at(vector * group_stride_);
  int8_t* codes = codes_.at(vector * stride_);
  for (int64_t group = groups.begin; group < groups.end; ++group) {
    const float* numbers = at(vector) + group * kGroup;
    if (kind == kInt4) {
      round_group<dot::kFourBits>(numbers, group, codes, scales[group], sums[group]);
    } else {
      round_group<dot::kEightBits>(numbers, group, codes, scales[group], sums[group]);
    }
  }
}

int64_t stride_bytes(const Matrix& matrix) {
  if (matrix.kind == kFloat32) return 4 * matrix.columns;
  if (matrix.kind == kBFloat16) return 2 * matrix.columns;
  const int64_t packing = matrix.kind == kInt4 ? dot::kFourBits : dot::kEightBits;
  const int64_t row_bytes = matrix.columns / packing + 2 * packing * (matrix.columns / kGroup);
  return simd::padded(kTile * row_bytes, 32);
}

void prefetch(const Matrix& matrix, Range rows) {
  if (rows.begin < rows.end) simd::prefetch(address(matrix, rows.begin), kFetched);
}

void multiply(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out, int64_t stride) {
  if (is_packed(matrix.kind)) {
    multiply_packed(matrix, vectors, count, rows, out, stride);
  } else {
    multiply_dense(matrix, vectors, count, rows, out, stride);
  }
}

extern "C" {

// y [count][rows] = x [count][columns] times the matrix, transposed, plus its bias.
void h2o_multiply(const Matrix* matrix, const float* x, float* y, int64_t count, int64_t threads) {
  static thread_local Vectors scratch;
  const Vectors& vectors = scratch;
  scratch.reserve(count, matrix->columns);
  parallel(useful_threads(*matrix, threads), [&](const Worker& worker) {
    const int64_t columns = matrix->columns;
    const Range own = worker.share(count);
    for (int64_t v = own.begin; v < own.end; ++v) {
      std::memcpy(vectors.at(v), x + v * columns, columns * sizeof(float));
      vectors.round(matrix->kind, v, {0, columns / kGroup});
    }
    worker.barrier();
    multiply(*matrix, vectors, count, worker.share(matrix->rows, kTile), y, matrix->rows);
  });
}

// The numbers of a packed matrix, [rows][columns], in float32 or bfloat16.
void h2o_unpack(const Matrix* matrix, void* out, int64_t in_bfloat16, int64_t threads) {
  if (in_bfloat16) {
    unpack(*matrix, static_cast<simd::BFloat16*>(out), threads);
  } else {
    unpack(*matrix, static_cast<float*>(out), threads);
  }
}

}  // extern "C"
