// What mixes tokens in a decode step: attention and recurrent mixers.

#include "activation.h"
#include "layer_parts.h"
#include "step.h"

namespace {

using packed::kGroup;
using packed::kRows;

}  // namespace

// Attention and the recurrent mixer of a layer.
void Step::mix_tokens(const Worker& worker, const Layer& layer) {
  project(worker, layer);
  if (worker.index == 0 && attends(layer)) select_slots(layer);
  worker.barrier();
  if (attends(layer)) {
    const auto prepare = [&](int64_t stream, int64_t head, float* queries, float* key, float* value) {
      this->prepare(layer, stream, head, queries, key, value, angles_[worker.index * reserved_.streams + stream]);
    };
    if (passes_) {
      attention_.pass(worker, count_, prepare, journal_, attended_.data());
    } else {
      attention_.attend(worker, prepare);
    }
    prefetch(layer.out, worker.partition(model_.hidden_size, kRows));
  }
  if (has_mixer(layer)) {
    const Mixer& mixer = layer.mixer;
    if (passes_) mix_ahead(worker, layer);
    for (int64_t stream = 0; !passes_ && stream < count_; ++stream) {
      mix(mixer,
          {mixer_projected_.at(stream * projected_), 1, projected_, streams_[stream].states + mixer.first_state,
           mixed_.at(stream * mixer.out.columns), token_indices_[stream] == 0},
          mixer_scratch_.at(worker.index * mixer_scratch_size_), worker);
    }
    prefetch(mixer.out, worker.partition(model_.hidden_size, kRows));
  }
  worker.barrier();
  multiply_out(worker, layer);
  if (has_mlp(layer)) {
    prefetch(layer.gate.weights ? layer.gate : layer.up, worker.partition(layer.down.columns, kGroup));
  }
  worker.barrier();
  if (!attends(layer)) return;
  if (!passes_) attention_.evict(worker);
  if (!has_mlp(layer)) worker.barrier();
}

void Step::select_slots(const Layer& layer) {
  for (int64_t stream = 0; stream < count_; ++stream) slots_[stream] = streams_[stream].slots + layer.first_group;
  attention_.set_layer(layer.attention, slots_.data(), layer.group_count, passes_ ? 1 : count_,
                       token_indices_.data());
}

// Multiplies this thread's rows of the output projections.
void Step::multiply_out(const Worker& worker, const Layer& layer) {
  const int64_t hidden = model_.hidden_size;
  const Range rows = worker.partition(hidden, kRows);
  const Matrix &mixer_out = layer.mixer.out, &right = layer.laurel.right;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    if (attends(layer)) {
      float* attended = state.attended.at(stream);
      if (passes_) {
        std::copy_n(attended_.at(stream * layer.out.columns), layer.out.columns, attended);
      } else {
        attention_.merge(stream, attended, state.factors.at(stream * attention_.factor_count()));
      }
      apply_gate(layer, qkv_.at(stream * qkv_size_), attended);
      apply_norm(layer.attended_norm, attended, layer.out.columns, attended);
      quantize_for({&layer.out}, state.attended, stream, {0, layer.out.columns});
    }
    if (right.weights) {
      std::copy_n(laurel_.at(stream * laurel_rank_), right.columns, state.laurel.at(stream));
      quantize_for({&right}, state.laurel, stream, {0, right.columns});
    }
    if (has_mixer(layer)) {
      std::copy_n(mixed_.at(stream * mixer_out.columns), mixer_out.columns, state.mixed.at(stream));
      quantize_for({&mixer_out}, state.mixed, stream, {0, mixer_out.columns});
    }
  });
  const State& local = state(worker);
  if (right.weights) multiply_vectors(right, local.laurel, {0, count_}, rows, laurel_delta_.data(), hidden);
  if (!attends(layer)) {
    return multiply(worker, {&mixer_out, attention_delta_.data(), hidden}, local.mixed);
  }
  if (!passes_) {
    attention_.update_scores(worker,
                             [&](int64_t stream) { return local.factors.at(stream * attention_.factor_count()); });
  }
  multiply(worker, {&layer.out, attention_delta_.data(), hidden}, local.attended);
  if (!has_mixer(layer)) return;
  for (int64_t stream = 0; stream < count_; ++stream) {
    float *delta = attention_delta_.at(stream * hidden), *mixed = scratch_.at(worker.index * hidden);
    skinny_gemm(mixer_out, local.mixed, Range{stream, stream + 1}, rows, mixed, hidden);
    for (int64_t i = rows.begin; i < rows.end; ++i) delta[i] += mixed[i];
  }
}

