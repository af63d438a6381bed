#include "check.h"

#include <algorithm>
#include <utility>

#include "layer_parts.h"
#include "mixer.h"
#include "packed.h"

namespace {

constexpr int64_t kMaxSize = int64_t(1) << 31;  // of anything: products of two, and their sums, are numbers of 64 bits

thread_local const char* refusal = "";

void require(bool holds, const char* what) {
  if (!holds) throw Refused(what);
}

bool within(int64_t number, int64_t least, int64_t most) { return number >= least && number <= most; }

bool is_size(int64_t number) { return within(number, 1, kMaxSize); }

// Whether `count` parts of a vector, the first at `offset`, are in its first `size` elements.
bool are_inside(int64_t offset, int64_t stride, int64_t count, int64_t part, int64_t size) {
  return within(offset, 0, kMaxSize) && within(stride, 0, kMaxSize) && within(part, 0, kMaxSize) &&
         offset + (count - 1) * stride + part <= size;
}

bool is_dense(const Matrix& matrix) { return !packed::is_packed(matrix.kind); }

// Whether a matrix has columns that its kind can have.
void check(const Matrix& matrix, const char* what) {
  require(within(matrix.kind, kFloat32, kIq4Xs) && is_size(matrix.rows) && is_size(matrix.columns), what);
  const bool whole_blocks = !packed::has_half_scales(matrix.kind);
  require(is_dense(matrix) || matrix.columns % (whole_blocks ? packed::kBlock : packed::kGroup) == 0, what);
}

// The same for a matrix [rows][columns] that there must be.
void check(const Matrix& matrix, int64_t rows, int64_t columns, const char* what) {
  check(matrix, what);
  require(matrix.weights && matrix.rows == rows && matrix.columns == columns, what);
}

void check_if_any(const Matrix& matrix, int64_t rows, int64_t columns, const char* what) {
  if (matrix.weights) check(matrix, rows, columns, what);
}

void check_kinds(std::initializer_list<const Norm*> norms) {
  for (const Norm* norm : norms) require(within(norm->kind, kNoNorm, kLayerNorm), "the kind of a norm");
}

void check_order(const int32_t* order, int64_t size) {
  for (int64_t i = 0; order && i < size; ++i) require(within(order[i], 0, size - 1), "the order of a head's elements");
}

void check_shape(const AttentionLayer& layer) {
  require(is_size(layer.query_heads) && is_size(layer.kv_heads) && layer.query_heads % layer.kv_heads == 0, "heads");
  require(is_size(layer.head_size) && is_size(layer.value_size), "the size of heads");
}

// `width` is the size of the vector that queries, keys and values are in, with those of other layers.
void check_attention(const Model& model, int64_t index, int64_t width) {
  const Layer& layer = model.layers[index];
  const AttentionLayer& shape = layer.attention;
  check_shape(shape);
  for (int64_t i = 0; i < layer.qkv_count; ++i) check(layer.qkv[i], layer.qkv[i].rows, model.hidden_size, "a projection");
  for (int64_t i = 0; i < layer.latent_count; ++i) {
    const Projection& latent = layer.latent[i];
    check(latent.matrix, latent.matrix.rows, latent.matrix.columns, "a latent projection");
    require(are_inside(latent.from, 0, 1, latent.matrix.columns, width), "a latent vector");
    check_kinds({&latent.norm});
  }
  check(layer.out, model.hidden_size, shape.query_heads * shape.value_size, "the output projection of an attention");
  check_order(layer.elements, shape.head_size), check_order(layer.order, shape.head_size);
  const int64_t tail = layer.key_tail_size, heads = shape.kv_heads;
  require(within(tail, 0, shape.head_size) && are_inside(layer.key_tail_offset, 0, 1, tail, width), "the end of keys");
  require(are_inside(layer.query_offset, layer.query_stride, shape.query_heads, shape.head_size, width), "queries");
  require(are_inside(layer.key_offset, layer.key_stride, heads, shape.head_size - tail, width), "keys");
  require(are_inside(layer.value_offset, layer.value_stride, heads, shape.value_size, width), "values");
  require(within(layer.gate_kind, kNoGate, kSoftplusGate), "the kind of a gate");
  if (layer.gate_kind != kNoGate) {
    require(layer.gate_size == 1 || layer.gate_size == shape.value_size, "the size of a gate");
    require(are_inside(layer.gate_offset, layer.gate_stride, shape.query_heads, layer.gate_size, width), "a gate");
  }
  require(within(layer.rope_scaled_dims, 0, shape.head_size), "the dimensions that RoPE scales");
  require(within(layer.absolute_rotary_dims, 0, shape.head_size), "the dimensions of RoPE");
  require(within(layer.kv_source, 0, index), "whose keys a layer has");
  const Layer& source = model.layers[layer.kv_source];
  const AttentionLayer& lent = source.attention;
  require(attends(source) && source.kv_source == layer.kv_source && lent.kv_heads == heads &&
              lent.head_size == shape.head_size && lent.value_size == shape.value_size,
          "the keys of another layer");
  check_kinds({&layer.query_norm, &layer.key_norm, &layer.value_norm, &layer.attended_norm});
}

void check_heads(const HeadColumns& columns, const Mixer& mixer, int64_t part, int64_t width) {
  require(are_inside(columns.offset, columns.stride, mixer.key_heads, part, width), "a part of a recurrent mixer");
}

// Returns the number of states.
int64_t check_mixer(const Mixer& mixer, int64_t hidden) {
  require(within(mixer.kind, kNoMixer, kMamba2), "the kind of a recurrent mixer");
  if (mixer.kind == kNoMixer) return 0;
  require(within(mixer.in_count, 1, kMaxProjections), "the projections of a recurrent mixer");
  for (int64_t i = 0; i < mixer.in_count; ++i) check(mixer.in[i], mixer.in[i].rows, hidden, "a projection of a mixer");
  const int64_t width = projected_size(mixer), channels = mixer.convolution.channels;
  require(is_size(channels) && mixer.convolution.weight && within(mixer.convolution.kernel, 1, kMaxKernel),
          "the convolution of a recurrent mixer");
  check_kinds({&mixer.norm});
  if (mixer.kind == kShortConvolution) {
    require(width == 3 * channels, "the projection of a convolution");
    check(mixer.out, hidden, channels, "the output projection of a convolution");
    return 1;
  }
  require(is_size(mixer.key_heads) && is_size(mixer.heads) && mixer.heads % mixer.key_heads == 0 &&
              is_size(mixer.key_size) && is_size(mixer.value_size) && mixer.rate && mixer.decay_bias,
          "the heads of a recurrent mixer");
  const int64_t keys = mixer.key_heads * mixer.key_size, values = mixer.heads * mixer.value_size;
  const int64_t shared = mixer.heads / mixer.key_heads;
  require(keys <= kMaxSize && values <= kMaxSize && channels == 2 * keys + values, "the channels of a convolution");
  check(mixer.out, hidden, values, "the output projection of a recurrent mixer");
  check_heads(mixer.query, mixer, mixer.key_size, width), check_heads(mixer.key, mixer, mixer.key_size, width);
  check_heads(mixer.value, mixer, shared * mixer.value_size, width);
  check_heads(mixer.gate, mixer, shared * mixer.value_size, width), check_heads(mixer.decay, mixer, shared, width);
  if (mixer.kind == kGatedDelta) {
    check_heads(mixer.beta, mixer, shared, width);
    return 2;
  }
  require(are_inside(mixer.value.offset, 0, 1, channels, width), "what a convolution reads");
  require(are_inside(mixer.gate.offset, 0, 1, values, width), "the gates of a recurrent mixer");
  require(mixer.skip && mixer.norm_groups > 0 && values % mixer.norm_groups == 0, "the norm of a recurrent mixer");
  return 2;
}

void check_experts(const Experts& experts, int64_t hidden) {
  const int64_t count = experts.router.rows, inner = experts.inner_size, stride = experts.stride;
  check(experts.router, count, hidden, "a router");
  require(is_dense(experts.router) && within(experts.chosen, 1, count), "the number of experts");
  require(within(experts.scoring, kSoftmax, kSparseMixer) && within(experts.groups, 0, count), "groups of experts");
  require(!experts.groups || (count % experts.groups == 0 && within(experts.chosen_groups, 1, experts.groups) &&
                              experts.chosen <= experts.chosen_groups * (count / experts.groups)),
          "groups of experts");
  require(is_size(inner) && within(stride, inner, kMaxSize) && within(experts.gate_layout, kApart, kInTurns), "experts");
  const bool apart = experts.gate_layout == kApart;
  require(apart ? experts.up.weights != nullptr : experts.gate.weights && !experts.up.weights, "the gates of experts");
  const int64_t rows = (count - 1) * stride + (apart ? inner : 2 * inner);
  check_if_any(experts.gate, rows, hidden, "the gates of experts"), check_if_any(experts.up, rows, hidden, "experts");
  check(experts.down, count * hidden, inner, "the last matrices of experts");
  for (const Matrix* matrix : {&experts.gate, &experts.up, &experts.down}) {
    const int64_t step = matrix == &experts.down ? hidden : stride;
    require(!matrix->weights || is_dense(*matrix) || step % packed::kRows == 0, "where an expert begins");
  }
  check_if_any(experts.shared_gate, 1, hidden, "the gate of the shared expert");
  check_kinds({&experts.router_norm, &experts.input_norm, &experts.output_norm, &experts.mlp_norm});
}

// What follows the attention.
void check_rest(const Model& model, const Layer& layer) {
  const int64_t hidden = model.hidden_size, inner = layer.down.columns, size = layer.embedding_gate.rows;
  if (layer.down.weights) {
    check(layer.down, hidden, inner, "the last matrix of an MLP"), check(layer.up, inner, hidden, "an MLP");
    check_if_any(layer.gate, inner, hidden, "the gates of an MLP");
    require(layer.gate.weights || !layer.cuts_gates, "the gates of an MLP");
  }
  if (layer.experts.router.weights) check_experts(layer.experts, hidden);
  require(within(layer.activation, kSilu, kClampedSwiglu), "the activation");
  if (layer.laurel.left.weights || layer.laurel.right.weights) {
    check(layer.laurel.left, layer.laurel.left.rows, hidden, "a residual of low rank");
    check(layer.laurel.right, hidden, layer.laurel.left.rows, "a residual of low rank");
  }
  if (layer.embedding_gate.weights) {
    check(layer.embedding_gate, size, hidden, "the gate of a layer's embedding");
    check(layer.embedding_out, hidden, size, "the projection of a layer's embedding");
    require(has_mlp(layer) && model.layer_embedding.weights && model.layer_embedding.columns == size * model.layer_count,
            "the embeddings of layers");
  }
  const AltUp& altup = layer.altup;
  require(!model.versions || (altup.router && altup.prediction && altup.correction && layer.embedding_gate.weights),
          "versions of the residual stream");
  check_kinds({&layer.before_attention, &layer.after_attention, &layer.before_mlp, &layer.after_mlp, &layer.inner_norm,
               &layer.after_embedding, &layer.laurel.norm});
}

void check_embeddings(const Model& model) {
  const int64_t hidden = model.hidden_size, columns = model.layer_embedding.columns;
  check(model.embedding, model.embedding.rows, hidden, "the embedding");
  require(!packed::has_columns(model.embedding.kind) && model.embedding.rows >= model.vocab_size, "the embedding");
  check(model.output, model.vocab_size, hidden, "the output layer");
  if (model.layer_embedding.weights) {
    check(model.layer_embedding, model.layer_embedding.rows, columns, "the embeddings of layers");
    require(!packed::has_columns(model.layer_embedding.kind), "the embeddings of layers");
    check(model.layer_projection, columns, hidden, "the projection to the embeddings of layers");
  }
  require(within(model.versions, 0, kMaxVersions) && within(model.active_version, 0, std::max<int64_t>(0, model.versions - 1)),
          "versions of the residual stream");
  for (int64_t i = 0; i + 1 < model.versions; ++i) {
    check(model.to_versions[i], hidden, hidden, "a version of the residual stream");
    check(model.from_versions[i], hidden, hidden, "a version of the residual stream");
  }
  check_kinds({&model.embedding_norm, &model.layer_projection_norm, &model.norm});
}

}  // namespace

