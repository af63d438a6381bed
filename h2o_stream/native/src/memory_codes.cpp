#include "memory_codes.h"

#include <cmath>
#include <numeric>

#include "slot_kernels.h"

namespace memory {

using simd::Floats;
using simd::kWidth;
using slot_kernels::dot;

namespace {

constexpr float kRidge = 0.5f;        // times the mean of the queries' second moments is added to these
constexpr int64_t kIterations = 4;    // for directions
constexpr int64_t kRefinements = 8;   // of centroids
constexpr float kNegligible = 1e-6f;  // of the length of a vector

// to += factor * x.
void add(float factor, const float* x, int64_t size, float* to) {
  for (int64_t i = 0; i < size; ++i) to[i] += factor * x[i];
}

// Makes rows [count][size] orthonormal; those that depend on others become zero.
void orthonormalize(float* rows, int64_t count, int64_t size) {
  for (int64_t i = 0; i < count; ++i) {
    float* row = rows + i * size;
    const float before = std::sqrt(dot(row, row, size));
    for (int64_t pass = 0; pass < 2; ++pass) {
      for (int64_t j = 0; j < i; ++j) add(-dot(row, rows + j * size, size), rows + j * size, size, row);
    }
    const float length = std::sqrt(dot(row, row, size)), inverse = length > kNegligible * before ? 1 / length : 0;
    for (int64_t k = 0; k < size; ++k) row[k] *= inverse;
  }
}

// The centroid nearest to a point, whose elements are `stride` apart.
int64_t nearest(const float* centroids, const float* point, int64_t stride) {
  float distances[kCentroids] = {};
  for (int64_t d = 0; d < kGroupDims; ++d) {
    const float x = point[d * stride];
    for (int64_t c = 0; c < kCentroids; ++c) {
      const float difference = x - centroids[d * kCentroids + c];
      distances[c] += difference * difference;
    }
  }
  return std::min_element(distances, distances + kCentroids) - distances;
}

// Which directions, of falling variances, make up each group: their products of variances are nearly equal.
void assign_groups(const float* variances, int64_t groups, int64_t (*members)[kGroupDims]) {
  double sums[kMaxGroups] = {};
  int64_t sizes[kMaxGroups] = {};
  const double smallest = std::max(kNegligible * double(variances[0]), 1e-30);
  for (int64_t i = 0; i < groups * kGroupDims; ++i) {
    int64_t best = -1;
    for (int64_t group = 0; group < groups; ++group) {
      if (sizes[group] < kGroupDims && (best < 0 || sums[group] < sums[best])) best = group;
    }
    sums[best] += std::log(std::max(double(variances[i]), smallest) / smallest);
    members[best][sizes[best]++] = i;
  }
}

// Centroids [kGroupDims][kCentroids] of points [kGroupDims][kTraining], by Lloyd's algorithm.
void find_centroids(const float* points, float* centroids) {
  for (int64_t d = 0; d < kGroupDims; ++d) {
    for (int64_t c = 0; c < kCentroids; ++c) {
      centroids[d * kCentroids + c] = points[d * kTraining + c * (kTraining - 1) / (kCentroids - 1)];
    }
  }
  for (int64_t pass = 0; pass < kRefinements; ++pass) {
    float sums[kGroupDims][kCentroids] = {}, counts[kCentroids] = {};
    for (int64_t i = 0; i < kTraining; ++i) {
      const int64_t c = nearest(centroids, points + i, kTraining);
      ++counts[c];
      for (int64_t d = 0; d < kGroupDims; ++d) sums[d][c] += points[d * kTraining + i];
    }
    for (int64_t c = 0; c < kCentroids; ++c) {
      for (int64_t d = 0; counts[c] > 0 && d < kGroupDims; ++d) centroids[d * kCentroids + c] = sums[d][c] / counts[c];
    }
  }
}

}  // namespace

void Training::reserve(int64_t key_size) {
  const int64_t dims = CodeShape{key_size}.dims();
  keys.reserve(kTraining * key_size);
  factor.reserve(key_size * key_size), covariance.reserve(key_size * key_size);
  directions.reserve(dims * key_size), next.reserve(dims * key_size);
  points.reserve(dims * kTraining);
}

void Codebook::count(const float* query) const {
  const int64_t size = shape_.key_size;
  for (int64_t i = 0; i < size; ++i) add(query[i], query, size, moments() + i * size);
}

// Products of keys and queries are those of L^T key and L^-1 query, if L L^T are the second moments of queries. Those
// directions count in which L^T key differs most.
void Codebook::learn(Training& training) const {
  const int64_t size = shape_.key_size;
  float* keys = training.keys.data();
  std::fill_n(centre(), size, 0.f);
  for (int64_t i = 0; i < kTraining; ++i) add(1.f / kTraining, keys + i * size, size, centre());
  for (int64_t i = 0; i < kTraining; ++i) add(-1, centre(), size, keys + i * size);
  factorize_moments(training);
  find_directions(training);
  const int64_t dims = shape_.dims(), groups = shape_.groups();
  float variances[kMaxGroups * kGroupDims];
  for (int64_t i = 0; i < dims; ++i) {
    const float* points = training.points.at(i * kTraining);
    variances[i] = dot(points, points, kTraining);
  }
  int64_t members[kMaxGroups][kGroupDims];
  assign_groups(variances, groups, members);
  for (int64_t group = 0; group < groups; ++group) set_group(group, members[group], training);
  for (int64_t i = 0; i < dims; ++i) projected_centre()[i] = dot(of_keys() + i * size, centre(), size);
  *floats_ = 1;
}

// Puts L into `factor`, its columns as rows, so that rows are added up.
void Codebook::factorize_moments(Training& training) const {
  const int64_t size = shape_.key_size;
  float *columns = training.factor.data(), *left = training.covariance.data();
  double trace = 0;
  for (int64_t i = 0; i < size; ++i) trace += moments()[i * size + i];
  const float scale = trace > 0 ? float(double(size) / trace) : 0;
  for (int64_t i = 0; i < size * size; ++i) left[i] = moments()[i] * scale;
  for (int64_t i = 0; i < size; ++i) left[i * size + i] += kRidge;
  for (int64_t i = 0; i < size; ++i) {
    float* column = columns + i * size;
    const float inverse = 1 / std::sqrt(std::max(left[i * size + i], kNegligible));
    for (int64_t j = 0; j < size; ++j) column[j] = j < i ? 0 : left[i * size + j] * inverse;
    for (int64_t j = i + 1; j < size; ++j) add(-column[j], column, size, left + j * size);
  }
}

// Puts the main directions of L^T key into `directions` [dims][size], and keys in these into `points`.
void Codebook::find_directions(Training& training) const {
  const int64_t size = shape_.key_size, dims = shape_.dims();
  float *keys = training.keys.data(), *covariance = training.covariance.data();
  float *rows = training.directions.data(), *next = training.next.data();
  std::fill_n(covariance, size * size, 0.f);
  for (int64_t i = 0; i < kTraining; ++i) {
    float *key = keys + i * size, *weighted = next;
    for (int64_t j = 0; j < size; ++j) weighted[j] = dot(training.factor.at(j * size), key, size);
    std::copy_n(weighted, size, key);
    for (int64_t j = 0; j < size; ++j) add(key[j], key, size, covariance + j * size);
  }
  std::fill_n(rows, dims * size, 0.f);
  Buffer<float>& order = training.points;  // of the largest elements on the diagonal
  std::iota(order.data(), order.at(size), 0.f);
  std::stable_sort(order.data(), order.at(size), [&](float a, float b) {
    return covariance[int64_t(a) * (size + 1)] > covariance[int64_t(b) * (size + 1)];
  });
  for (int64_t i = 0; i < std::min(dims, size); ++i) rows[i * size + int64_t(order[i])] = 1;
  for (int64_t iteration = 0; iteration < kIterations; ++iteration) {
    std::fill_n(next, dims * size, 0.f);
    for (int64_t i = 0; i < dims; ++i) {
      for (int64_t j = 0; j < size; ++j) add(rows[i * size + j], covariance + j * size, size, next + i * size);
    }
    std::swap(rows, next);
    orthonormalize(rows, dims, size);
  }
  if (rows != training.directions.data()) std::copy_n(rows, dims * size, training.directions.data());
  for (int64_t i = 0; i < dims; ++i) {
    for (int64_t j = 0; j < kTraining; ++j) {
      training.points[i * kTraining + j] = dot(training.directions.at(i * size), keys + j * size, size);
    }
  }
}

// Makes a group of some directions: their parts for keys and for queries, and centroids.
void Codebook::set_group(int64_t group, const int64_t* members, Training& training) const {
  const int64_t size = shape_.key_size, dims = shape_.dims();
  float* query = training.next.data();
  float grouped[kGroupDims * kTraining];
  for (int64_t d = 0; d < kGroupDims; ++d) {
    const int64_t place = group * kGroupDims + d;
    const float* direction = training.directions.at(members[d] * size);
    float* key = of_keys() + place * size;
    std::fill_n(key, size, 0.f);
    for (int64_t j = 0; j < size; ++j) add(direction[j], training.factor.at(j * size), size, key);
    std::fill_n(query, size, 0.f);
    for (int64_t j = size - 1; j >= 0; --j) {  // L^T query = direction; what is not known yet is 0
      const float* column = training.factor.at(j * size);
      query[j] = (direction[j] - dot(column, query, size)) / column[j];
    }
    for (int64_t j = 0; j < size; ++j) of_queries()[j * dims + place] = query[j];
    std::copy_n(training.points.at(members[d] * kTraining), kTraining, grouped + d * kTraining);
  }
  find_centroids(grouped, centroids(group));
}

void Codebook::encode(const float* key, uint8_t* code, int64_t stride) const {
  const int64_t size = shape_.key_size;
  float point[kMaxGroups * kGroupDims];
  for (int64_t i = 0; i < shape_.dims(); ++i) point[i] = dot(of_keys() + i * size, key, size) - projected_centre()[i];
  encode_point(point, code, stride);
}

void Codebook::encode_point(const float* point, uint8_t* code, int64_t stride) const {
  for (int64_t group = 0; group < shape_.groups(); group += 2) {
    const auto centroid = [&](int64_t i) { return nearest(centroids(i), point + i * kGroupDims, 1); };
    code[group / 2 * stride] = uint8_t(centroid(group) | centroid(group + 1) << 4);
  }
}

void Codebook::decode(const uint8_t* code, int64_t stride, float* point) const {
  for (int64_t group = 0; group < shape_.groups(); ++group) {
    const float* centroid = centroids(group) + (code[group / 2 * stride] >> group % 2 * 4 & 15);
    for (int64_t d = 0; d < kGroupDims; ++d) point[group * kGroupDims + d] = centroid[d * kCentroids];
  }
}

void Codebook::make_tables(const float* queries, int64_t stride, int64_t count, Table* tables) const {
  float projected[kTogether][kMaxGroups * kGroupDims];
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t together = std::min(kTogether, count - first);
    const float* rows = queries + first * stride;
    with_constant(together, [&](auto constant) { project<constant>(rows, stride, projected); });
    for (int64_t q = 0; q < together; ++q) {
      tables[first + q].offset = dot(rows + q * stride, centre(), shape_.key_size);
      fill_table(projected[q], tables[first + q]);
    }
  }
}

