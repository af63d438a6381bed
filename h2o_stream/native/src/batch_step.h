// A decode step of many streams, and prompts of others: the products of a prompt, which read every matrix once for all
// of them, around the attention of a step for the first streams and that of a prompt for the rest. The numbers are
// those of `Step` and `Prompt`, except that products may be rounded to bfloat16 (`multiply`).

#pragma once

#include "attention.h"
#include "prompt.h"

class BatchStep : public Prompt {
 public:
  // From this many streams on it is faster than `Step`.
  static constexpr int64_t kMinStreams = 6;

  BatchStep(const Model& model, const Stream* streams, int64_t count, int64_t threads);

  // The first `steps` of the streams have a token each and are stepped; for the rest see `Prompt`.
  BatchStep(const Model& model, const Stream* streams, int64_t count, int64_t steps, const int64_t* lengths,
            int64_t new_tokens, int64_t chunk, const int64_t* limits, int64_t threads);

  // Takes the token of each stream through the model. Writes logits [count][vocab_size].
  void run(float* logits);

  // Takes `tokens` through the model. Writes logits [count][vocab_size] after the last one of each stream.
  void run(const int64_t* tokens, float* logits);

 private:
  void reserve_attention();
  void attend_slots(const Layer& layer) override;

  int64_t steps_;
  DecodeAttention attention_;
  std::vector<int64_t> tokens_;
};