Refused::Refused(const char* reason) { refusal = reason; }

void check_model(const Model& model) {
  require(model.layers && is_size(model.layer_count) && is_size(model.hidden_size) && is_size(model.vocab_size),
          "the size of a model");
  check_embeddings(model);
  int64_t width = 0, states = 0;
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const Layer& layer = model.layers[index];
    require(within(layer.qkv_count, 0, 4) && within(layer.latent_count, 0, layer.qkv_count ? 2 : 0), "projections");
    for (int64_t i = 0; i < layer.qkv_count; ++i) require(within(layer.qkv_columns[i], 0, kMaxSize), "a projection");
    for (int64_t i = 0; i < layer.latent_count; ++i) require(within(layer.latent[i].to, 0, kMaxSize), "a projection");
    width = std::max(width, qkv_size(layer));
  }
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const Layer& layer = model.layers[index];
    if (attends(layer)) check_attention(model, index, width);
    require(!has_mixer(layer) || layer.mixer.first_state == states, "the states of a recurrent mixer");
    states += check_mixer(layer.mixer, model.hidden_size);
    check_rest(model, layer);
  }
}

void check_slots(const AttentionLayer& layer, const Slots* slots, int64_t groups) {
  check_shape(layer);
  const int64_t bits = layer.kv_bits, exact = bits < 16 ? layer.exact_sinks + layer.residual : 0;
  require(within(layer.policy, kAccumulated, kRecency) && within(layer.position_mode, kGap, kAbsolute), "the policy");
  require(layer.position_mode == kAbsolute || (layer.rope && is_size(layer.rope_rows)), "the table of rotations");
  require(!layer.rope || within(layer.rotary_dims, 0, layer.head_size), "the table of rotations");
  require(layer.long_term == 0 || is_size(layer.long_term_distance), "the distance of long-term scores");
  require(!layer.chunked || is_size(layer.sliding_window), "the length of pieces of the text");
  require(bits == 16 || bits == 8 || bits == 6 || bits == 4 || bits == 2, "the bits of keys");
  require(bits == 16 || (within(layer.exact_sinks, 0, kMaxSize) && is_size(layer.residual) &&
                         layer.head_size * bits % 8 == 0 && layer.value_size * bits % 8 == 0),
          "the slots that are not quantized");
  for (const Slots* group = slots; group < slots + groups; ++group) {
    require(within(group->slot_count, exact + 1, INT32_MAX / 4) && within(group->head_count, 1, layer.kv_heads),
            "the number of slots");
    require(group->keys && group->values && group->scores && group->index && group->rank && group->free &&
                group->seen && group->heads && (bits == 16 || (group->key_codes && group->value_codes)),
            "slots that are missing");
    require(within(*group->seen, 0, INT32_MAX) && group->pin_count >= 0 && group->transient_count >= 0, "slots");
    for (int64_t i = 0; i < group->head_count; ++i) {
      require(within(group->heads[i], 0, layer.kv_heads - 1), "the heads of slots");
      require(within(group->free[i], exact, group->slot_count - 1), "the free slot");
    }
  }
}

void check_streams(const Model& model, const Stream* streams, int64_t count) {
  for (int64_t index = 0; index < model.layer_count; ++index) {
    const Layer& layer = model.layers[index];
    require(layer.first_group >= 0 && layer.group_count >= 0, "groups of slots");
    if (!attends(layer)) continue;
    require(layer.group_count > 0, "slots that are missing");
    for (int64_t i = 0; i < count; ++i) {
      check_slots(layer.attention, streams[i].slots + layer.first_group, layer.group_count);
    }
  }
}

extern "C" {

// Why the last call of this thread that returned kRefused, or no step, did so; nothing if memory ran out.
const char* h2o_refusal() { return std::exchange(refusal, ""); }

}  // extern "C"
