#include "copied.h"

#include <cmath>
#include <vector>

#include "activation.h"
#include "buffer.h"
#include "gemm.h"
#include "masks.h"
#include "simd_functions.h"
#include "threads.h"

namespace {

using simd::Floats;
using simd::kWidth;

// Queries whose logits are computed together.
constexpr int64_t kQueries = 4 * gemm::kRows;

// Buffers of a thread.
struct Scratch {
  Buffer<float> keys, queries, logits;  // panels of keys, [kQueries][head_size], [kQueries][padded tokens]
};

// Puts the keys of a head in panels: [panel][head_size][gemm::kPanel].
void load_keys(const AttentionLayer& layer, const float* keys, int64_t head, int64_t tokens, float* panels) {
  for (int64_t token = 0; token < tokens; ++token) {
    const float* key = keys + (token * layer.kv_heads + head) * layer.head_size;
    float* column = panels + token / gemm::kPanel * gemm::kPanel * layer.head_size + token % gemm::kPanel;
    for (int64_t i = 0; i < layer.head_size; ++i) column[i * gemm::kPanel] = key[i];
  }
}

// The attention of a token with these logits, one for every token, to its copy and to the token after that.
double attention_to_copy(const AttentionLayer& layer, int64_t head, int64_t token, int64_t period, float* logits) {
  const int64_t from = first_visible(layer, token), to = token + 1, end = simd::padded(to);
  if (layer.softcap > 0) soft_cap(float(layer.softcap), logits + from, to - from);
  std::fill(logits, logits + from, simd::kMinusInfinity);
  std::fill(logits + to, logits + end, simd::kMinusInfinity);
  const float sink = layer.sink_logits ? layer.sink_logits[head] : simd::kMinusInfinity;
  const float top = std::max(sink, simd::reduce_max(logits, end));
  Floats sums{};
  for (int64_t i = 0; i < end; i += kWidth) sums += simd::exp_nonpositive(simd::load(logits + i) - top);
  const float total = simd::reduce_add(sums) + std::exp(sink - top);
  return (std::exp(logits[token - period] - top) + std::exp(logits[token - period + 1] - top)) / total;
}

}  // namespace

void measure_copied(const AttentionLayer& layer, const float* queries, const float* keys, int64_t tokens,
                    float* attention, int64_t threads) {
  const int64_t period = tokens / 2, size = layer.head_size, groups = layer.query_heads / layer.kv_heads;
  const int64_t columns = simd::padded(tokens, gemm::kPanel);
  std::vector<Scratch> scratch(threads);
  for (Scratch& one : scratch) {
    one.keys.reserve(columns * size), one.queries.reserve(kQueries * size), one.logits.reserve(kQueries * columns);
  }
  const float scaling = float(layer.scaling);
  parallel(threads, [&](const Worker& worker) {
    const Scratch& own = scratch[worker.index];
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
      if (!worker.owns(head)) continue;
      load_keys(layer, keys, head, tokens, own.keys.data());
      double sum = 0;
      const int64_t end = period * groups;  // rows: the query heads of a token follow one another
      for (int64_t first = 0; first < end; first += kQueries) {
        const int64_t rows = std::min(kQueries, end - first);
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t token = period + (first + row) / groups, query_head = head * groups + (first + row) % groups;
          const float* query = queries + (token * layer.query_heads + query_head) * size;
          for (int64_t i = 0; i < size; ++i) own.queries[row * size + i] = query[i] * scaling;
        }
        for (int64_t key = 0; key < columns; key += gemm::kPanel) {
          gemm::multiply<false>({own.queries.data(), size}, {own.keys.at(key * size), gemm::kPanel},
                                own.logits.at(key), columns, rows, size, gemm::kPanel);
        }
        for (int64_t row = 0; row < rows; ++row) {
          const int64_t token = period + (first + row) / groups, query_head = head * groups + (first + row) % groups;
          sum += attention_to_copy(layer, query_head, token, period, own.logits.at(row * columns));
        }
      }
      attention[head] = float(sum / double(end));
    }
  });
}
