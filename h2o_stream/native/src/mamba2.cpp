#include "mamba2.h"

#include "activation.h"
#include "convolution.h"
#include "norm_rope.h"

namespace mamba2 {

namespace {

using simd::Floats;
using simd::kWidth;

// Tokens whose outputs are added up together, and vectors of a state's row that stay in registers meanwhile.
constexpr int64_t kTokens = 16, kVectors = 4;

// What a head does with each token.
struct Head {
  const float *value, *key, *query;  // of the first token: [value_size], [key_size], [key_size]
  const float *keep, *learn;         // [count]
  float *state, *out;                // [value_size][key_size]; of the first token
  int64_t stride, out_stride;
};

Floats load_some(const float* from, int64_t count) {
  float padded[kWidth] = {};
  std::copy_n(from, std::min(count, kWidth), padded);
  return simd::load(padded);
}

// Takes tokens through `size` columns of a row of the state, from `first` on, and adds its products with the queries, not
// yet added up across a vector, to sums[token * kWidth]. `size` is a whole number of vectors if kWhole, or less than one.
template <int64_t vectors, bool kWhole>
void run_row(const Head& head, Range tokens, int64_t value, float* state, int64_t first, int64_t size, Floats* sums) {
  const auto load = [&](const float* from, int64_t v) {
    return kWhole ? simd::load(from + v * kWidth) : load_some(from, size);
  };
  Floats row[vectors];
  for (int64_t v = 0; v < vectors; ++v) row[v] = load(state + first, v);
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    const float *key = head.key + token * head.stride + first, *query = head.query + token * head.stride + first;
    const float keep = head.keep[token], input = head.learn[token] * head.value[token * head.stride + value];
    Floats sum = sums[(token - tokens.begin) * kWidth];
    for (int64_t v = 0; v < vectors; ++v) {
      row[v] = keep * row[v] + input * load(key, v);
      sum += row[v] * load(query, v);
    }
    sums[(token - tokens.begin) * kWidth] = sum;
  }
  if (kWhole) {
    for (int64_t v = 0; v < vectors; ++v) simd::store(row[v], state + first + v * kWidth);
  } else {
    float padded[kWidth];
    simd::store(row[0], padded);
    std::copy_n(padded, size, state + first);
  }
}

// Takes tokens through up to kWidth values from `first` on, and adds to what is read of them.
void run_values(const Mixer& mixer, const Head& head, Range tokens, int64_t first) {
  const int64_t size = mixer.key_size, values = std::min(kWidth, mixer.value_size - first);
  alignas(64) Floats sums[kTokens * kWidth] = {};
  for (int64_t i = 0; i < values; ++i) {
    float* state = head.state + (first + i) * size;
    int64_t column = 0;
    for (; column + kVectors * kWidth <= size; column += kVectors * kWidth) {
      run_row<kVectors, true>(head, tokens, first + i, state, column, kVectors * kWidth, sums + i);
    }
    for (; column + kWidth <= size; column += kWidth) {
      run_row<1, true>(head, tokens, first + i, state, column, kWidth, sums + i);
    }
    if (column < size) run_row<1, false>(head, tokens, first + i, state, column, size - column, sums + i);
  }
  for (int64_t token = tokens.begin; token < tokens.end; ++token) {
    float read[kWidth], *out = head.out + token * head.out_stride + first;
    simd::store(simd::sums_of_rows(sums + (token - tokens.begin) * kWidth), read);
    for (int64_t i = 0; i < values; ++i) out[i] += read[i];
  }
}

// Convolves and activates this thread's share of values, keys and queries.
void convolve_all(const Mixer& mixer, const MixerTokens& tokens, const Worker& worker) {
  const Range share = worker.partition(mixer.convolution.channels, kChannels);
  for (int64_t first = share.begin; first < share.end; first += kChannels) {
    const int64_t channels = std::min(kChannels, share.end - first);
    float* x = tokens.projected + mixer.value.offset + first;
    convolve(mixer.convolution, first, channels, x, tokens.count, tokens.stride, tokens.states[0]);
    for (int64_t token = 0; token < tokens.count; ++token, x += tokens.stride) activate(kSilu, nullptr, nullptr, x, {0, channels}, x);
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
  const Head head{value,  part(mixer.key, 0), part(mixer.query, 0), keep, learn, tokens.states[1] + index * size * mixer.key_size,
                  out, tokens.stride, inner};
  for (int64_t first = 0; first < tokens.count; first += kTokens) {
    const Range some{first, std::min(first + kTokens, tokens.count)};
    for (int64_t i = 0; i < size; i += kWidth) run_values(mixer, head, some, i);
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
