// Relations of the numbers in a model's description and in slots that all other code trusts: with others it would read
// or write behind a buffer. How much memory is behind a pointer is checked by who makes it (pointers.py).

#pragma once

#include <exception>

#include "abi.h"

// A part that cannot be addressed, which `h2o_refusal` names.
class Refused : public std::exception {
 public:
  explicit Refused(const char* part);
};

// All of a model but the fields that depend on a cache. All checks throw `Refused`.
void check_model(const Model& model);

// The slots [groups] of a stream in a layer.
void check_slots(const AttentionLayer& layer, const Slots* slots, int64_t groups);

// The same for all layers of streams.
void check_streams(const Model& model, const Stream* streams, int64_t count);

// Whether there are embeddings of tokens.
void check_tokens(const Model& model, const int64_t* tokens, int64_t count);

// Runs what returns 0 or a code of its own. Returns 1 instead if it is out of memory, 3 if it has refused something.
template <class Function>
int64_t code_of(Function function) {
  try {
    return function();
  } catch (const Refused&) {
    return 3;
  } catch (const std::exception&) {
    return 1;
  }
}
