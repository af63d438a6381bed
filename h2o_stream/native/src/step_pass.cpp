// Passes: several tokens of a stream at once, and taking them back.

#include "activation.h"
#include "check.h"
#include "step.h"

void Step::pass(const Stream* streams, int64_t count, int64_t threads) {
  begin(streams, count, nullptr, nullptr);
  for (int64_t token = 0; token < count; ++token) token_indices_[token] += int32_t(token);
  passes_ = true, states_before_ = streams->states;
  reserve(threads);
  reserve_pass();
  parallel(sharing_ == kTuned ? tuner_.choose(threads) : threads, [this](const Worker& worker) { run_worker(worker); });
}

void Step::pass_logits(int64_t first, int64_t count, float* logits, int64_t threads) {
  const int64_t vocabulary = model_.vocab_size;
  parallel(threads, [&](const Worker& worker) {
    const Range rows = worker.partition(vocabulary, packed::kRows);
    multiply_vectors(model_.output, states_[0].normed, {first, first + count}, rows, logits, vocabulary);
    for (int64_t i = 0; i < count; ++i) scale_logits(model_, rows, logits + i * vocabulary);
  });
}

void Step::keep(int64_t count, int64_t threads) {
  journal_.undo(count);
  if (!kept_size_) return;
  parallel(threads, [&](const Worker& worker) {
    float* scratch = mixer_scratch_.at(worker.index * mixer_scratch_size_);
    for (int64_t index = 0; index < model_.layer_count; ++index) {
      const Mixer& mixer = model_.layers[index].mixer;
      const int64_t size = projected_size(mixer);
      for (int64_t token = 0; size && token < count; ++token) {
        float* projected = kept_.at(kept_at_[index] + token * size);
        mix(mixer, {projected, 1, size, states_before_ + mixer.first_state, mixed_.data(), false}, scratch, worker);
      }
      worker.barrier();
    }
  });
}

void Step::reserve_pass() {
  int64_t journal = 0, states = 0;
  kept_at_.resize(model_.layer_count), kept_size_ = 0;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    kept_at_[index] = kept_size_, kept_size_ += count_ * projected_size(layer.mixer);
    int64_t size = 0;
    for (int64_t i = 0; i < state_count(layer.mixer); ++i) size += state_size(layer.mixer, i);
    states = std::max(states, size);
    for (int64_t group = 0; group < layer.group_count; ++group) {
      for (int64_t token = 1; token < count_; ++token) {
        const Slots& slots = streams_[token].slots[layer.first_group + group];
        journal += slots.head_count * HeadSlots(layer.attention, slots, 0).journal_room();
      }
    }
  }
  kept_.reserve(kept_size_), states_ahead_.reserve(states);
  journal_.begin(journal);
}

// Takes the tokens of a pass through a mixer and a copy of its states.
void Step::mix_ahead(const Worker& worker, const Layer& layer) {
  const Mixer& mixer = layer.mixer;
  const int64_t size = projected_size(mixer);
  float *kept = kept_.at(kept_at_[&layer - model_.layers]), *ahead = states_ahead_.data(), *states[2];
  for (int64_t token = 0; token < count_; ++token) {
    const Range share = worker.partition(size);
    std::copy_n(mixer_projected_.at(token * projected_ + share.begin), share.size(), kept + token * size + share.begin);
  }
  for (int64_t i = 0; i < state_count(mixer); ++i) {
    const Range share = worker.partition(state_size(mixer, i));
    std::copy_n(states_before_[mixer.first_state + i] + share.begin, share.size(), ahead + share.begin);
    states[i] = ahead, ahead += state_size(mixer, i);
  }
  worker.barrier();
  for (int64_t token = 0; token < count_; ++token) {
    mix(mixer, {mixer_projected_.at(token * projected_), 1, projected_, states, mixed_.at(token * mixer.out.columns), false},
        mixer_scratch_.at(worker.index * mixer_scratch_size_), worker);
  }
}

extern "C" {

// See `Step::pass`. Returns 0 or what `code_of` does: with nothing changed.
int64_t h2o_pass(void* step, const Stream* streams, int64_t count, int64_t threads) {
  return code_of([&] {
    static_cast<Step*>(step)->pass(streams, count, threads);
    return 0;
  });
}

// See `Step::pass_logits`.
void h2o_pass_logits(void* step, int64_t first, int64_t count, float* logits, int64_t threads) {
  static_cast<Step*>(step)->pass_logits(first, count, logits, threads);
}

// See `Step::pass_bytes`.
int64_t h2o_pass_bytes(const void* step) { return static_cast<const Step*>(step)->pass_bytes(); }

// See `Step::keep`; once for each pass.
void h2o_pass_keep(void* step, int64_t count, int64_t threads) { static_cast<Step*>(step)->keep(count, threads); }

}  // extern "C"
