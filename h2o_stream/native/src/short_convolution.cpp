#include "short_convolution.h"

#include "convolution.h"

namespace short_convolution {

void mix(const Mixer& mixer, const MixerTokens& tokens, const Worker& worker) {
  const int64_t size = mixer.convolution.channels;
  const Range share = worker.partition(size, kChannels);
  for (int64_t first = share.begin; first < share.end; first += kChannels) {
    const int64_t channels = std::min(kChannels, share.end - first);
    float *x = tokens.projected + 2 * size + first, *mixed = tokens.mixed + first;
    for (int64_t token = 0; token < tokens.count; ++token) {
      const float* gate = tokens.projected + token * tokens.stride + first;
      for (int64_t i = 0; i < channels; ++i) x[token * tokens.stride + i] *= gate[i];
    }
    convolve(mixer.convolution, first, channels, x, tokens.count, tokens.stride, tokens.states[0]);
    for (int64_t token = 0; token < tokens.count; ++token) {
      const float* gate = tokens.projected + token * tokens.stride + size + first;
      for (int64_t i = 0; i < channels; ++i) mixed[token * size + i] = gate[i] * x[token * tokens.stride + i];
    }
  }
}

}  // namespace short_convolution
