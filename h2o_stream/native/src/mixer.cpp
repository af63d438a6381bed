#include "mixer.h"

#include "gated_delta.h"
#include "short_convolution.h"

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker) {
  switch (mixer.kind) {
    case kShortConvolution: return short_convolution::mix(mixer, tokens, worker);
    case kGatedDelta: return gated_delta::mix(mixer, tokens, scratch, worker);
  }
}

int64_t scratch_size(const Mixer& mixer, int64_t count) {
  return mixer.kind == kGatedDelta ? gated_delta::scratch_size(mixer, count) : 0;
}
