#include "check.h"

#include <cstring>
#include <initializer_list>
#include <utility>

#include "layer_parts.h"
#include "mixer.h"
#include "packed.h"

namespace {

constexpr int64_t kMax = int64_t(1) << 31;  // of any size: products of two, and their sums, are numbers of 64 bits

thread_local const char* refusal = "";

void require(bool fits, const char* part) {
  if (!fits) throw Refused(part);
}

bool within(int64_t number, int64_t least, int64_t most) { return least <= number && number <= most; }

bool are_sizes(std::initializer_list<int64_t> numbers) {
  return std::all_of(numbers.begin(), numbers.end(), [](int64_t number) { return within(number, 1, kMax); });
}

// Whether parts of a vector are in its first `size` elements, `count` from `offset` on.
bool inside(int64_t offset, int64_t stride, int64_t count, int64_t part, int64_t size) {
  return within(offset, 0, kMax) && within(stride, 0, kMax) && within(part, 0, kMax) &&
         offset + (count - 1) * stride + part <= size;
}

bool are_places(const int32_t* order, int64_t size) {
  return !order || std::all_of(order, order + size, [size](int32_t place) { return within(place, 0, size - 1); });
}

// What a layer does not have is all zeros, so that its sizes count for nothing.
template <class Part>
bool is_missing(const Part& part) {
  static const Part none{};
  return !std::memcmp(&part, &none, sizeof part);
}

bool fits(const Matrix& matrix, int64_t rows, int64_t columns) {
  const int64_t whole = packed::has_half_scales(matrix.kind) ? packed::kGroup : packed::kBlock;
  return matrix.weights && matrix.rows == rows && matrix.columns == columns && are_sizes({rows, columns}) &&
         within(matrix.kind, kFloat32, kIq4Xs) && (!packed::is_packed(matrix.kind) || columns % whole == 0);
}

bool fits_if_any(const Matrix& matrix, int64_t rows, int64_t columns) {
  return is_missing(matrix) || fits(matrix, rows, columns);
}

bool fits(const AttentionLayer& shape) {
  return are_sizes({shape.query_heads, shape.kv_heads, shape.head_size, shape.value_size}) &&
         shape.query_heads % shape.kv_heads == 0;
}

// What is written to the vector that queries, keys and values are in.
bool projections_fit(const Layer& layer, int64_t hidden) {
  bool all = within(layer.qkv_count, 0, 4) && within(layer.latent_count, 0, layer.qkv_count ? 2 : 0);
  for (int64_t i = 0; all && i < layer.qkv_count; ++i) {
    all = fits(layer.qkv[i], layer.qkv[i].rows, hidden) && within(layer.qkv_columns[i], 0, kMax);
  }
  for (int64_t i = 0; all && i < layer.latent_count; ++i) {
    const Projection& latent = layer.latent[i];
    all = fits(latent.matrix, latent.matrix.rows, latent.matrix.columns) && within(latent.to, 0, kMax);
  }
  return all;
}

// `width` is the size of that vector, of which other layers may have written parts.
bool attention_fits(const Model& model, const Layer& layer, int64_t width) {
  const AttentionLayer& shape = layer.attention;
  const int64_t index = &layer - model.layers, tail = layer.key_tail_size;
  if (!within(layer.kv_source, 0, index)) return false;
  if (!attends(layer)) {
    return is_missing(shape) && is_missing(layer.out) && layer.gate_kind == kNoGate && !layer.absolute_rotary_dims;
  }
  for (int64_t i = 0; i < layer.latent_count; ++i) {
    if (!inside(layer.latent[i].from, 0, 1, layer.latent[i].matrix.columns, width)) return false;
  }
  const Layer& source = model.layers[layer.kv_source];
  const AttentionLayer& lent = source.attention;
  return fits(shape) && fits(layer.out, model.hidden_size, shape.query_heads * shape.value_size) &&
         are_places(layer.elements, shape.head_size) && are_places(layer.order, shape.head_size) &&
         within(tail, 0, shape.head_size) && inside(layer.key_tail_offset, 0, 1, tail, width) &&
         inside(layer.query_offset, layer.query_stride, shape.query_heads, shape.head_size, width) &&
         inside(layer.key_offset, layer.key_stride, shape.kv_heads, shape.head_size - tail, width) &&
         inside(layer.value_offset, layer.value_stride, shape.kv_heads, shape.value_size, width) &&
         (layer.gate_kind == kNoGate ||
          ((layer.gate_size == 1 || layer.gate_size == shape.value_size) &&
           inside(layer.gate_offset, layer.gate_stride, shape.query_heads, layer.gate_size, width))) &&
         (!layer.norms_all_heads ||
          (inside(layer.query_offset, 0, 1, shape.query_heads * shape.head_size, width) &&
           inside(layer.key_offset, 0, 1, shape.kv_heads * shape.head_size, width))) &&
         within(layer.rope_scaled_dims, 0, shape.head_size) &&
         within(layer.absolute_rotary_dims, 0, shape.head_size) && attends(source) &&
         source.kv_source == layer.kv_source && lent.kv_heads == shape.kv_heads &&
         lent.head_size == shape.head_size && lent.value_size == shape.value_size;
}

bool mixer_fits(const Mixer& mixer, int64_t hidden) {
  if (mixer.kind == kNoMixer) return is_missing(mixer);
  const int64_t channels = mixer.convolution.channels;
  if (!within(mixer.kind, kNoMixer, kMamba2) || !within(mixer.in_count, 1, kMaxProjections) || !are_sizes({channels}) ||
      !mixer.convolution.weight || !within(mixer.convolution.kernel, 1, kMaxKernel)) {
    return false;
  }
  for (int64_t i = 0; i < mixer.in_count; ++i) {
    if (!fits(mixer.in[i], mixer.in[i].rows, hidden)) return false;
  }
  const int64_t width = projected_size(mixer);
  if (mixer.kind == kShortConvolution) return width == 3 * channels && fits(mixer.out, hidden, channels);
  if (!are_sizes({mixer.key_heads, mixer.heads, mixer.key_size, mixer.value_size}) || mixer.heads % mixer.key_heads) {
    return false;
  }
  const int64_t shared = mixer.heads / mixer.key_heads, keys = mixer.key_heads * mixer.key_size;
  const int64_t values = mixer.heads * mixer.value_size;
  const auto has = [&](const HeadColumns& columns, int64_t part) {
    return inside(columns.offset, columns.stride, mixer.key_heads, part, width);
  };
  const bool is_mamba = mixer.kind == kMamba2;
  return mixer.rate && mixer.decay_bias && are_sizes({keys, values}) && channels == 2 * keys + values &&
         fits(mixer.out, hidden, values) && has(mixer.query, mixer.key_size) && has(mixer.key, mixer.key_size) &&
         has(mixer.value, shared * mixer.value_size) && has(mixer.gate, shared * mixer.value_size) &&
         has(mixer.decay, shared) && (is_mamba || has(mixer.beta, shared)) &&
         (!is_mamba || (inside(mixer.value.offset, 0, 1, channels, width) && mixer.skip &&
                        inside(mixer.gate.offset, 0, 1, values, width) && within(mixer.norm_groups, 1, values) &&
                        values % mixer.norm_groups == 0));
}

bool experts_fit(const Experts& experts, int64_t hidden) {
  if (!experts.router.weights) return is_missing(experts);
  const int64_t count = experts.router.rows, inner = experts.inner_size, stride = experts.stride;
  const int64_t groups = experts.groups, best = experts.chosen_groups;
  const bool apart = experts.gate_layout == kApart;
  const auto begin_at = [](const Matrix& matrix, int64_t step) {
    return !packed::is_packed(matrix.kind) || step % packed::kRows == 0;
  };
  if (!are_sizes({count, inner, stride})) return false;
  const int64_t rows = (count - 1) * stride + (apart ? inner : 2 * inner);
  return fits(experts.router, count, hidden) && within(experts.chosen, 1, count) && within(groups, 0, count) &&
         (!groups || (count % groups == 0 && within(best, 1, groups) && experts.chosen <= best * (count / groups))) &&
         fits_if_any(experts.gate, rows, hidden) && fits_if_any(experts.up, rows, hidden) &&
         (apart ? !is_missing(experts.up) : !is_missing(experts.gate) && is_missing(experts.up)) &&
         fits(experts.down, count * hidden, inner) && begin_at(experts.gate, stride) && begin_at(experts.up, stride) &&
         begin_at(experts.down, hidden) && fits_if_any(experts.shared_gate, 1, hidden);
}

bool mlp_fits(const Layer& layer, int64_t hidden) {
  if (!layer.down.weights) return is_missing(layer.down) && is_missing(layer.up) && is_missing(layer.gate);
  const int64_t inner = layer.down.columns;
  return fits(layer.down, hidden, inner) && fits(layer.up, inner, hidden) && fits_if_any(layer.gate, inner, hidden) &&
         (layer.gate.weights || (!layer.cuts_gates && layer.activation != kClampedSwiglu));
}

// What some models have beside: embeddings of layers, versions of the residual stream, residuals of low rank.
bool extras_fit(const Model& model, const Layer& layer) {
  const int64_t hidden = model.hidden_size, size = layer.embedding_gate.rows;
  const Laurel& laurel = layer.laurel;
  const AltUp& altup = layer.altup;
  const bool embeds = !is_missing(layer.embedding_gate);
  return (is_missing(laurel) ||
          (fits(laurel.left, laurel.left.rows, hidden) && fits(laurel.right, hidden, laurel.left.rows))) &&
         (embeds ? fits(layer.embedding_gate, size, hidden) && fits(layer.embedding_out, hidden, size) &&
                       has_mlp(layer) && model.layer_embedding.columns == size * model.layer_count
                 : is_missing(layer.embedding_out)) &&
         (!model.versions || (altup.router && altup.prediction && altup.correction && embeds));
}

bool embeddings_fit(const Model& model) {
  const int64_t hidden = model.hidden_size;
  const Matrix &embedding = model.embedding, &of_layers = model.layer_embedding;
  const int64_t versions = model.versions;
  bool all = within(versions, 0, kMaxVersions) && within(model.active_version, 0, std::max(versions, int64_t(1)) - 1);
  for (int64_t i = 0; all && i + 1 < versions; ++i) {
    all = fits(model.to_versions[i], hidden, hidden) && fits(model.from_versions[i], hidden, hidden);
  }
  return all && fits(embedding, embedding.rows, hidden) && embedding.rows >= model.vocab_size &&
         fits(model.output, model.vocab_size, hidden) && !packed::has_columns(embedding.kind) &&
         fits_if_any(of_layers, of_layers.rows, of_layers.columns) && !packed::has_columns(of_layers.kind) &&
         fits_if_any(model.layer_projection, of_layers.columns, hidden) &&
         is_missing(of_layers) == is_missing(model.layer_projection);
}

}  // namespace

