// Compares the numbers that a description has copied with those of the model.

#include <algorithm>
#include <cstring>

#include "abi.h"

// Whether the two ranges of each pair have equal bytes: 1 or 0.
extern "C" int64_t h2o_equal(const Bytes* pairs, int64_t count) {
  return std::all_of(pairs, pairs + count,
                     [](const Bytes& pair) { return !std::memcmp(pair.ours, pair.theirs, pair.count); });
}
