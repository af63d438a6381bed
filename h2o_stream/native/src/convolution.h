// Causal convolutions of single channels.

#pragma once

#include <algorithm>

#include "abi.h"
#include "threads.h"

// Channels that are convolved at once; a thread's share is a whole number of such blocks.
constexpr int64_t kChannels = 64;

// Replaces x [count][stride] by its convolution, for up to kChannels channels from `first` on, which are the first ones
// of x. `state` [channels][kernel] has the last inputs, the newest last, and is updated.
inline void convolve(const Convolution& convolution, int64_t first, int64_t channels, float* x, int64_t count,
                     int64_t stride, float* state) {
  const int64_t kernel = convolution.kernel;
  alignas(64) float weights[kMaxKernel][kChannels], before[kMaxKernel][kChannels], sums[kChannels];
  for (int64_t i = 0; i < channels; ++i) {
    const float *row = convolution.weight + (first + i) * kernel, *inputs = state + (first + i) * kernel;
    for (int64_t k = 0; k < kernel; ++k) weights[k][i] = row[k], before[k][i] = inputs[k];
  }
  // The input `back` tokens before that of `token`; `before` has those before the first one.
  const auto input = [&](int64_t token, int64_t back) -> const float* {
    return token >= back ? x + (token - back) * stride : before[kernel + token - back];
  };
  for (int64_t i = 0; i < channels; ++i) {
    for (int64_t k = 0; k < kernel; ++k) state[(first + i) * kernel + k] = input(count - 1, kernel - 1 - k)[i];
  }
  for (int64_t token = count - 1; token >= 0; --token) {  // the newest first, so that inputs are still there
    for (int64_t i = 0; i < channels; ++i) sums[i] = convolution.bias ? convolution.bias[first + i] : 0.f;
    for (int64_t k = 0; k < kernel; ++k) {
      const float* inputs = input(token, kernel - 1 - k);
      for (int64_t i = 0; i < channels; ++i) sums[i] += weights[k][i] * inputs[i];
    }
    std::copy_n(sums, channels, x + token * stride);
  }
}