Refused::Refused(const char* part) { refusal = part; }

void check_model(const Model& model) {
  refusal = "";
  require(model.layers && are_sizes({model.layer_count, model.hidden_size, model.vocab_size}), "the size of the model");
  require(embeddings_fit(model), "the embedding");
  int64_t width = 0, states = 0;
  const Layer *first = model.layers, *last = first + model.layer_count;
  for (const Layer* layer = first; layer < last; ++layer) {
    require(projections_fit(*layer, model.hidden_size), "a projection of an attention");
    width = std::max(width, qkv_size(*layer));
  }
  for (const Layer* layer = first; layer < last; ++layer) {
    require(attention_fits(model, *layer, width), "an attention");
    require(mixer_fits(layer->mixer, model.hidden_size), "a recurrent mixer");
    require(!has_mixer(*layer) || layer->mixer.first_state == states, "the state of a recurrent mixer");
    states += state_count(layer->mixer);
    require(mlp_fits(*layer, model.hidden_size), "an MLP");
    require(experts_fit(layer->experts, model.hidden_size), "a mixture of experts");
    require(extras_fit(model, *layer), "a residual");
  }
}

void check_slots(const AttentionLayer& layer, const Slots* slots, int64_t groups) {
  const int64_t bits = layer.kv_bits;
  require(within(layer.exact_sinks, 0, kMax) && within(layer.residual, bits != 16, kMax), "a cache");
  const int64_t exact = bits == 16 ? 0 : layer.exact_sinks + layer.residual;
  const auto fits_layer = [&](const Slots& group) {
    bool all = within(group.slot_count, exact + 1, INT32_MAX / 4) && within(group.head_count, 1, layer.kv_heads) &&
               group.span >= 0 && within(group.evictions, 0, group.slot_count) && within(*group.seen, 0, INT32_MAX / 2);
    for (int64_t i = 0; all && i < group.head_count; ++i) {
      all = within(group.heads[i], 0, layer.kv_heads - 1) && within(group.free[i], exact, group.slot_count - 1);
    }
    return all;
  };
  require(fits(layer) && within(layer.long_term_distance, layer.long_term != 0, INT32_MAX / 2) &&
              within(layer.sliding_window, layer.chunked != 0, INT64_MAX) &&
              within(layer.position_mode, layer.rope ? kGap : kAbsolute, kAbsolute) &&
              (!layer.rope || (within(layer.rope_rows, 1, INT32_MAX) && within(layer.rotary_dims, 0, layer.head_size))) &&
              (bits == 16 || bits == 8 || bits == 6 || bits == 4 || bits == 2) &&
              (bits == 16 || (layer.head_size * bits % 8 == 0 && layer.value_size * bits % 8 == 0)) &&
              std::all_of(slots, slots + groups, fits_layer),
          "a cache");
}

void check_streams(const Model& model, const Stream* streams, int64_t count) {
  for (const Layer* layer = model.layers; layer < model.layers + model.layer_count; ++layer) {
    require(layer->first_group >= 0 && (attends(*layer) ? layer->group_count > 0 : !layer->group_count), "slots");
    for (int64_t i = 0; attends(*layer) && i < count; ++i) {
      check_slots(layer->attention, streams[i].slots + layer->first_group, layer->group_count);
    }
  }
}

void check_tokens(const Model& model, const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) require(within(tokens[i], 0, model.vocab_size - 1), "a token");
}

extern "C" {

// The part for which the last call of this thread that returned 3, or no step, did so; nothing if memory ran out.
const char* h2o_refusal() { return std::exchange(refusal, ""); }

}  // extern "C"
