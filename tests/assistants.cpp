// Assistants whose threads are interrupted at random: results must be exact, and weights free to change after `leave`,
// also where memory runs out in a product.
//
// Compiled by test_assistants.py with the thread sanitizer, and with products of its own in place of the library's.

#include "../h2o_stream/native/src/assistants.h"

#include <cstdio>
#include <random>
#include <thread>

namespace {

thread_local bool calls = false;
thread_local int64_t products_left = -1;  // of the caller, until memory runs out
std::atomic<int64_t> rows_by_others{0}, failures{0};

void sleep_at_times() {
  static std::atomic<unsigned> seed{0};
  thread_local std::minstd_rand random(++seed);
  if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
}

// Some number that depends on all that a product reads of a vector.
float product(const Matrix& matrix, const float* weights, const Vectors& vectors) {
  float sum = 0;
  if (packed::is_packed(matrix.kind)) {
    for (int64_t group = 0; group < matrix.columns / packed::kGroup; ++group) {
      const auto& codes = vectors.groups(0)[group];
      const auto* bytes = reinterpret_cast<const int8_t*>(&codes);
      sum += vectors.scales(0)[group].sum * *weights;
      for (int64_t i = 0; i < packed::kGroup; ++i) sum += float(bytes[i]);
    }
    return sum;
  }
  const int64_t stride = packed::has_columns(matrix.kind) ? matrix.rows : 1;
  for (int64_t i = 0; i < matrix.columns; ++i) sum += weights[i * stride] * vectors.at(0)[i];
  return sum;
}

const float* weights_of(const Matrix& matrix, int64_t row) {
  if (packed::has_columns(matrix.kind)) return static_cast<const float*>(matrix.weights) + row;
  const bool is_packed = packed::is_packed(matrix.kind);
  const int64_t place = is_packed ? row / packed::kRows * stride_bytes(matrix) / 4 + row % packed::kRows
                                  : row * matrix.columns;
  return static_cast<const float*>(matrix.weights) + place;
}

// What a caller multiplies: matrices that share a vector.
struct Case {
  std::vector<std::vector<float>> weights, biases, outs;
  std::vector<Matrix> matrices;
  Vectors vectors;

  Case(int64_t kind, int64_t columns, std::initializer_list<int64_t> rows) : vectors(1, columns) {
    for (const int64_t count : rows) {
      biases.emplace_back(count), outs.emplace_back(count);
      Matrix matrix{nullptr, biases.back().data(), count, columns, kind, 0};
      const int64_t tiles = simd::padded(count, packed::kRows) / packed::kRows;
      weights.emplace_back(packed::is_packed(kind) ? tiles * stride_bytes(matrix) / 4 : count * columns);
      matrix.weights = weights.back().data();
      matrices.push_back(matrix);
    }
  }

  void change(std::minstd_rand& random) {
    const auto next = [&] { return float(int64_t(random() % 17) - 8); };
    for (auto* all : {&weights, &biases}) {
      for (auto& numbers : *all) std::generate(numbers.begin(), numbers.end(), next);
    }
  }

  void change_vector(std::minstd_rand& random) {
    for (int64_t i = 0; i < vectors.size(); ++i) vectors.at(0)[i] = float(int64_t(random() % 17) - 8);
    vectors.quantize(0, {0, vectors.size()});
  }

  int64_t wrong() const {
    int64_t count = 0;
    for (size_t i = 0; i < matrices.size(); ++i) {
      for (int64_t row = 0; row < matrices[i].rows; ++row) {
        count += outs[i][row] != product(matrices[i], weights_of(matrices[i], row), vectors) + biases[i][row];
      }
    }
    return count;
  }
};

// Returns the number of wrong results.
int64_t multiply(Case& one, std::minstd_rand& random) {
  one.change_vector(random);
  std::vector<Product> products;
  for (size_t j = 0; j < one.matrices.size(); ++j) products.push_back({&one.matrices[j], one.outs[j].data(), 0});
  Assistants::get().multiply(products.data(), int64_t(products.size()), one.vectors, 0);
  return one.wrong();
}

// The same, of many calls.
int64_t call(int seed, int64_t threads, int64_t rounds) {
  calls = true;
  std::minstd_rand random(seed);
  Case cases[] = {{kFloat32, 64, {500, 100, 37}}, {kFloat32, 8, {40000}}, {kInt8, 128, {1024, 1000}},
                  {kFloat32, 8, {20}}, {kFloat32, 1024, {128}}, {kFloat32Columns, 8, {40000}}};
  int64_t wrong = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    for (Case& one : cases) one.change(random);
    try {
      const auto lock = Assistants::get().join(threads);
      products_left = round % 3 == 2 ? int64_t(random() % 30) : -1;
      for (int64_t i = 0; lock && i < 24; ++i) wrong += multiply(cases[i % std::size(cases)], random);
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    Assistants::get().leave();
  }
  return wrong;
}

}  // namespace

int64_t stride_bytes(const Matrix& matrix) { return 4 * matrix.columns; }

void skinny_gemm(const Matrix& matrix, const Vectors& vectors, Range, Range rows, float* out, int64_t) {
  if (calls && products_left-- == 0) throw std::bad_alloc();
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    out[row] = product(matrix, weights_of(matrix, row), vectors) + matrix.bias[row];
    if (calls) continue;
    ++rows_by_others;
    if (row % 64 == 0) sleep_at_times();
  }
}

int main() {
  int64_t wrong = 0, wrong_of_other = 0;
  std::thread other([&] { wrong_of_other = call(1, 2, 15); });
  wrong = call(2, 4, 15);
  other.join();
  std::printf("%ld wrong, %ld rows by others, %ld failures\n", long(wrong + wrong_of_other), long(rows_by_others),
              long(failures));
  return wrong + wrong_of_other || !rows_by_others || !failures;
}