// Products of queries with all directions.
template <int64_t count>
void Codebook::project(const float* queries, int64_t stride, float (*projected)[kMaxGroups * kGroupDims]) const {
  constexpr int64_t kVectors = 2;
  const int64_t size = shape_.key_size, dims = shape_.dims();
  int64_t d = 0;
  for (; d + kVectors * kWidth <= dims; d += kVectors * kWidth) {
    Floats sums[count][kVectors] = {};
    for (int64_t i = 0; i < size; ++i) {
      const float* row = of_queries() + i * dims + d;
      for (int64_t q = 0; q < count; ++q) {
        for (int64_t v = 0; v < kVectors; ++v) sums[q][v] += queries[q * stride + i] * simd::load(row + v * kWidth);
      }
    }
    for (int64_t q = 0; q < count; ++q) {
      for (int64_t v = 0; v < kVectors; ++v) simd::store(sums[q][v], projected[q] + d + v * kWidth);
    }
  }
  for (; d < dims; ++d) {
    for (int64_t q = 0; q < count; ++q) {
      projected[q][d] = 0;
      for (int64_t i = 0; i < size; ++i) projected[q][d] += queries[q * stride + i] * of_queries()[i * dims + d];
    }
  }
}

// Writes the products with all centroids; `offset` is that with the centre.
void Codebook::fill_table(const float* projected, Table& table) const {
  constexpr int64_t kVectors = kCentroids / kWidth;
  const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
  const int64_t groups = shape_.groups();
  Floats products[kMaxGroups][kVectors], extremes[2 * kMaxGroups];  // of products, and of minus products
  float largest[2 * kMaxGroups], ranges = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const float *centroids = this->centroids(group), *x = projected + group * kGroupDims;
    Floats &high = extremes[group], &low = extremes[groups + group];
    for (int64_t v = 0; v < kVectors; ++v) {
      Floats sum{};
      for (int64_t d = 0; d < kGroupDims; ++d) sum += x[d] * simd::load(centroids + d * kCentroids + v * kWidth);
      products[group][v] = sum;
      high = v ? larger(high, sum) : sum, low = v ? larger(low, -sum) : -sum;
    }
  }
  std::fill(extremes + 2 * groups, extremes + simd::padded(2 * groups), Floats{});
  for (int64_t i = 0; i < 2 * groups; i += kWidth) {
    simd::store(simd::fold_rows(extremes + i, larger), largest + i);
  }
  for (int64_t group = 0; group < groups; ++group) {
    ranges += largest[group] + largest[groups + group];
    table.offset -= largest[groups + group];
  }
  // Sums of bytes, each of which may be rounded up, stay below 256.
  const float inverse = ranges > 0 ? (255 - 0.5f * float(groups)) / ranges : 0;
  table.step = inverse > 0 ? 1 / inverse : 0;
  for (int64_t group = 0; group < groups; ++group) {
    for (int64_t v = 0; v < kVectors; ++v) {
      const Floats scaled = (products[group][v] + largest[groups + group]) * inverse + 0.5f;
      simd::store_bytes(__builtin_convertvector(scaled, simd::Ints), table.bytes[group] + v * kWidth);
    }
  }
}

}  // namespace memory
