// How much heads attend to the previous occurrence of the present token, in a text that is read twice.

#pragma once

#include "abi.h"

// The mean attention of the second half of `tokens` to the previous occurrence and to the token after it.
//
// `queries` and `keys` are [tokens][heads][head_size], rotated by their positions. Writes [kv_heads].
void measure_copied(const AttentionLayer& layer, const float* queries, const float* keys, int64_t tokens,
                    float* attention, int64_t threads);
