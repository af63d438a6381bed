#include "gated_delta.h"

#include "activation.h"
#include "convolution.h"
#include "experts.h"
#include "norm_rope.h"

namespace gated_delta {

namespace {

using simd::Floats;
using simd::kWidth;

constexpr float kLengthEpsilon = 1e-6f;  // added to the square of the length of queries and keys

// Vectors of a strip: as many as leave registers for its sums.
#if defined(H2O_AVX512)
constexpr int64_t kVectors = 4;
#else
constexpr int64_t kVectors = 2;
#endif
constexpr int64_t kStrip = kVectors * kWidth;

// What a value head does with each token: `keep` and `learn` are [count].
struct Head {
  const float *query, *key, *value;  // of the first token
  const float *keep, *learn;
  float *state, *out;  // [key_size][value_size]; of the first token
  int64_t count, stride, out_stride;
};

// Takes all tokens through columns [first, first + `columns`) of a head's state, at most kStrip.
template <bool kWhole>
void run_strip(const Mixer& mixer, const Head& head, int64_t first, int64_t columns) {
  const int64_t rows = mixer.key_size, size = mixer.value_size;
  const auto load = [&](const float* from, Floats* to) {
    if (kWhole) {
      for (int64_t v = 0; v < kVectors; ++v) to[v] = simd::load(from + v * kWidth);
    } else {
      float padded[kStrip] = {};
      std::copy_n(from, columns, padded);
      for (int64_t v = 0; v < kVectors; ++v) to[v] = simd::load(padded + v * kWidth);
    }
  };
  const auto store = [&](const Floats* from, float* to) {
    if (kWhole) {
      for (int64_t v = 0; v < kVectors; ++v) simd::store(from[v], to + v * kWidth);
    } else {
      float padded[kStrip];
      for (int64_t v = 0; v < kVectors; ++v) simd::store(from[v], padded + v * kWidth);
      std::copy_n(padded, columns, to);
    }
  };
  float* const state = head.state + first;
  Floats found[kVectors] = {}, values[kVectors], row[kVectors];  // found: the key's product with the state
  for (int64_t i = 0; i < rows; ++i) {
    load(state + i * size, row);
    for (int64_t v = 0; v < kVectors; ++v) found[v] += head.key[i] * row[v];
  }
  for (int64_t token = 0; token < head.count; ++token) {
    const float *query = head.query + token * head.stride, *key = head.key + token * head.stride;
    const float* next = token + 1 < head.count ? key + head.stride : key;
    const float keep = head.keep[token], learn = head.learn[token];
    Floats delta[kVectors], read[kVectors] = {}, found_next[kVectors] = {};
    load(head.value + token * head.stride + first, values);
    for (int64_t v = 0; v < kVectors; ++v) delta[v] = (values[v] - keep * found[v]) * learn;
    for (int64_t i = 0; i < rows; ++i) {
      load(state + i * size, row);
      for (int64_t v = 0; v < kVectors; ++v) {
        row[v] = keep * row[v] + key[i] * delta[v];
        read[v] += query[i] * row[v];
        found_next[v] += next[i] * row[v];
      }
      store(row, state + i * size);
    }
    store(read, head.out + token * head.out_stride + first);
    std::copy_n(found_next, kVectors, found);
  }
}

void run_head(const Mixer& mixer, const Head& head) {
  const int64_t size = mixer.value_size;
  for (int64_t first = 0; first < size; first += kStrip) {
    const int64_t columns = std::min(kStrip, size - first);
    if (columns == kStrip) {
      run_strip<true>(mixer, head, first, columns);
    } else {
      run_strip<false>(mixer, head, first, columns);
    }
  }
}

// Convolves and activates `channels` channels from `first` on, which start at x.
void convolve_part(const Mixer& mixer, const MixerTokens& tokens, int64_t first, int64_t channels, float* x) {
  for (int64_t done = 0; done < channels; done += kChannels) {
    const int64_t size = std::min(kChannels, channels - done);
    convolve(mixer.convolution, first + done, size, x + done, tokens.count, tokens.stride, tokens.states[0]);
  }
  for (int64_t token = 0; token < tokens.count; ++token) {
    float* row = x + token * tokens.stride;
    activate(kSilu, nullptr, nullptr, row, {0, channels}, row);
  }
}

// Divides vectors by their lengths, and multiplies them by a factor.
void normalize(const Mixer& mixer, const MixerTokens& tokens, float* x, float factor) {
  for (int64_t token = 0; token < tokens.count; ++token, x += tokens.stride) {
    float sum = 0;
    for (int64_t i = 0; i < mixer.key_size; ++i) sum += x[i] * x[i];
    const float scale = factor / std::sqrt(sum + kLengthEpsilon);
    for (int64_t i = 0; i < mixer.key_size; ++i) x[i] *= scale;
  }
}

}  // namespace

int64_t scratch_size(const Mixer&, int64_t count) { return 2 * count; }

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker) {
  const int64_t shared = mixer.heads / mixer.key_heads, size = mixer.value_size;
  const int64_t keys = mixer.key_heads * mixer.key_size, inner = mixer.heads * size;
  const Range share = worker.partition(mixer.key_heads);
  for (int64_t group = share.begin; group < share.end; ++group) {
    const auto part = [&](const HeadColumns& columns) {
      return tokens.projected + columns.offset + group * columns.stride;
    };
    float *query = part(mixer.query), *key = part(mixer.key), *value = part(mixer.value);
    convolve_part(mixer, tokens, group * mixer.key_size, mixer.key_size, query);
    convolve_part(mixer, tokens, keys + group * mixer.key_size, mixer.key_size, key);
    convolve_part(mixer, tokens, 2 * keys + group * shared * size, shared * size, value);
    normalize(mixer, tokens, query, 1 / std::sqrt(float(mixer.key_size)));
    normalize(mixer, tokens, key, 1);
    for (int64_t i = 0; i < shared; ++i) {
      const int64_t head = group * shared + i, place = mixer.out_in_turns ? i * mixer.key_heads + group : head;
      float *keep = scratch, *learn = scratch + tokens.count, *out = tokens.mixed + place * size;
      for (int64_t token = 0; token < tokens.count; ++token) {
        const float decay = part(mixer.decay)[token * tokens.stride + i] + mixer.decay_bias[head];
        keep[token] = std::exp(mixer.rate[head] * softplus(decay));
        learn[token] = float(mixer.beta_scale) * sigmoid(part(mixer.beta)[token * tokens.stride + i]);
      }
      run_head(mixer, {query, key, value + i * size, keep, learn, tokens.states[1] + head * mixer.key_size * size, out,
                       tokens.count, tokens.stride, inner});
      for (int64_t token = 0; token < tokens.count; ++token) {
        float* row = out + token * inner;
        apply_norm(mixer.norm, row, size, row);
        activate(kSilu, nullptr, part(mixer.gate) + token * tokens.stride + i * size, row, {0, size}, row);
      }
    }
  }
}

}  // namespace gated_delta
