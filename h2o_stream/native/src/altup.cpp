#include "altup.h"

#include "layer_parts.h"
#include "prompt.h"
#include "simd_functions.h"
#include "step.h"

namespace altup {

namespace {

constexpr float kLeastSquare = 1e-5f;  // of what is brought to another length

float inner_product(const float* x, const float* y, int64_t size) {
  simd::Floats sums{};
  int64_t i = 0;
  for (; i + simd::kWidth <= size; i += simd::kWidth) sums += simd::load(x + i) * simd::load(y + i);
  float sum = simd::reduce_add(sums);
  for (; i < size; ++i) sum += x[i] * y[i];
  return sum;
}

// The same for one weight of each version.
float weighted_sum(const float* weights, const float* routed, int64_t versions) {
  float sum = 0;
  for (int64_t i = 0; i < versions; ++i) sum += weights[i] * routed[i];
  return sum;
}

// Writes r(x), see `AltUp`.
void route(const Model& model, const AltUp& altup, const float* x, float* routed) {
  const int64_t hidden = model.hidden_size;
  const float factor = inverse_rms(x, hidden, altup.epsilon);
  for (int64_t i = 0; i < model.versions; ++i) {
    routed[i] = std::tanh(factor * inner_product(altup.router + i * hidden, x, hidden));
  }
}

// The factor that makes x as long as a vector of this mean square.
float length_factor(const float* x, float square, int64_t size) {
  return std::sqrt(square / std::max(inner_product(x, x, size) / float(size), kLeastSquare));
}

}  // namespace

void predict(const Model& model, const Layer& layer, float* versions, float* x) {
  const int64_t hidden = model.hidden_size, n = model.versions;
  float *active = versions + model.active_version * hidden, routed[kMaxVersions], factors[kMaxVersions][kMaxVersions];
  route(model, layer.altup, active, routed);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      factors[i][j] = weighted_sum(layer.altup.prediction + (i * n + j) * n, routed, n) + (i == j ? 1.f : 0.f);
    }
  }
  constexpr int64_t kPiece = 64;
  float before[kMaxVersions][kPiece];
  for (int64_t first = 0; first < hidden; first += kPiece) {
    const int64_t size = std::min(kPiece, hidden - first);
    for (int64_t j = 0; j < n; ++j) std::copy_n(versions + j * hidden + first, size, before[j]);
    for (int64_t i = 0; i < n; ++i) {
      float* to = versions + i * hidden + first;
      std::fill_n(to, size, 0.f);
      for (int64_t j = 0; j < n; ++j) {
        for (int64_t k = 0; k < size; ++k) to[k] += factors[i][j] * before[j][k];
      }
    }
  }
  std::copy_n(active, hidden, x);
}

void correct(const Model& model, const Layer& layer, float* versions, float* x) {
  const int64_t hidden = model.hidden_size, n = model.versions;
  float *active = versions + model.active_version * hidden, routed[kMaxVersions];
  route(model, layer.altup, x, routed);
  for (int64_t k = 0; k < hidden; ++k) x[k] -= active[k];
  for (int64_t i = 0; i < n; ++i) {
    const float factor = 1 + weighted_sum(layer.altup.correction + i * n, routed, n);
    for (int64_t k = 0; k < hidden; ++k) versions[i * hidden + k] += factor * x[k];
  }
  const float* scale = layer.altup.embedding_scale;
  for (int64_t k = 0; k < hidden; ++k) x[k] = active[k] * (scale ? scale[k] : 1.f);
}

void add_embedding(const Model& model, const Layer& layer, const float* delta, float* versions, float* scratch) {
  const int64_t hidden = model.hidden_size;
  apply_norm(layer.after_embedding, delta, hidden, scratch);
  for (int64_t i = 1; i < model.versions; ++i) {
    for (int64_t k = 0; k < hidden; ++k) versions[i * hidden + k] += scratch[k];
  }
}

void split(const Model& model, const float* projected, const float* x, float* versions) {
  const int64_t hidden = model.hidden_size;
  const float square = inner_product(x, x, hidden) / float(hidden);
  std::copy_n(x, hidden, versions);
  for (int64_t i = 1; i < model.versions; ++i, projected += hidden) {
    const float factor = length_factor(projected, square, hidden);
    for (int64_t k = 0; k < hidden; ++k) versions[i * hidden + k] = factor * projected[k];
  }
}

void merge(const Model& model, const float* projected, const float* versions, float* x) {
  const int64_t hidden = model.hidden_size;
  const float square = inner_product(versions, versions, hidden) / float(hidden);
  std::copy_n(versions, hidden, x);
  for (int64_t i = 1; i < model.versions; ++i, projected += hidden) {
    const float factor = length_factor(projected, square, hidden);
    for (int64_t k = 0; k < hidden; ++k) x[k] += factor * projected[k];
  }
  scale(1.0 / double(model.versions), hidden, x);
}

