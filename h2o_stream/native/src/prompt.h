// Several new tokens of each stream, from token ids to logits.
//
// The layers follow one another: queries, keys and values of all tokens, attention and eviction (prefill.h), then the
// rest of the layer. Every matrix is read once for a block of tokens. Experts get the tokens of a block that go through
// them; threads take whole ones, or if there are few some rows of each.

#pragma once

#include <vector>

#include "experts.h"
#include "matrix.h"
#include "mixer.h"
#include "norm_rope.h"
#include "prefill.h"
#include "threads.h"

class Prompt {
 public:
  // `lengths` [count] tokens of each of `count` streams, `new_tokens` at most and, if it is null, of each, with
  // evictions after every `chunk` of them. `limits` is [count][groups of all layers][chunks of `new_tokens`]: the
  // tokens that a group may hold after each chunk.
  Prompt(const Model& model, const Stream* streams, int64_t count, const int64_t* lengths, int64_t new_tokens,
         int64_t chunk, const int64_t* limits, int64_t threads);

  virtual ~Prompt() = default;

  // Whether there are slots for all tokens to keep.
  bool fits();

  // Takes `tokens`, those of one stream after those of another, through the model. Writes logits
  // [count][keep][vocab_size], those of the last `keep` tokens of each stream. For each layer that attends, one after
  // another, `copied` gets what `measure_copied` does, and `projected` the queries [tokens][query_heads][head_size] and
  // keys [tokens][kv_heads][head_size] of all tokens; null for nothing.
  void run(const int64_t* tokens, int64_t keep, float* logits, float* copied, float* projected);

  // Its parts, so that others need not wait for all layers: the embeddings, and each layer in turn. The last one writes
  // the logits.
  void begin(const int64_t* tokens);
  void run_layer(int64_t index, int64_t keep, float* logits, float*& copied, float*& projected);

 protected:
  // Attends to the slots of a layer and evicts.
  virtual void attend_slots(const Layer& layer);

  void select_slots(const Layer& layer);
  void reserve();
  void embed(const int64_t* tokens);
  void embed_for_layers(const int64_t* tokens);
  void split_versions();
  void merge_versions();
  void add_laurel(const Layer& layer, int64_t first, int64_t size);
  void mix_tokens(const Layer& layer);
  void project(const Layer& layer, int64_t first, int64_t size);
  void run_mixer(const Mixer& mixer, int64_t first, int64_t size);
  void multiply_out(const Layer& layer, int64_t first, int64_t size);
  void project_latent(const Layer& layer, int64_t size);
  void gate(const Layer& layer);
  void drop_all_but(int64_t keep);
  void finish(const Layer& layer);
  void feed_mlp(const Layer& layer, int64_t size);
  void feed_experts(const Layer& layer, int64_t first, int64_t size);
  void feed_experts_beside(const Layer& layer, int64_t first, int64_t size);
  void add_experts(const Layer& layer, int64_t size, float* sums);
  void run_experts(const Layer& layer, Range experts, int64_t used);
  void feed_expert(const Layer& layer, int64_t index, int64_t threads);
  void add_outputs(const Experts& experts, Range added, int64_t size, float* sums);
  void group_by_expert(const Experts& experts, int64_t size);
  void add_embedding(const Layer& layer, int64_t first, int64_t size);
  void output(float* logits);
  void advance();

  int64_t index_of(const Layer& layer) const { return &layer - model_.layers; }
  // Keys and values [tokens][heads][size] of a layer, which other layers may share.
  Buffer<float>& keys_of_layer(const Layer& layer) { return keys_[buffers_[layer.kv_source]]; }
  Buffer<float>& values_of_layer(const Layer& layer) { return values_[buffers_[layer.kv_source]]; }

  prefill::LayerSlots slots_of(const Layer& layer);
  prefill::NewTokens tokens_of(const Layer& layer);

