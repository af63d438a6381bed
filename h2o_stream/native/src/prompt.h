// A prompt, from token ids to logits, except for the attention of its layers: that belongs to the cache (prefill.h).
//
// The caller alternates: `begin`, then for every layer `project` and `finish` with the attention of what was projected,
// then `output`. Every matrix is read once for a block of tokens.

#pragma once

#include <vector>

#include "matrix.h"
#include "norm_rope.h"

class Prompt {
 public:
  explicit Prompt(const Model& model) : model_(model) {}

  // Embeds `count` tokens; `indices` are their token indices.
  void begin(const int64_t* tokens, const int32_t* indices, int64_t count, int64_t threads);

  // Writes what a layer attends with: query [count][Hq][D], key [count][Hkv][D], value [count][Hkv][value size].
  void project(int64_t layer, float* query, float* key, float* value);

  // Adds a layer's attention [count][Hq * value size] and its MLP to the residual stream.
  void finish(int64_t layer, const float* attended);

  // Writes the logits [count][vocab_size] of the tokens with these numbers.
  void output(const int64_t* chosen, int64_t count, float* logits);

 private:
  void reserve(int64_t count, int64_t threads);
  template <class Body>
  void for_each_block(Body body) const;
  template <class Body>
  void for_each_token(int64_t size, Body body) const;

  const Model model_;
  int64_t count_ = 0, threads_ = 1;
  int64_t qkv_size_ = 0, inner_ = 0;                                     // maximum over layers
  Buffer<float> x_;                                                      // the residual stream [count][hidden_size]
  Buffer<int32_t> indices_;                                              // [count]
  Buffer<float> normed_, qkv_, attention_delta_, gate_, up_, mlp_delta_;  // of a block
  Buffer<float> scratch_;                                                // [threads][hidden_size]
  std::vector<Angles> angles_;                                           // [threads]
};
