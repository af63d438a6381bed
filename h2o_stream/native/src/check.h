// Relations of the numbers in a model's description and in slots that all other code trusts: with others it would read
// or write behind a buffer. How much memory is behind a pointer is checked by who makes it (pointers.py).

#pragma once

#include <exception>

#include "abi.h"

// What cannot be addressed; `h2o_refusal` tells it.
class Refused : public std::exception {
 public:
  explicit Refused(const char* reason);
};

// What functions return instead of 0 then.
constexpr int64_t kRefused = 3;

// Checks a model without the fields that depend on a cache; throws `Refused`.
void check_model(const Model& model);

// Checks the slots [groups] of a stream in a layer; throws `Refused`.
void check_slots(const AttentionLayer& layer, const Slots* slots, int64_t groups);

// The same for all layers of streams.
void check_streams(const Model& model, const Stream* streams, int64_t count);
