#include "matrix.h"

#include <exception>

#include "bfloat16_units.h"
#include "simd_functions.h"
#include "tiles.h"

namespace {

// Bytes of the next matrix to prefetch before a barrier.
constexpr int64_t kPrefetchBytes = 4096;

// With less to read per thread, waking the thread costs more than it saves.
constexpr int64_t kMinBytesPerThread = 32768;

// From this many vectors on, a matrix is unpacked to the cache once for all of them. AVX-512 multiplies bytes twice as
// fast as what they are unpacked to: it reads vectors that the cache holds several times instead.
#if defined(H2O_AVX512)
constexpr int64_t kMinGemmVectors = 33;
#else
constexpr int64_t kMinGemmVectors = 9;
#endif
constexpr int64_t kMinDenseVectors = 9;  // of a matrix that is not packed

// From this many vectors on, units for bfloat16 are faster.
constexpr int64_t kMinBFloat16Vectors = 17;

int64_t useful_threads(const Matrix& matrix, int64_t count, int64_t threads) {
  const int64_t tiles = simd::padded(matrix.rows, packed::kRows) / packed::kRows;
  const int64_t bytes = (packed::is_packed(matrix.kind) ? tiles : matrix.rows) * stride_bytes(matrix) * count;
  return std::max<int64_t>(1, std::min(threads, bytes / kMinBytesPerThread));
}

bool has_scale(const Matrix& matrix) { return matrix.scale != 0 && matrix.scale != 1; }

// Multiplies the products of some vectors with a range of rows by the matrix's scale.
void apply_scale(const Matrix& matrix, Range vectors, Range rows, float* out, int64_t stride) {
  for (int64_t v = vectors.begin; v < vectors.end; ++v) {
    for (int64_t row = rows.begin; row < rows.end; ++row) out[v * stride + row] *= float(matrix.scale);
  }
}

// The same for `count` vectors and all rows.
void apply_scale(const Matrix& matrix, int64_t count, float* out, int64_t stride, int64_t threads) {
  if (!has_scale(matrix)) return;
  parallel(threads, [&](const Worker& worker) {
    apply_scale(matrix, worker.partition(count), {0, matrix.rows}, out, stride);
  });
}

}  // namespace

int64_t stride_bytes(const Matrix& matrix) {
  if (matrix.kind == kFloat32 || matrix.kind == kFloat32Columns) return 4 * matrix.columns;
  if (matrix.kind == kBFloat16 || matrix.kind == kBFloat16Columns) return 2 * matrix.columns;
  return packed::tile_bytes(matrix.kind, matrix.columns);
}

void prefetch(const Matrix& matrix, Range rows) {
  if (rows.begin < rows.end) simd::prefetch(tile_address(matrix, rows.begin), kPrefetchBytes);
}

void skinny_gemm(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out, int64_t stride) {
  if (packed::is_packed(matrix.kind)) {
    skinny_gemm_packed(matrix, vectors, range, rows, out, stride);
  } else if (packed::has_columns(matrix.kind)) {
    skinny_gemm_columns(matrix, vectors, range, rows, out, stride);
  } else {
    skinny_gemm_dense(matrix, vectors, range, rows, out, stride);
  }
  if (has_scale(matrix)) apply_scale(matrix, {0, range.size()}, rows, out, stride);
}

void multiply(const Matrix& matrix, const float* x, int64_t count, float* out, int64_t stride,
              [[maybe_unused]] bool in_bfloat16, int64_t threads) {
  threads = useful_threads(matrix, count, threads);
#if defined(H2O_BFLOAT16_UNITS)
  if (in_bfloat16 && packed::is_packed(matrix.kind) && count >= kMinBFloat16Vectors && bfloat16_units::available()) {
    gemm_bfloat16(matrix, x, count, out, stride, threads);
    return apply_scale(matrix, count, out, stride, threads);
  }
#endif
  if (packed::is_packed(matrix.kind) && count >= kMinGemmVectors) {
    gemm_packed(matrix, x, count, out, stride, threads);
    return apply_scale(matrix, count, out, stride, threads);
  }
  if (!packed::is_packed(matrix.kind) && !packed::has_columns(matrix.kind) && count >= kMinDenseVectors) {
    gemm_dense(matrix, x, count, out, stride, in_bfloat16, threads);
    return apply_scale(matrix, count, out, stride, threads);
  }
  static thread_local Vectors scratch;
  const Vectors& vectors = scratch;
  scratch.reserve(count, matrix.columns);
  parallel(threads, [&](const Worker& worker) {
    const Range range = worker.partition(count);
    for (int64_t v = range.begin; v < range.end; ++v) {
      std::memcpy(vectors.at(v), x + v * matrix.columns, matrix.columns * sizeof(float));
      quantize_for({&matrix}, vectors, v, {0, matrix.columns});
    }
    worker.barrier();
    skinny_gemm(matrix, vectors, count, worker.partition(matrix.rows, packed::kRows), out, stride);
  });
}

// y [count][rows] = x [count][columns] times the transposed matrix, plus its bias, scaled; see `multiply`. Returns 0,
// or 1 if out of memory.
extern "C" int64_t h2o_multiply(const Matrix* matrix, const float* x, float* y, int64_t count, int64_t in_bfloat16,
                                int64_t threads) {
  try {
    multiply(*matrix, x, count, y, matrix->rows, in_bfloat16, threads);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
