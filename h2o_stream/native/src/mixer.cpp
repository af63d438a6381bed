#include "mixer.h"

#include "denormals.h"
#include "gated_delta.h"
#include "mamba2.h"
#include "short_convolution.h"

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker) {
  const ZeroDenormals zero_denormals;  // states decay towards zero
  switch (mixer.kind) {
    case kShortConvolution: return short_convolution::mix(mixer, tokens, worker);
    case kGatedDelta: return gated_delta::mix(mixer, tokens, scratch, worker);
    case kMamba2: return mamba2::mix(mixer, tokens, scratch, worker);
  }
}

int64_t scratch_size(const Mixer& mixer, int64_t count) {
  switch (mixer.kind) {
    case kGatedDelta: return gated_delta::scratch_size(mixer, count);
    case kMamba2: return mamba2::scratch_size(mixer, count);
    default: return 0;
  }
}
