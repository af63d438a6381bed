// Mamba-2: a state that decays by an amount of its own for every token and head (arXiv 2405.21060).

#pragma once

#include "mixer.h"

namespace mamba2 {

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker);

int64_t scratch_size(const Mixer& mixer, int64_t count);

}  // namespace mamba2
