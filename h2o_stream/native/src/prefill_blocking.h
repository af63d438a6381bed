// Block sizes of prefill. They depend on shapes alone, never on the number of threads.

#pragma once

#include <algorithm>

#include "gemm.h"

namespace prefill {

// Keys prepared together: whole panels for every instruction set.
constexpr int64_t kKeyBlock = 64;
static_assert(kKeyBlock % gemm::kPanel == 0);

// Target number of logit rows per block, so that a block fits into the L2 cache.
constexpr int64_t kBlockRows = 48;

// Values multiplied together, so that they fit into the L1 cache.
constexpr int64_t kValueBlock = 64;

// Maximum number of splits of the query blocks; each split accumulates scores of its own.
constexpr int64_t kMaxSplits = 16;

// Queries older than this within a chunk decay no further, so that a prompt read in one chunk is scored by all of it
// (h2o_stream/cache/policies/accumulated.py).
constexpr int64_t kMaxDecaySteps = 64;

// A power of two, because long-term scores look at 64 queries together.
inline int64_t block_queries(int64_t groups) {
  int64_t queries = 1;
  while (queries < 32 && 2 * queries * groups <= kBlockRows) queries *= 2;
  return queries;
}

inline int64_t block_count(int64_t new_tokens, int64_t groups) {
  const int64_t queries = block_queries(groups);
  return (new_tokens + queries - 1) / queries;
}

inline int64_t split_count(int64_t new_tokens, int64_t groups) {
  return std::min(block_count(new_tokens, groups), kMaxSplits);
}

}  // namespace prefill
