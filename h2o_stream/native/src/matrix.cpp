#include "matrix.h"

#include "tiles.h"

namespace {

using packed::kGroup;

// Bytes of the next matrix to prefetch before a barrier.
constexpr int64_t kPrefetchBytes = 4096;

// With less to read per thread, waking the thread costs more than it saves.
constexpr int64_t kMinBytesPerThread = 32768;

// Quantizes a group; returns its scale, its sum, and the code sums of its halves.
void quantize_group(const float* from, int8_t* codes, float& scale, float& sum, int32_t* code_sums) {
  using simd::Floats;
  using simd::Ints;
  constexpr int64_t kVectors = kGroup / simd::kWidth;
  Floats numbers[kVectors];
  Ints maximum{};
  for (int64_t i = 0; i < kVectors; ++i) {
    numbers[i] = simd::load(from + i * simd::kWidth);
    const Ints bits = Ints(numbers[i]) & 0x7fffffff;  // ordered like the magnitudes, NaN above all
    maximum = bits > maximum ? bits : maximum;
  }
  int32_t largest_bits = 0;
  for (int64_t i = 0; i < simd::kWidth; ++i) largest_bits = std::max(largest_bits, int32_t(maximum[i]));
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const Floats inverse = simd::splat(largest > 1e-36f ? 127 / largest : 0), magic = simd::splat(12582912.f);
  Ints totals[2] = {};
  for (int64_t i = 0; i < kVectors; ++i) {
    // adding 1.5 * 2^23 rounds to integers; unsigned because of NaN
    const simd::Words rounded = simd::Words(numbers[i] * inverse + magic) - simd::Words(magic);
    const auto bytes = __builtin_convertvector(Ints(rounded), simd::SignedBytes);
    std::memcpy(codes + i * simd::kWidth, &bytes, sizeof bytes);
    totals[2 * i / kVectors] += __builtin_convertvector(bytes, Ints);
  }
  scale = largest / 127;
  for (int64_t i = 0; i < 2; ++i) code_sums[i] = int32_t(simd::reduce_add(__builtin_convertvector(totals[i], Floats)));
  sum = scale * float(code_sums[0] + code_sums[1]);
}

int64_t useful_threads(const Matrix& matrix, int64_t threads) {
  const int64_t tiles = simd::padded(matrix.rows, packed::kRows) / packed::kRows;
  const int64_t bytes = (packed::is_packed(matrix.kind) ? tiles : matrix.rows) * stride_bytes(matrix);
  return std::max<int64_t>(1, std::min(threads, bytes / kMinBytesPerThread));
}

}  // namespace

Vectors::Vectors(int64_t count, int64_t size) { reserve(count, size); }

void Vectors::reserve(int64_t count, int64_t size) {
  const int64_t groups = simd::padded(size, kGroup) / kGroup;
  count_ = count, size_ = size;
  stride_ = simd::padded(size, 128);  // whole registers and cache lines
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

void Vectors::quantize(int64_t vector, Range numbers) const {
  const int64_t base = vector * group_stride_;
  for (int64_t group = numbers.begin / kGroup; group < numbers.end / kGroup; ++group) {
    const int64_t index = base + group;
    quantize_group(at(vector) + group * kGroup, codes_.at(vector * stride_ + group * kGroup), scales_[index],
                   sums_[index], code_sums_.at(2 * index));
  }
}

int64_t stride_bytes(const Matrix& matrix) {
  if (matrix.kind == kFloat32) return 4 * matrix.columns;
  if (matrix.kind == kBFloat16) return 2 * matrix.columns;
  return packed::tile_bytes(matrix.kind, matrix.columns);
}

void prefetch(const Matrix& matrix, Range rows) {
  if (rows.begin < rows.end) simd::prefetch(tile_address(matrix, rows.begin), kPrefetchBytes);
}

void skinny_gemm(const Matrix& matrix, const Vectors& vectors, int64_t count, Range rows, float* out, int64_t stride) {
  if (packed::is_packed(matrix.kind)) {
    skinny_gemm_packed(matrix, vectors, count, rows, out, stride);
  } else {
    skinny_gemm_dense(matrix, vectors, count, rows, out, stride);
  }
}

extern "C" {

// y [count][rows] = x [count][columns] times the transposed matrix, plus its bias.
void h2o_multiply(const Matrix* matrix, const float* x, float* y, int64_t count, int64_t threads) {
  static thread_local Vectors scratch;
  const Vectors& vectors = scratch;
  scratch.reserve(count, matrix->columns);
  parallel(useful_threads(*matrix, threads), [&](const Worker& worker) {
    const int64_t columns = matrix->columns;
    const Range range = worker.partition(count);
    for (int64_t v = range.begin; v < range.end; ++v) {
      std::memcpy(vectors.at(v), x + v * columns, columns * sizeof(float));
      if (packed::is_packed(matrix->kind)) vectors.quantize(v, {0, columns});
    }
    worker.barrier();
    skinny_gemm(*matrix, vectors, count, worker.partition(matrix->rows, packed::kRows), y, matrix->rows);
  });
}

}  // extern "C"
