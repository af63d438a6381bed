// A decode step: one token per stream, from embedding to logits.
//
// A step is one job of all threads. Each thread multiplies some rows of every matrix and attends to some slots of every
// head. Barriers separate the phases of a layer:
//
//   normed x -> queries, keys, values | attend | merge, score, output projection | evict, MLP up | MLP down |
//
// A recurrent mixer (mixer.h) goes through the same phases, alone or beside attention.
//
// There is another one behind latent vectors, two around the norm of an MLP's inner vector, and two more for embeddings
// of layers. Versions of the residual stream have more of them before the first layer and after the last one.
// Experts are multiplied with the MLP, after another barrier behind the router. The rows of all that were chosen are
// divided among the threads as if they were one matrix.
//
// With one stream every thread repeats the small operations (norms, quantization, merging), because that is faster than
// waiting. With several streams the threads divide them, at the cost of another barrier. A step allocates nothing.
//
// Beside other processes one thread runs the step of a stream, and others assist it with products (assistants.h).
//
// A pass takes several tokens of one stream, which can be taken back, as if each was a step: products read every matrix
// once for all of them, and each head takes one token after another through its slots (journal.h). Recurrent mixers take
// them through a copy of their states, one layer at a time; the states themselves follow when it is known how many of the
// tokens are kept.

#pragma once

#include "assistants.h"
#include "attention.h"
#include "experts.h"
#include "journal.h"
#include "matrix.h"
#include "mixer.h"
#include "thread_tuner.h"
#include "norm_rope.h"

class Step {
 public:
  explicit Step(const Model& model) : model_(model) {}

  // Processes a token of each stream. Writes logits [count][vocab_size] and, unless null, the residual stream before
  // every layer and after the last one: trace [layers + 1][count][hidden_size].
  void run(const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads);

  // Takes the tokens of `streams` [count], which are one stream at one token after another: they differ in tokens and
  // evictions. `keep` has to follow before anything else reads or changes the stream.
  void pass(const Stream* streams, int64_t count, int64_t threads);

  // Writes logits [count][vocab_size] after some tokens of the last pass, those of steps.
  void pass_logits(int64_t first, int64_t count, float* logits, int64_t threads);

  // Keeps so many tokens of the last pass, at least one, and takes the others back.
  void keep(int64_t count, int64_t threads);

  // What the last pass has noted for that.
  int64_t pass_bytes() const { return journal_.bytes() + 4 * kept_size_; }

  // How threads share the work from now on, one of `Sharing`.
  void share(int64_t sharing) { sharing_ = sharing; }

 private:
  // The residual stream and activations of every token: shared by all threads, or one copy per thread.
  struct State {
    Buffer<float> x, factors;
    Vectors normed, attended, mixed;
    Vectors latent[2];
    Vectors router_input, expert_input;  // of experts beside the MLP
    Buffer<float> versions;              // [rows][versions][hidden_size] (altup.h)
    Vectors version_inputs, laurel;
  };

  // What buffers have room for.
  struct Room {
    int64_t streams = 0, attended = 0, threads = 0, slots = 0;  // `attended` at once
  };

