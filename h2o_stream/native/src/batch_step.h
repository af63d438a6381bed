// A decode step of many streams: the products of a prompt, which read every matrix once for all of them, around the
// attention of a step. The numbers are those of `Step`, except that products may be rounded to bfloat16 (`multiply`).

#pragma once

#include "attention.h"
#include "prompt.h"

class BatchStep : public Prompt {
 public:
  // From this many streams on it is faster than `Step`.
  static constexpr int64_t kMinStreams = 6;

  BatchStep(const Model& model, const Stream* streams, int64_t count, int64_t threads);

  // Takes the token of each stream through the model. Writes logits [count][vocab_size].
  void run(float* logits);

 private:
  void reserve_attention();
  void attend_slots(const Layer& layer) override;

  DecodeAttention attention_;
  std::vector<int64_t> tokens_;
};
