#include "step.h"

#include <chrono>

#include "activation.h"
#include "altup.h"
#include "batch_step.h"
#include "check.h"
#include "layer_parts.h"

namespace {

using packed::kGroup;
using packed::kRows;  // units of work per thread: the results of 16 rows share a cache line

}  // namespace

void Step::run(const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  if (count >= BatchStep::kMinStreams && !trace) {
    check_streams(model_, streams, count);
    for (int64_t stream = 0; stream < count; ++stream) check_tokens(model_, &streams[stream].token, 1);
    return BatchStep(model_, streams, count, threads).run(logits);
  }
  begin(streams, count, logits, trace);
  reserve(threads);
  const int64_t tuned = threads > 1 && sharing_ == kTuned ? tuner_.choose(threads) : threads;
  const bool alone = threads > 1 && (tuned == 1 || sharing_ == kAssisted);
  const auto start = std::chrono::steady_clock::now();
  Assistants& all = Assistants::get();
  const auto lock = alone && count_ == 1 ? all.join(threads) : Assistants::Lock();
  assistants_ = lock ? &all : nullptr;
  parallel(alone ? 1 : tuned, [this](const Worker& worker) { run_worker(worker); });
  const bool undisturbed = assistants_ && assistants_->record().undisturbed();
  if (threads == 1 || sharing_ != kTuned) return;
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
  tuner_.record(time.count(), count_ == 1, undisturbed);
}

void Step::begin(const Stream* streams, int64_t count, float* logits, float* trace) {
  check_streams(model_, streams, count);
  for (int64_t stream = 0; stream < count; ++stream) check_tokens(model_, &streams[stream].token, 1);
  streams_ = streams, count_ = count, logits_ = logits, trace_ = trace;
  assistants_ = nullptr, passes_ = false;
  slots_.resize(count), token_indices_.resize(count);
  for (int64_t stream = 0; stream < count; ++stream) token_indices_[stream] = int32_t(*streams[stream].slots->seen);
}

void Step::multiply_vectors(const Matrix& matrix, const Vectors& vectors, Range range, Range rows, float* out,
                            int64_t stride) const {
  if (!passes_ || packed::is_packed(matrix.kind)) return skinny_gemm(matrix, vectors, range, rows, out, stride);
  for (int64_t row = rows.begin; row < rows.end; row += kRows) {  // which stay in the cache
    for (int64_t v = range.begin; v < range.end; ++v) {
      skinny_gemm(matrix, vectors, Range{v, v + 1}, {row, std::min(row + kRows, rows.end)},
                  out + (v - range.begin) * stride, stride);
    }
  }
}

void Step::multiply(const Worker& worker, const Product* products, int64_t count, const Vectors& vectors,
                    int64_t unit) const {
  if (assistants_) return assistants_->multiply(products, count, vectors, 0);
  for (int64_t i = 0; i < count; ++i) {
    const auto& [matrix, out, stride] = products[i];
    multiply_vectors(*matrix, vectors, {0, count_}, worker.partition(matrix->rows, unit), out, stride);
  }
}

void Step::multiply_rows(const Matrix& matrix, const Vectors& vectors, int64_t vector, Range rows, float* out,
                         int64_t stride) const {
  if (assistants_ && rows.size() == matrix.rows) {
    const Product product{&matrix, out, stride};
    return assistants_->multiply(&product, 1, vectors, vector);
  }
  skinny_gemm(matrix, vectors, Range{vector, vector + 1}, rows, out, stride);
}

