// LFM2's mixer: a gated convolution over few tokens, whose output is gated, too.

#pragma once

#include "mixer.h"

namespace short_convolution {

void mix(const Mixer& mixer, const MixerTokens& tokens, const Worker& worker);

}  // namespace short_convolution
