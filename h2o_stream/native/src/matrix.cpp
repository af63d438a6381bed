#include "matrix.h"

#include "tiles.h"

namespace {

using packed::kGroup;

// Bytes of a matrix that are worth fetching while a thread waits.
constexpr int64_t kFetched = 4096;

// A thread that has less to read than this is not worth waking.
constexpr int64_t kBytesOfThread = 32768;

// Rounds a group; gives its scale, the sum of its numbers, and the sums of each half of its codes.
void round_group(const float* from, int8_t* codes, float& scale, float& sum, int32_t* code_sums) {
  using simd::Floats;
  using simd::Ints;
  using Bytes = int8_t __attribute__((vector_size(simd::kWidth)));
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
  Ints totals[2] = {};
  for (int64_t i = 0; i < kParts; ++i) {
    using Unsigned = uint32_t __attribute__((vector_size(4 * simd::kWidth)));  // NaN is no number to count with
    const Unsigned whole = Unsigned(numbers[i] * inverse + magic) - Unsigned(magic);  // 1.5 * 2^23 rounds to integers
    const Bytes bytes = __builtin_convertvector(Ints(whole), Bytes);
    std::memcpy(codes + i * simd::kWidth, &bytes, sizeof bytes);
    totals[2 * i / kParts] += __builtin_convertvector(bytes, Ints);
  }
  scale = largest / 127;
  for (int64_t i = 0; i < 2; ++i) code_sums[i] = int32_t(simd::total(__builtin_convertvector(totals[i], Floats)));
  sum = scale * float(code_sums[0] + code_sums[1]);
}

int64_t useful_threads(const Matrix& matrix, int64_t threads) {
  const int64_t tiles = simd::padded(matrix.rows, packed::kRows) / packed::kRows;
  const int64_t bytes = (packed::is_packed(matrix.kind) ? tiles : matrix.rows) * stride_bytes(matrix);
  return std::max<int64_t>(1, std::min(threads, bytes / kBytesOfThread));
}

}  // namespace

Vectors::Vectors(int64_t count, int64_t size) { reserve(count, size); }

void Vectors::reserve(int64_t count, int64_t size) {
  const int64_t groups = simd::padded(size, kGroup) / kGroup;
  count_ = count, size_ = size;
  stride_ = simd::padded(size, 128);  // of numbers and codes: whole registers, and whole lines of the cache
  group_stride_ = groups;
  if (numbers_.size() < count * stride_) {
    numbers_ = Buffer<float>(count * stride_);
    codes_ = Buffer<int8_t>(count * stride_);
  }
  if (scales_.size() < count * group_stride_) {
    scales_ = Buffer<float>(count * group_stride_);
    sums_ = Buffer<float>(count * group_stride_);
    code_sums_ = Buffer<int32_t>(2 * count * group_stride_);
  }
}

void Vectors::round(int64_t vector, Range numbers) const {
  const int64_t base = vector * group_stride_;
  for (int64_t group = numbers.begin / kGroup; group < numbers.end / kGroup; ++group) {
    const int64_t place = base + group;
    round_group(at(vector) + group * kGroup, codes_.at(vector * stride_ + group * kGroup), scales_[place], sums_[place],
                code_sums_.at(2 * place));
  }
}

int64_t stride_bytes(const Matrix& matrix) {
  if (matrix.kind == kFloat32) return 4 * matrix.columns;
  if (matrix.kind == kBFloat16) return 2 * matrix.columns;
  return packed::tile_bytes(matrix.kind, matrix.columns);
}

void prefetch(const Matrix& matrix, Range rows) {
  if (rows.begin < rows.end) simd::prefetch(address(matrix, rows.begin), kFetched);
}

void multiply(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out, int64_t stride) {
  if (packed::is_packed(matrix.kind)) {
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
      if (packed::is_packed(matrix->kind)) vectors.round(v, {0, columns});
    }
    worker.barrier();
    multiply(*matrix, vectors, count, worker.share(matrix->rows, packed::kRows), y, matrix->rows);
  });
}

}  // extern "C"