void Step::reserve(int64_t threads) {
  int64_t slots = 0, query_size = 0, qkv = 0, inner = 0, query_heads = 0, value_size = 0, expert_inner = 0;
  int64_t latent[2] = {};
  bool experts_beside = false;
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    for (int64_t stream = 0; stream < count_; ++stream) {
      for (int64_t group = 0; group < layer.group_count; ++group) {
        slots = std::max(slots, streams_[stream].slots[layer.first_group + group].slot_count);
      }
    }
    qkv = std::max(qkv, qkv_size(layer)), inner = std::max({inner, layer.down.columns, layer.embedding_gate.rows});
    for (int64_t i = 0; i < layer.latent_count; ++i) latent[i] = std::max(latent[i], layer.latent[i].matrix.columns);
    query_heads = std::max(query_heads, layer.attention.query_heads);
    value_size = std::max(value_size, layer.attention.value_size);
    query_size = std::max(query_size, layer.out.columns);
    projected_ = std::max(projected_, projected_size(layer.mixer));
    mixed_size_ = std::max(mixed_size_, layer.mixer.out.columns);
    mixer_scratch_size_ = std::max(mixer_scratch_size_, scratch_size(layer.mixer, 1));
    const Experts& experts = layer.experts;
    laurel_rank_ = std::max(laurel_rank_, layer.laurel.left.rows);
    experts_ = std::max(experts_, experts.router.rows), chosen_ = std::max(chosen_, experts.chosen);
    expert_inner = std::max(expert_inner, experts.inner_size);
    experts_beside = experts_beside || beside(experts);
  }
  const Room room{std::max(count_, reserved_.streams), std::max(passes_ ? threads : count_, reserved_.attended),
                  std::max(threads, reserved_.threads), std::max(slots, reserved_.slots)};
  const bool grows = room.streams > reserved_.streams || room.attended > reserved_.attended ||
                     room.threads > reserved_.threads || room.slots > reserved_.slots;
  if (grows) {
    reserved_ = {};  // until all of it is there
    attention_.reserve(room.attended, query_heads, value_size, room.slots, room.threads);
  }
  if (passes_) {
    attended_.reserve(count_ * query_size);
    attention_.reserve_heads(query_heads);
  }
  for (int64_t index = 0; index < model_.layer_count; ++index) {  // whose bits and memory may be others than before
    if (attends(model_.layers[index])) attention_.reserve_scratch(model_.layers[index].attention);
  }
  if (!grows) return;
  const int64_t hidden = model_.hidden_size;
  states_.resize(room.threads);
  for (int64_t i = 0; i < room.threads; ++i) {
    const int64_t rows = i == 0 ? room.streams : 1;  // the other states hold a single stream
    states_[i].x.reserve(rows * hidden);
    states_[i].factors.reserve(rows * attention_.factor_count());
    states_[i].normed = Vectors(rows, hidden);
    states_[i].attended = Vectors(rows, query_size);
    states_[i].mixed = Vectors(rows, mixed_size_);
    for (int64_t j = 0; j < 2; ++j) states_[i].latent[j] = Vectors(rows, latent[j]);
    states_[i].versions.reserve(rows * model_.versions * hidden);
    if (model_.versions) states_[i].version_inputs = Vectors(rows * (model_.versions - 1), hidden);
    states_[i].laurel = Vectors(rows, laurel_rank_);
    if (experts_beside) {
      states_[i].router_input = Vectors(rows, hidden), states_[i].expert_input = Vectors(rows, hidden);
    }
  }
  angles_.resize(room.threads * room.streams);
  for (Angles& angles : angles_) angles.reserve(model_);
  qkv_.reserve(room.streams * qkv);
  qkv_size_ = qkv, inner_ = inner;
  mixer_projected_.reserve(room.streams * projected_);
  mixed_.reserve(room.streams * mixed_size_);
  mixer_scratch_.reserve(room.threads * mixer_scratch_size_);
  attention_delta_.reserve(room.streams * hidden);
  mlp_delta_.reserve(room.streams * hidden);
  layer_embeddings_.reserve(room.streams * model_.layer_embedding.columns);
  layer_projections_.reserve(room.streams * model_.layer_embedding.columns);
  gate_.reserve(room.streams * std::max(inner, 2 * chosen_ * expert_inner));
  up_.reserve(room.streams * inner);
  scratch_.reserve(room.threads * hidden);
  projected_versions_.reserve(model_.versions ? room.streams * (model_.versions - 1) * hidden : 0);
  laurel_.reserve(room.streams * laurel_rank_);
  laurel_delta_.reserve(laurel_rank_ ? room.streams * hidden : 0);
  expert_delta_.reserve(experts_beside ? room.streams * hidden : 0);
  sums_.reserve(experts_beside ? room.threads * hidden : 0);
  router_logits_.reserve(room.streams * experts_);
  scores_.reserve(room.threads * 2 * experts_);
  choices_.reserve(room.threads * room.streams * chosen_);
  moments_.resize(room.threads * room.streams);
  activated_ = Vectors(room.streams, inner);
  expert_activated_ = Vectors(room.streams * chosen_, expert_inner);
  reserved_ = room;
}

