// How the work of a chunk is cut: by shapes alone, never by the number of threads.

#pragma once

#include <algorithm>

#include "gemm.h"

namespace prefill {

// Places that are prepared together: whole panels of every instruction set.
constexpr int64_t kKeyBlock = 64;
static_assert(kKeyBlock % gemm::kPanel == 0);

// Rows of logits, a query head of a token each, that a block has if it can: what stays in the second cache.
constexpr int64_t kBlockRows = 48;

// Places whose values are multiplied at a time: what stays in the first cache.
constexpr int64_t kValueBlock = 64;

// Blocks of queries are dealt out to at most so many bands, which each add up the scores of theirs.
constexpr int64_t kMaxSplits = 16;

// Tokens of a chunk after which its queries count no less: a prompt that is read whole is judged by all of it
// (h2o_stream/cache/policies/accumulated.py).
constexpr int64_t kMaxDecaySteps = 64;

// Queries of a block: a power of two, for the long-term score looks at 64 queries together.
inline int64_t block_queries(int64_t groups) {
  int64_t queries = 1;
  while (queries < 32 && 2 * queries * groups <= kBlockRows) queries *= 2;
  return queries;
}

inline int64_t block_count(int64_t new_tokens, int64_t groups) {
  const int64_t queries = block_queries(groups);
  return (new_tokens + queries - 1) / queries;
}

inline int64_t split_count(int64_t new_tokens, int64_t groups) { return std::min(block_count(new_tokens, groups), kMaxSplits); }

}  // namespace prefill
