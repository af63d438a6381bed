#include "mamba2.h"

#include "activation.h"
#include "convolution.h"
#include "norm_rope.h"
#include "simd_functions.h"

namespace mamba2 {

namespace {

using simd::Floats;
using simd::kWidth;

// Tokens whose keys and queries stay in the first cache for all rows of a head's state; rows and vectors of a row that
// stay in registers for these tokens.
constexpr int64_t kTokens = 16, kRows = 2, kVectors = simd::kWidth == 16 ? 8 : 4;

// What a head does with each token.
struct Head {
  const float *value, *key, *query;  // of the first token: [value_size], [key_size], [key_size]
  const float *keep, *learn;         // [count]
  float *state, *out;                // [value_size][key_size]; of the first token
  int64_t key_size, value_size, stride, out_stride;
};

// A whole vector, or the first `size` elements of one.
template <bool kWhole>
Floats load(const float* from, int64_t size) {
  if (kWhole) return simd::load(from);
  float padded[kWidth] = {};
  std::copy_n(from, size, padded);
  return simd::load(padded);
}

template <bool kWhole>
void store(Floats vector, int64_t size, float* to) {
  if (kWhole) return simd::store(vector, to);
  float padded[kWidth];
  simd::store(vector, padded);
  std::copy_n(padded, size, to);
}

// Takes tokens through columns of `rows` rows of the state, from `value` and `column` on, and adds what is read of
// them. The columns are `vectors` vectors if kWhole, or else `size` elements.
template <int64_t rows, int64_t vectors, bool kWhole>
void run_tile(const Head& head, Range tokens, int64_t value, int64_t column, int64_t size) {
  constexpr int64_t kAdded = kWidth / rows;  // tokens whose products are added up across vectors at a time
  Floats state[rows][vectors];
  float* const first = head.state + value * head.key_size + column;
#pragma GCC unroll 2
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < vectors; ++v) state[r][v] = load<kWhole>(first + r * head.key_size + v * kWidth, size);
  }
  for (int64_t begin = tokens.begin; begin < tokens.end; begin += kAdded) {
    const int64_t count = std::min(kAdded, tokens.end - begin);
    Floats sums[kWidth] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = begin + i;
      const float *key = head.key + token * head.stride + column, *query = head.query + token * head.stride + column;
      Floats inputs[rows], sum[rows] = {};
      for (int64_t r = 0; r < rows; ++r) {
        inputs[r] = simd::splat(head.learn[token] * head.value[token * head.stride + value + r]);
      }
#pragma GCC unroll 8
      for (int64_t v = 0; v < vectors; ++v) {
        const Floats keys = load<kWhole>(key + v * kWidth, size), queries = load<kWhole>(query + v * kWidth, size);
#pragma GCC unroll 2
        for (int64_t r = 0; r < rows; ++r) {
          const Floats added = inputs[r] * keys;
          state[r][v] = head.keep[token] * state[r][v] + added;
          sum[r] += state[r][v] * queries;
        }
      }
      for (int64_t r = 0; r < rows; ++r) sums[i * rows + r] = sum[r];
    }
    float read[kWidth];
    simd::store(simd::sums_of_rows(sums), read);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t r = 0; r < rows; ++r) head.out[(begin + i) * head.out_stride + value + r] += read[i * rows + r];
    }
  }
#pragma GCC unroll 2
  for (int64_t r = 0; r < rows; ++r) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < vectors; ++v) store<kWhole>(state[r][v], size, first + r * head.key_size + v * kWidth);
  }
}

// Takes tokens through `rows` whole rows of the state.
template <int64_t rows>
void run_rows(const Head& head, Range tokens, int64_t value) {
  const int64_t size = head.key_size;
  int64_t column = 0;
  for (; column + kVectors * kWidth <= size; column += kVectors * kWidth) {
    run_tile<rows, kVectors, true>(head, tokens, value, column, 0);
  }
  for (; column + kVectors / 2 * kWidth <= size; column += kVectors / 2 * kWidth) {
    run_tile<rows, kVectors / 2, true>(head, tokens, value, column, 0);
  }
  for (; column + kWidth <= size; column += kWidth) run_tile<rows, 1, true>(head, tokens, value, column, 0);
  if (column < size) run_tile<rows, 1, false>(head, tokens, value, column, size - column);
}

void run_tokens(const Head& head, int64_t count) {
  for (int64_t first = 0; first < count; first += kTokens) {
    const Range tokens{first, std::min(first + kTokens, count)};
    int64_t value = 0;
    for (; value + kRows <= head.value_size; value += kRows) run_rows<kRows>(head, tokens, value);
    for (; value < head.value_size; ++value) run_rows<1>(head, tokens, value);
  }
}

