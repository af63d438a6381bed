// What a token sees.

#pragma once

#include <algorithm>

#include "abi.h"

// The first token index that a token attends to.
inline int64_t first_visible(const AttentionLayer& layer, int64_t token) {
  const int64_t window = layer.sliding_window;
  if (!window) return 0;
  return layer.chunked ? token / window * window : std::max<int64_t>(token - window + 1, 0);
}
