// Recurrent mixers: what each carries from token to token is a state of constant size, in float32.
//
// A mixer's projections are multiplied with the others of a step or prompt. `mix` then takes their outputs through the
// states, one token or several in order, and leaves the input of the output projection.

#pragma once

#include "abi.h"
#include "threads.h"

// Tokens of one stream, in their order.
struct MixerTokens {
  float* projected;      // [count][stride]: outputs of the mixer's projections; overwritten
  int64_t count, stride;
  float* const* states;  // of the mixer and the stream; updated
  float* mixed;          // [count][columns of the output projection]: gets its input
  bool in_prompt;        // there are several tokens, or the first one of the stream
};

// Does this thread's share; all threads of a job call it with the same arguments, and it may let them wait for each
// other. Results do not depend on the number of threads. `scratch` is `scratch_size` numbers of this thread's own.
void mix(const Mixer& mixer, const MixerTokens& tokens, float* scratch, const Worker& worker);

// Numbers of scratch for up to `count` tokens.
int64_t scratch_size(const Mixer& mixer, int64_t count);

// Numbers of a state, and how many states a mixer has.
inline int64_t state_size(const Mixer& mixer, int64_t state) {
  return state ? mixer.heads * mixer.key_size * mixer.value_size : mixer.convolution.channels * mixer.convolution.kernel;
}
inline int64_t state_count(const Mixer& mixer) {
  return mixer.kind == kNoMixer ? 0 : mixer.kind == kShortConvolution ? 1 : 2;
}

// Rows of all projections.
inline int64_t projected_size(const Mixer& mixer) {
  int64_t rows = 0;
  for (int64_t i = 0; i < mixer.in_count; ++i) rows += mixer.in[i].rows;
  return rows;
}

inline bool attends(const Layer& layer) { return layer.qkv_count > 0; }
inline bool has_mixer(const Layer& layer) { return layer.mixer.kind != kNoMixer; }
inline bool has_mlp(const Layer& layer) { return layer.down.weights || layer.experts.router.weights; }

// The first matrix that a layer reads.
inline const Matrix& first_matrix(const Layer& layer) {
  if (attends(layer)) return layer.qkv[0];
  if (has_mixer(layer)) return layer.mixer.in[0];
  return layer.gate.weights ? layer.gate : layer.up;
}