  void begin(const Stream* streams, int64_t count, float* logits, float* trace);
  void reserve(int64_t threads);
  void reserve_pass();
  void run_worker(const Worker& worker);
  // Multiplies this thread's rows, in whole units; with assistants all rows.
  void multiply(const Worker& worker, const Product* products, int64_t count, const Vectors& vectors,
                int64_t unit = packed::kRows) const;
  void multiply(const Worker& worker, const Product& product, const Vectors& vectors) const {
    multiply(worker, &product, 1, vectors);
  }
  // Multiplies some rows of a matrix with one of some vectors; assisted if they are all rows.
  void multiply_rows(const Matrix& matrix, const Vectors& vectors, int64_t vector, Range rows, float* out,
                     int64_t stride) const;
  // Multiplies some rows of a matrix with some vectors, each as if it was a single one if this is a pass.
  void multiply_vectors(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                        int64_t stride) const;
  void embed(const Worker& worker);
  void embed_for_layers(const Worker& worker);
  void split_versions(const Worker& worker);
  void merge_versions(const Worker& worker, const Layer& last);
  void project(const Worker& worker, const Layer& layer);
  void mix_tokens(const Worker& worker, const Layer& layer);
  void mix_ahead(const Worker& worker, const Layer& layer);
  void select_slots(const Layer& layer);
  void multiply_out(const Worker& worker, const Layer& layer);
  void prepare(const Layer& layer, int64_t stream, int64_t head, float* queries, float* key, float* value,
               Angles& angles);
  void mlp(const Worker& worker, const Layer& layer);
  void multiply_up(const Worker& worker, const Layer& layer);
  void norm_inner(const Worker& worker, const Layer& layer, Range columns);
  void add_embedding(const Worker& worker, const Layer& layer);
  void choose_experts(const Worker& worker, const Experts& experts);
  void multiply_experts_up(const Worker& worker, const Layer& layer);
  void multiply_down(const Worker& worker, const Layer& layer);
  void add_experts(const Worker& worker, const Experts& experts, int64_t stream, Range rows);
  void output(const Worker& worker);
  void write_trace(int64_t layer, int64_t stream, const float* x, const Worker& worker) const;
  void add(const Norm& norm, const float* delta, float* x, const Worker& worker);  // x += norm(delta)
  void add_layer(const Layer& layer, float* x, int64_t stream, const Worker& worker);
  void add_mlp(const Layer& layer, float* x, int64_t stream, const Worker& worker);

  // Calls `body(state, stream)` for this thread's streams; returns when all streams are done.
  template <class Body>
  void for_each_stream(const Worker& worker, Body body) {
    if (count_ == 1) return body(state(worker), int64_t(0));
    const Range range = worker.partition(count_);
    for (int64_t stream = range.begin; stream < range.end; ++stream) body(states_[0], stream);
    worker.barrier();
  }
  State& state(const Worker& worker) { return states_[count_ == 1 ? worker.index : 0]; }
  static bool beside(const Experts& experts) { return experts.output_norm.kind != kNoNorm; }
  // The experts [streams][chosen] of a layer; every thread chooses for itself.
  Choice* choices(const Worker& worker) { return choices_.at(worker.index * reserved_.streams * chosen_); }

  const Model model_;
  ThreadTuner tuner_;
  int64_t sharing_ = kTuned;
  Assistants* assistants_ = nullptr;  // of this step, if any
  const Stream* streams_ = nullptr;
  float *logits_ = nullptr, *trace_ = nullptr;
  int64_t count_ = 0;
  Room reserved_;

  DecodeAttention attention_;
  std::vector<State> states_;
  std::vector<const Slots*> slots_;     // of the current layer, by stream
  std::vector<int32_t> token_indices_;  // of each stream's new token
  std::vector<Angles> angles_;          // [threads][streams]
  int64_t qkv_size_ = 0, inner_ = 0;    // maximum over layers
  int64_t projected_ = 0, mixed_size_ = 0, mixer_scratch_size_ = 0;  // the same
  int64_t experts_ = 0, chosen_ = 0;    // the same
  int64_t laurel_rank_ = 0;             // the same
  Buffer<float> qkv_, attention_delta_, mlp_delta_, gate_, up_, scratch_;
  Buffer<float> expert_delta_, sums_;                   // [streams][hidden_size], [threads][hidden_size]
  Buffer<float> layer_embeddings_, layer_projections_;  // [streams][layers][size]
  Buffer<float> projected_versions_;                    // [streams][versions - 1][hidden_size]
  Buffer<float> laurel_, laurel_delta_;                 // [streams][rank], [streams][hidden_size]
  Buffer<float> mixer_projected_, mixed_;               // [streams][size]
  Buffer<float> mixer_scratch_;                         // [threads][size]
  Buffer<float> router_logits_, scores_;  // [streams][experts], [threads][2][experts]
  Buffer<Choice> choices_;                // [threads][streams][chosen]
  std::vector<Moments> moments_;          // [threads][streams]
  Vectors activated_, expert_activated_;  // of the MLP, and of [streams][chosen]

  bool passes_ = false;  // the tokens are those of a pass, whose streams are one
  Journal journal_;
  float* const* states_before_ = nullptr;  // recurrent states, before a pass
  std::vector<int64_t> kept_at_;           // where each layer's part of `kept_` begins
  int64_t kept_size_ = 0;
  Buffer<float> kept_, states_ahead_;  // what goes into mixers; the states of a layer
  Buffer<float> attended_;             // [streams][columns of the output projection]
};