void Step::run_worker(const Worker& worker) {
  embed(worker);
  for (int64_t index = 0; index < model_.layer_count; ++index) {
    const Layer& layer = model_.layers[index];
    const Layer* before = index ? &model_.layers[index - 1] : nullptr;
    for_each_stream(worker, [&](State& state, int64_t stream) {
      float* x = state.x.at(stream * model_.hidden_size);
      if (before) add_layer(*before, x, stream, worker);
      if (const int64_t size = model_.versions * model_.hidden_size) {
        altup::predict(model_, layer, state.versions.at(stream * size), x);
      }
      write_trace(index, stream, x, worker);
      apply_norm(layer.before_attention, x, model_.hidden_size, state.normed.at(stream));
      const Matrix *qkv = layer.qkv, *in = layer.mixer.in;
      quantize_for({&qkv[0], &qkv[1], &qkv[2], &qkv[3], &in[0], &in[1], &in[2], &in[3], &in[4], &in[5],
                    &layer.laurel.left},
                   state.normed, stream, {0, model_.hidden_size});
    });
    if (attends(layer) || has_mixer(layer)) mix_tokens(worker, layer);
    if (has_mlp(layer)) mlp(worker, layer);
    if (layer.embedding_gate.weights) add_embedding(worker, layer);
  }
  output(worker);
}

void Step::embed(const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  const float scale = float(model_.embedding_scale);
  const auto row = [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    read_row(model_.embedding, streams_[stream].token, x);
    for (int64_t i = 0; i < hidden; ++i) x[i] *= scale;
    if (model_.learned_positions) {
      const float* position = model_.learned_positions + (token_indices_[stream] + model_.learned_offset) * hidden;
      for (int64_t i = 0; i < hidden; ++i) x[i] += position[i];
    }
    apply_norm(model_.embedding_norm, x, hidden, x);
  };
  for_each_stream(worker, row);
  if (model_.layer_embedding.weights) embed_for_layers(worker);
  if (model_.versions) split_versions(worker);
}

// Reads and projects the embeddings for all layers.
void Step::embed_for_layers(const Worker& worker) {
  const int64_t hidden = model_.hidden_size, size = model_.layer_embedding.columns;
  for_each_stream(worker, [&](State& state, int64_t stream) {
    std::copy_n(state.x.at(stream * hidden), hidden, state.normed.at(stream));
    quantize_for({&model_.layer_projection}, state.normed, stream, {0, hidden});
  });
  for (int64_t stream = worker.index; stream < count_; stream += worker.count) {
    const int64_t token = streams_[stream].token, row = token < model_.layer_embedding.rows ? token : 0;
    read_row(model_.layer_embedding, row, layer_embeddings_.at(stream * size));
  }
  multiply_vectors(model_.layer_projection, state(worker).normed, {0, count_}, worker.partition(size, kRows),
                layer_projections_.data(), size);
  worker.barrier();
}

void Step::write_trace(int64_t layer, int64_t stream, const float* x, const Worker& worker) const {
  if (!trace_ || (count_ == 1 && worker.index)) return;
  std::copy_n(x, model_.hidden_size, trace_ + (layer * count_ + stream) * model_.hidden_size);
}

