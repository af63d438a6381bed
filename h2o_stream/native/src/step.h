// A whole decode step: one token of each stream, from its embedding to its logits.
//
// One job of all threads. Each multiplies some rows of every matrix and attends to some slots of every head. Between
// the phases of a layer they meet at barriers:
//
//   normed x -> queries, keys, values | attend | merge, score, output projection | evict, MLP up | MLP down |
//
// What is small (norms, rounding, merging) every thread does for itself where there is one stream: that is quicker than
// to wait for it. With several streams the threads share them and meet once more. Nothing is allocated in a step.

#pragma once

#include "attention.h"
#include "matrix.h"
#include "thread_tuner.h"
#include "norm_rope.h"

class Step {
 public:
  explicit Step(const Model& model) : model_(model) {}

  // Takes a token of each stream; leaves logits [count][vocabulary] and, unless null, the residual stream in front of
  // every layer and behind the last: trace [layers + 1][count][hidden].
  void run(const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads);

 private:
  // The residual stream of every token and what is made of it: one for all threads, or one for each.
  struct State {
    Buffer<float> x, factors;
    Vectors normed, attended;
  };

  void reserve(int64_t threads);
  void work(const Worker& worker);
  void embed(const Worker& worker);
  void attention(const Worker& worker, const Layer& layer);
  void prepare(const Layer& layer, int64_t stream, int64_t head, float* queries, float* key, float* value,
               Angles& angles);
  void mlp(const Worker& worker, const Layer& layer);
  void activate(const Layer& layer, int64_t stream, Range columns);
  void output(const Worker& worker);
  void write_trace(int64_t layer, int64_t stream, const float* x, const Worker& worker) const;
  void add(const Norm& norm, float* delta, float* x, const Worker& worker);
  void add_layer(const Layer& layer, float* x, int64_t stream, const Worker& worker);

  // Calls `body(state, stream)` for the streams that are a thread's; when it goes on it may use all of them.
  template <class Body>
  void for_each_stream(const Worker& worker, Body body);
  State& state(const Worker& worker) { return states_[count_ == 1 ? worker.index : 0]; }

  const Model model_;
  ThreadTuner tuner_;
  const Stream* streams_ = nullptr;
  float *logits_ = nullptr, *trace_ = nullptr;
  int64_t count_ = 0;
  int64_t reserved_streams_ = 0, reserved_threads_ = 0, reserved_slots_ = 0;

  DecodeAttention attention_;
  std::vector<State> states_;
  std::vector<const Slots*> slots_;  // of the layer that is computed, by stream
  std::vector<int32_t> token_indices_;         // token index of each stream's new token
  std::vector<Angles> angles_;       // [threads][streams]
  int64_t qkv_size_ = 0, inner_ = 0;  // the largest of any layer
  Buffer<float> qkv_, attention_delta_, mlp_delta_, gate_, up_, scratch_;
  Vectors activated_;
};
