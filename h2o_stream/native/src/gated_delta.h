// The gated delta rule of Qwen3-Next, Qwen 3.5 and OLMo hybrid (arXiv 2412.06464).
//
// Tokens follow one another, also in a prompt: a strip of a head's state stays in the first cache for all tokens of a
// block, and one pass over it updates it for a token, reads it, and looks up the next token's key.

#pragma once

#include "mixer.h"

namespace gated_delta {

void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker);

int64_t scratch_size(const Mixer& mixer, int64_t count);

}  // namespace gated_delta