// The same for a single token, which reads the state once.
void run_token(const Head& head) {
  const int64_t size = head.key_size, whole = size / kWidth * kWidth;
  for (int64_t first = 0; first < head.value_size; first += kWidth) {
    const int64_t values = std::min(kWidth, head.value_size - first);
    Floats sums[kWidth] = {};
    for (int64_t i = 0; i < values; ++i) {
      float* state = head.state + (first + i) * size;
      const float input = head.learn[0] * head.value[first + i];
      Floats sum{};
      const auto add = [&](auto is_whole, int64_t column) {
        constexpr bool kWhole = decltype(is_whole)::value;
        const int64_t rest = size - column;
        const Floats added = input * load<kWhole>(head.key + column, rest);
        const Floats row = head.keep[0] * load<kWhole>(state + column, rest) + added;
        store<kWhole>(row, rest, state + column);
        sum += row * load<kWhole>(head.query + column, rest);
      };
      for (int64_t column = 0; column < whole; column += kWidth) add(std::true_type(), column);
      if (whole < size) add(std::false_type(), whole);
      sums[i] = sum;
    }
    float read[kWidth];
    simd::store(simd::sums_of_rows(sums), read);
    for (int64_t i = 0; i < values; ++i) head.out[first + i] += read[i];
  }
}

// Convolves and activates this thread's share of values, keys and queries.
void convolve_all(const Mixer& mixer, const MixerTokens& tokens, const Worker& worker) {
  const Range share = worker.partition(mixer.convolution.channels, kChannels);
  for (int64_t first = share.begin; first < share.end; first += kChannels) {
    const int64_t channels = std::min(kChannels, share.end - first);
    float* x = tokens.projected + mixer.value.offset + first;
    convolve(mixer.convolution, first, channels, x, tokens.count, tokens.stride, tokens.states[0]);
    for (int64_t token = 0; token < tokens.count; ++token, x += tokens.stride) {
      activate(kSilu, nullptr, nullptr, x, {0, channels}, x);
    }
  }
}

void run_head(const Mixer& mixer, const MixerTokens& tokens, int64_t index, float* keep, float* learn) {
  const int64_t shared = mixer.heads / mixer.key_heads, group = index / shared, size = mixer.value_size;
  const auto part = [&](const HeadColumns& columns, int64_t offset) {
    return tokens.projected + columns.offset + group * columns.stride + offset;
  };
  const float *value = part(mixer.value, index % shared * size), *decay = part(mixer.decay, index % shared);
  const int64_t inner = mixer.heads * size;
  const float least = float(mixer.least_step), largest = float(mixer.largest_step);
  float* out = tokens.mixed + index * size;
  for (int64_t token = 0; token < tokens.count; ++token) {
    const float step = softplus(decay[token * tokens.stride] + mixer.decay_bias[index]);
    learn[token] = tokens.in_prompt ? std::min(std::max(step, least), largest) : step;
    keep[token] = std::exp(mixer.rate[index] * learn[token]);
    for (int64_t i = 0; i < size; ++i) out[token * inner + i] = mixer.skip[index] * value[token * tokens.stride + i];
  }
  const Head head{value,
                  part(mixer.key, 0),
                  part(mixer.query, 0),
                  keep,
                  learn,
                  tokens.states[1] + index * size * mixer.key_size,
                  out,
                  mixer.key_size,
                  size,
                  tokens.stride,
                  inner};
  if (tokens.count == 1) {
    run_token(head);
  } else {
    run_tokens(head, tokens.count);
  }
}

// Multiplies outputs by their activated gates, and norms them, which comes first with `norm_before_gate`.
void finish(const Mixer& mixer, const MixerTokens& tokens, int64_t token, int64_t group) {
  const int64_t inner = mixer.heads * mixer.value_size, size = inner / mixer.norm_groups, first = group * size;
  float* out = tokens.mixed + token * inner + first;
  const float* gate = tokens.projected + token * tokens.stride + mixer.gate.offset + first;
  const auto normalize = [&] { apply_norm(mixer.norm, moments(mixer.norm, out, size), first, out, size, out); };
  if (mixer.norm_before_gate) normalize();
  activate(kSilu, nullptr, gate, out, {0, size}, out);
  if (!mixer.norm_before_gate) normalize();
}

}  // namespace

int64_t scratch_size(const Mixer&, int64_t count) { return 2 * count; }

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker) {
  convolve_all(mixer, tokens, worker);
  worker.barrier();
  const Range heads = worker.partition(mixer.heads);
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    run_head(mixer, tokens, head, scratch, scratch + tokens.count);
  }
  worker.barrier();
  const Range parts = worker.partition(tokens.count * mixer.norm_groups);
  for (int64_t i = parts.begin; i < parts.end; ++i) finish(mixer, tokens, i / mixer.norm_groups, i % mixer.norm_groups);
}

}  // namespace mamba2