void add_laurel(const Model& model, const Layer& layer, const float* y, const float* delta, float* x, float* scratch) {
  const int64_t hidden = model.hidden_size;
  add_normed(layer.laurel.norm, delta, hidden, 1, x, scratch);
  for (int64_t k = 0; k < hidden; ++k) x[k] += y[k];
}

}  // namespace altup

using packed::kRows;

void Step::split_versions(const Worker& worker) {
  const int64_t hidden = model_.hidden_size, others = model_.versions - 1;
  const Range rows = worker.partition(hidden, kRows);
  const Matrix* to = model_.to_versions;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    std::copy_n(state.x.at(stream * hidden), hidden, state.normed.at(stream));
    quantize_for({&to[0], &to[1], &to[2]}, state.normed, stream, {0, hidden});
  });
  for (int64_t i = 0; i < others; ++i) {
    multiply_vectors(to[i], state(worker).normed, {0, count_}, rows, projected_versions_.at(i * hidden), others * hidden);
  }
  worker.barrier();
  for_each_stream(worker, [&](State& state, int64_t stream) {
    altup::split(model_, projected_versions_.at(stream * others * hidden), state.x.at(stream * hidden),
                 state.versions.at(stream * model_.versions * hidden));
  });
}

void Step::merge_versions(const Worker& worker, const Layer& last) {
  const int64_t hidden = model_.hidden_size, n = model_.versions, others = n - 1;
  const Range rows = worker.partition(hidden, kRows);
  for_each_stream(worker, [&](State& state, int64_t stream) {
    add_layer(last, state.x.at(stream * hidden), stream, worker);
    for (int64_t i = 0; i < others; ++i) {
      const int64_t vector = i * count_ + stream;
      std::copy_n(state.versions.at((stream * n + i + 1) * hidden), hidden, state.version_inputs.at(vector));
      quantize_for({&model_.from_versions[i]}, state.version_inputs, vector, {0, hidden});
    }
  });
  for (int64_t i = 0; i < others; ++i) {
    multiply_vectors(model_.from_versions[i], state(worker).version_inputs, {i * count_, (i + 1) * count_}, rows,
                     projected_versions_.at(i * hidden), others * hidden);
  }
  worker.barrier();
  for_each_stream(worker, [&](State& state, int64_t stream) {
    altup::merge(model_, projected_versions_.at(stream * others * hidden), state.versions.at(stream * n * hidden),
                 state.x.at(stream * hidden));
  });
}

void Prompt::split_versions() {
  const int64_t hidden = model_.hidden_size, n = model_.versions, others = n - 1;
  for_each_block([&](int64_t first, int64_t size) {
    for (int64_t i = 0; i < others; ++i) {
      multiply(model_.to_versions[i], x_.at(first * hidden), size, projected_versions_.at(i * hidden), others * hidden,
               false, threads_);
    }
    for_each_token(size, [&](int64_t i, const Worker&) {
      altup::split(model_, projected_versions_.at(i * others * hidden), x_.at((first + i) * hidden),
                   versions_.at((first + i) * n * hidden));
    });
  });
}

void Prompt::merge_versions() {
  const int64_t hidden = model_.hidden_size, n = model_.versions, others = n - 1;
  for_each_block([&](int64_t first, int64_t size) {
    for (int64_t version = 1; version < n; ++version) {
      for_each_token(size, [&](int64_t i, const Worker&) {
        std::copy_n(versions_.at(((first + i) * n + version) * hidden), hidden, normed_.at(i * hidden));
      });
      multiply(model_.from_versions[version - 1], normed_.data(), size, projected_versions_.at((version - 1) * hidden),
               others * hidden, false, threads_);
    }
    for_each_token(size, [&](int64_t i, const Worker&) {
      altup::merge(model_, projected_versions_.at(i * others * hidden), versions_.at((first + i) * n * hidden),
                   x_.at((first + i) * hidden));
    });
  });
}

// Adds the residuals of low rank of a block of tokens, whose normed inputs are in `normed_`.
void Prompt::add_laurel(const Layer& layer, int64_t first, int64_t size) {
  const int64_t hidden = model_.hidden_size, rank = layer.laurel.left.rows;
  multiply(layer.laurel.left, normed_.data(), size, up_.data(), rank, in_bfloat16_, threads_);
  multiply(layer.laurel.right, up_.data(), size, mlp_delta_.data(), hidden, in_bfloat16_, threads_);
  for_each_token(size, [&](int64_t i, const Worker& worker) {
    altup::add_laurel(model_, layer, normed_.at(i * hidden), mlp_delta_.at(i * hidden), x_.at((first + i) * hidden),
                      scratch_.at(worker.index * hidden));
  });
}