// Writes this thread's share of the queries, keys and values of a layer, and of what its mixer takes. Of latent ones it
// waits for all that they are made from.
void Step::project(const Worker& worker, const Layer& layer) {
  const auto clip_rows = [&](const Matrix& matrix, int64_t column) {
    const Range rows = worker.partition(matrix.rows, kRows);
    for (int64_t stream = 0; stream < count_; ++stream) clip(layer, rows, qkv_.at(stream * qkv_size_ + column));
  };
  Product products[RowJob::kMaxMatrices];
  int64_t count = 0;
  for (int64_t i = 0; i < layer.qkv_count; ++i) {
    products[count++] = {&layer.qkv[i], qkv_.at(layer.qkv_columns[i]), qkv_size_};
  }
  for (int64_t i = 0, column = 0; i < layer.mixer.in_count; column += layer.mixer.in[i++].rows) {
    products[count++] = {&layer.mixer.in[i], mixer_projected_.at(column), projected_};
  }
  multiply(worker, products, count, state(worker).normed);
  for (int64_t i = 0; i < layer.qkv_count; ++i) clip_rows(layer.qkv[i], layer.qkv_columns[i]);
  if (const Matrix& left = layer.laurel.left; left.weights) {
    multiply_vectors(left, state(worker).normed, {0, count_}, worker.partition(left.rows, kRows), laurel_.data(),
                  laurel_rank_);
  }
  for (int64_t group = 0; count_ == 1 && group < layer.group_count; ++group) {
    prefetch_slots(streams_->slots[layer.first_group + group], worker);
  }
  if (!layer.latent_count) return;
  worker.barrier();
  for_each_stream(worker, [&](State& state, int64_t stream) {
    for (int64_t i = 0; i < layer.latent_count; ++i) {
      const Projection& latent = layer.latent[i];
      const int64_t size = latent.matrix.columns;
      apply_norm(latent.norm, qkv_.at(stream * qkv_size_ + latent.from), size, state.latent[i].at(stream));
      quantize_for({&latent.matrix}, state.latent[i], stream, {0, size});
    }
  });
  for (int64_t i = 0; i < layer.latent_count; ++i) {
    const Projection& latent = layer.latent[i];
    multiply(worker, {&latent.matrix, qkv_.at(latent.to), qkv_size_}, state(worker).latent[i]);
    clip_rows(latent.matrix, latent.to);
  }
}

// Writes the queries of a KV head's group and, unless null, its key and value.
void Step::prepare(const Layer& layer, int64_t stream, int64_t head, float* queries, float* key, float* value,
                   Angles& angles) {
  const AttentionLayer& shape = layer.attention;
  const int64_t heads = shape.query_heads / shape.kv_heads, size = simd::padded(shape.head_size);
  const float* qkv = qkv_.at(stream * qkv_size_);
  const Heads all = queries_of(layer, qkv, token_indices_[stream]);
  for (int64_t q = 0; q < heads; ++q) {
    prepare_head(layer, all, head * heads + q, token_indices_[stream], angles, queries + q * size);
  }
  if (!key) return;
  prepare_head(layer, keys_of(layer, qkv), head, token_indices_[stream], angles, key);
  prepare_value(layer, qkv, head, value);
}
