#include "mixer.h"

#include "short_convolution.h"

void mix(const Mixer& mixer, const MixerTokens& tokens, float*, const Worker& worker) {
  switch (mixer.kind) {
    case kShortConvolution: return short_convolution::mix(mixer, tokens, worker);
  }
}

int64_t scratch_size(const Mixer&, int64_t) { return 0; }