  // Calls `body(first, size)` for every block of tokens.
  template <class Body>
  void for_each_block(Body body) const {
    for (int64_t first = 0; first < count_; first += kBlock) body(first, std::min(kBlock, count_ - first));
  }
  // Calls `body(index, worker)` for every token of a block.
  template <class Body>
  void for_each_token(int64_t size, Body body) const {
    for_each_token(size, threads_, body);
  }
  template <class Body>
  static void for_each_token(int64_t size, int64_t threads, Body body) {
    parallel(std::min(threads, size), [&](const Worker& worker) {
      const Range tokens = worker.partition(size);
      for (int64_t i = tokens.begin; i < tokens.end; ++i) body(i, worker);
    });
  }

  // Tokens that go through the MLP or a projection at a time, so that activations do not grow with the prompt.
  static constexpr int64_t kBlock = 512;

  // Tokens of experts at a time, at least those of a block; and experts a thread of which each takes whole ones.
  static constexpr int64_t kExpertRows = 2 * kBlock, kMinExpertsPerThread = 8;

  const Model& model_;
  const Stream* streams_;
  const int64_t stream_count_, new_tokens_, chunk_;
  const int64_t* limits_;
  const int64_t threads_;
  bool in_bfloat16_ = false;                    // whether products may be rounded to bfloat16
  bool rounds_logits_ = false;                  // whether that of the output layer may, too
  int64_t count_;                               // tokens in the residual stream
  std::vector<const Slots*> slots_;             // of the current layer, by stream
  std::vector<int64_t> counts_;                 // new tokens, by stream
  std::vector<int64_t> starts_;                 // first tokens of the streams, and the end of the last one
  std::vector<int32_t> stream_of_;              // by token
  int64_t strides_[9];                          // of the current layer's query, key and value
  int64_t groups_, qkv_size_ = 0, inner_ = 0;   // groups of all layers; maxima over layers
  int64_t latent_ = 0, gate_width_ = 0;         // the same
  int64_t mixer_scratch_size_ = 0;              // the same
  int64_t experts_ = 0, chosen_ = 0;            // the same
  int64_t expert_inner_ = 0;                    // the same

  Buffer<float> x_;                                                       // the residual stream [tokens][hidden_size]
  Buffer<float> query_, attended_;                                        // [tokens][heads][size]
  Buffer<float> gates_;                                                   // [tokens][gate_width_]: as in `qkv_`
  Buffer<float> layer_embeddings_, layer_projections_;                    // [tokens][layers][size]
  Buffer<float> versions_;                                                // [tokens][versions][hidden_size] (altup.h)
  Buffer<float> projected_versions_;                                      // [block][versions - 1][hidden_size]
  std::vector<int64_t> buffers_;                                          // of the keys of each layer: 0 is for those
  std::vector<Buffer<float>> keys_, values_;                              // that no other layer shares
  Buffer<int32_t> indices_;                                               // [tokens]: token indices
  Buffer<float> normed_, qkv_, attention_delta_, gate_, up_, mlp_delta_;  // of a block
  Buffer<float> latents_, expert_sums_;                                   // of a block
  Buffer<float> mixed_;                                                   // [tokens][columns of the mixer's output]
  Buffer<float> mixed_delta_;                                             // of a block
  Buffer<float> scratch_, mixer_scratch_;                                 // [threads][size]
  Buffer<float> gathered_, expert_delta_;                                 // [tokens of some experts][hidden_size]
  Buffer<float> router_logits_, scores_;                                  // [tokens][experts], [threads][2][experts]
  Buffer<Choice> choices_;                                                // [tokens][chosen]
  Buffer<int64_t> rows_;                                                  // [tokens][chosen]: in `expert_delta_`
  std::vector<std::vector<int64_t>> tokens_by_expert_;                    // places in `choices_`
  std::vector<int64_t> first_rows_;                                       // of experts, in `expert_delta_`
  std::vector<Angles> angles_;                                            // [threads]
};