void Step::add(const Norm& norm, const float* delta, float* x, const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  add_normed(norm, delta, hidden, float(model_.residual_scale), x, scratch_.at(worker.index * hidden));
}

// Adds what is left of the previous layer.
void Step::add_layer(const Layer& layer, float* x, int64_t stream, const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  if (model_.versions) {
    float* versions = state(worker).versions.at(stream * model_.versions * hidden);
    altup::add_embedding(model_, layer, mlp_delta_.at(stream * hidden), versions, scratch_.at(worker.index * hidden));
  } else if (layer.embedding_gate.weights) {
    float* scratch = scratch_.at(worker.index * hidden);
    add_normed(layer.after_embedding, mlp_delta_.at(stream * hidden), hidden, 1, x, scratch);
  } else {
    add_mlp(layer, x, stream, worker);
  }
  scale(layer.output_scale, hidden, x);
}

// Adds the MLP output, and with a parallel or no MLP also that of attention and mixer.
void Step::add_mlp(const Layer& layer, float* x, int64_t stream, const Worker& worker) {
  const int64_t hidden = model_.hidden_size;
  const bool mixes = attends(layer) || has_mixer(layer);
  if (mixes && (layer.parallel || !has_mlp(layer))) {
    add(layer.after_attention, attention_delta_.at(stream * hidden), x, worker);
  }
  if (!has_mlp(layer)) return;
  const float* delta = mlp_delta_.at(stream * hidden);
  if (beside(layer.experts)) {
    float *sum = sums_.at(worker.index * hidden), *scratch = scratch_.at(worker.index * hidden);
    apply_norm(layer.experts.mlp_norm, delta, hidden, sum);
    add_normed(layer.experts.output_norm, expert_delta_.at(stream * hidden), hidden, 1, sum, scratch);
    delta = sum;
  }
  add(layer.after_mlp, delta, x, worker);
}

void Step::output(const Worker& worker) {
  const int64_t hidden = model_.hidden_size, vocabulary = model_.vocab_size;
  const Layer& last = model_.layers[model_.layer_count - 1];
  if (model_.versions) merge_versions(worker, last);
  for_each_stream(worker, [&](State& state, int64_t stream) {
    float* x = state.x.at(stream * hidden);
    if (!model_.versions) add_layer(last, x, stream, worker);
    write_trace(model_.layer_count, stream, x, worker);
    apply_norm(model_.norm, x, hidden, state.normed.at(stream));
    quantize_for({&model_.output}, state.normed, stream, {0, hidden});
  });
  if (passes_) return;
  const Range rows = worker.partition(vocabulary, kRows);
  multiply(worker, {&model_.output, logits_, vocabulary}, state(worker).normed);
  for (int64_t stream = 0; stream < count_; ++stream) scale_logits(model_, rows, logits_ + stream * vocabulary);
}

extern "C" {

// Returns null if the model is refused, see `h2o_refusal`, or if out of memory.
void* h2o_step_open(const Model* model) {
  Step* step = nullptr;
  code_of([&] {
    check_model(*model);
    step = new Step(*model);
    return 0;
  });
  return step;
}

// Weights may be freed afterwards.
void h2o_step_close(void* step) {
  Assistants::get().leave();
  delete static_cast<Step*>(step);
}

// How threads share the work of steps, one of `Sharing`; at first kTuned.
void h2o_step_share(void* step, int64_t sharing) { static_cast<Step*>(step)->share(sharing); }

// See `Step::run`. Returns 0 or what `code_of` does: with nothing changed, except that the slots of kMinStreams or more
// are undefined if it is out of memory.
int64_t h2o_step(void* step, const Stream* streams, int64_t count, float* logits, float* trace, int64_t threads) {
  return code_of([&] {  // all buffers of a `Step` are created before any state changes
    static_cast<Step*>(step)->run(streams, count, logits, trace, threads);
    return 0;
  });
}

}  // extern "C"
