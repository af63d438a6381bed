// The library's C interface: structures that Python fills through ctypes, and the constants they use.
//
// The library depends on neither Python nor torch. Tensors are pointers to contiguous memory.
// h2o_stream/native/abi.py mirrors every structure; tests/test_describe.py compares the two field by field.
//
// Shapes: B streams (rows of a batch), Hq query heads, Hkv KV heads, G = Hq / Hkv, S slots, D head size, Q new tokens.

#pragma once

#include <cstdint>

extern "C" {

// Instruction sets, in the order of INSTRUCTIONS in library.py.
enum Instructions : int64_t { kPortable = 0, kAvx2 = 1, kAvxVnni = 2, kAvx512 = 3, kNeon = 4, kI8mm = 5 };

// ---- matrices -------------------------------------------------------------------------------------------------------

// Storage format of a matrix.
//
// In packed formats 16 rows form a tile. A tile is a sequence of blocks of 256 columns; the last block may be shorter,
// a multiple of 32 columns. A group is 32 columns. A block of n groups stores its scales, padded with zeros to a
// multiple of 64 bytes, then its codes. Rows past the last one are zero. In memory order:
//   kInt8  scales half scale[n][16]
//          codes  int8 [n][8][16][4]: of group g, columns 4q to 4q + 3 of row r at [g][q][r]
//          value = scale * code
//   kInt4  scales half [n][2][16]: scales, then offsets, of each group
//          codes  uint8 [n][4][16][4]: byte [g][q][r][k] is column 4q + k (low nibble) and 16 + 4q + k (high nibble)
//          value = scale * code + offset
//   kQ4K   scales half d[16], half dmin[16], uint8 scale[n][16], uint8 min[n][16]
//          codes  as kInt4
//          value = (d * scale) * code - dmin * min
//   kQ6K   scales half d[16], int8 scale[2n][16]: one per 16 columns
//          codes  the low four bits of each code as kInt4, then the high two: uint8 [n][2][16][4], where bits 2j and
//                 2j + 1 of byte [g][h][r][k] belong to column 16h + 4j + k
//          value = (d * scale) * (code - 32)
//   kMxFp4 scales half scale[n][16]
//          codes  as kInt4
//          value = scale * number, where a code is the sign and the index of 0, 1, 2, 3, 4, 6, 8 or 12
//   kInt5  scales as kInt4
//          codes  the low four bits of each code as kInt4, then the high one: uint8 [n][16][4], where bit 4h + q of
//                 byte [g][r][k] belongs to column 16h + 4q + k
//          value = scale * code + offset
//   kQ5K   scales as kQ4K
//          codes  as kInt5
//          value = (d * scale) * code - dmin * min
//   kQ2K   scales half d[16], half dmin[16], uint8 [2n][16]: scale (low nibble) and min (high nibble) of 16 columns
//          codes  uint8 [n][2][16][4]: bits 2q and 2q + 1 of byte [g][h][r][k] are column 16h + 4q + k
//          value = (d * scale) * code - dmin * min
//   kQ3K   scales as kQ6K
//          codes  the low two bits of each code as kQ2K, then the high one as kInt5
//          value = (d * scale) * (code - 4)
//   kIq4Nl scales half scale[n][16]
//          codes  as kInt4
//          value = scale * number, where a code is the index of one of 16 numbers (packed.h)
//   kIq4Xs scales half d[16], int8 scale[n][16]
//          codes  as kInt4
//          value = (d * scale) * number, as for kIq4Nl
// They store the GGUF types of their names losslessly; kInt8 stores Q8_0, kInt4 Q4_0 and Q4_1, kInt5 Q5_0 and Q5_1.
// Those named K, and kIq4Xs, have n = 8. kMxFp4 is lossless if its scales, which are powers of two, are numbers of 16
// bits.
//
// In kFloat32Columns and kBFloat16Columns columns follow one another: [columns][rows].
enum MatrixKind : int64_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,
  kQ4K = 4,
  kQ6K = 5,
  kMxFp4 = 6,
  kFloat32Columns = 7,
  kBFloat16Columns = 8,
  kInt5 = 9,
  kQ5K = 10,
  kQ2K = 11,
  kQ3K = 12,
  kIq4Nl = 13,
  kIq4Xs = 14
};

// How threads share the work of a decode step: as `ThreadTuner` decides; all threads meet at barriers; one thread,
// which others assist with products.
enum Sharing : int64_t { kTuned = 0, kBarriers = 1, kAssisted = 2 };

struct Matrix {
  const void* weights;  // [rows][columns] or [tiles][bytes]; null if the layer has no such matrix
  const float* bias;    // [rows] or null
  int64_t rows, columns, kind;
  double scale;  // factor on its products and bias; 0 for none
};

// ---- attention over the slots of a layer ----------------------------------------------------------------------------

enum PolicyKind : int64_t { kAccumulated = 0, kTova = 1, kRandom = 2, kRecency = 3 };

// How positions are assigned to the cached tokens. With kAbsolute the cache stores keys that are already rotated by
// their token index, or never rotated.
enum PositionMode : int64_t { kGap = 0, kRolling = 1, kAbsolute = 2 };

// Attention parameters of a decoder layer that all streams share.
struct AttentionLayer {
  int64_t query_heads, kv_heads, head_size, value_size;
  double scaling, softcap;  // of the logits; softcap 0 disables it
  int64_t policy, position_mode;
  double decay;                // of scores, per token
  double long_term;            // weight of the long-term score; 0 disables it
  double long_term_decay;      // per token
  int64_t long_term_distance;  // minimum distance from key to query to count in the long-term score
  int64_t sinks;               // number of first tokens that are never evicted
  int64_t sliding_window;      // keys this old or older are masked; 0 disables it
  int64_t seed, layer_index;   // seed of the random policy
  const float* rope;           // [rope_rows][rotary_dims]: cosines, then sines, per distance; null with kAbsolute
  int64_t rope_rows, rotary_dims;
  int64_t in_bfloat16;  // dtype of keys and values; otherwise float32
  int64_t kv_bits;      // 16, or 8, 6, 4, 2: slots from exact_sinks + residual on are quantized
  int64_t exact_sinks, residual;
  const float* sink_logits;  // [query_heads] or null: a logit of each query head that stands for no token
  int64_t chunked;           // sliding_window is the length of pieces of the text that do not see each other
  // Or null: rows of `rope` without a common factor, in units of 1 / 32767: the first kFineRows, then the multiples of
  // kFineRows, [kFineRows + (rope_rows - 1) / kFineRows + 1][rotary_dims].
  const int16_t* rope_codes;
};

constexpr uint32_t kFineRows = 32;

constexpr int64_t kMaxNarrowSlots = INT16_MAX / 2;

// The slots of some KV heads of one stream in one layer; every array is [heads][...].
// See h2o_stream/cache/head_group.py.
//
// Ranks are at most 2 * S, that of an empty slot while the cache fills up.
//
// With kv_bits 16, `keys` and `values` have S rows. Otherwise they have exact_sinks + residual rows and the other slots
// are quantized (QuantizedStore in h2o_stream/cache/store.py). Planes: see store.h.
struct Slots {
  void *keys, *values;               // [heads][S or exact][D]
  uint8_t *key_codes, *value_codes;  // [heads][S - exact][D * bits / 8] or null
  float* key_range;                  // [heads][2][D] or null: minimum and maximum of each key channel
  uint16_t* value_grid;              // [heads][S - exact][2] fp16 or null: offset and scale
  float *scores, *long_term;         // [heads][S]; -inf and 0 in empty slots; long_term may be null
  int32_t* index;                    // [heads][S]: token index, -1 in empty slots
  void* rank;                        // [heads][S] int16, int32 above kMaxNarrowSlots: number of newer cached tokens
  int64_t* free;                     // [heads]: an empty slot for the next token
  int64_t* seen;                     // number of tokens of the stream so far; updated by each call
  const int32_t* heads;              // [head_count] KV head indices
  const int64_t* pins;               // [pin_count][2] token index ranges [first, end) that are never evicted
  const int64_t* transient;          // [transient_count][2] token index ranges [first, end) that are evicted first
  int64_t head_count, slot_count;
  int64_t recent, span;  // protected newest tokens; largest distance kept as is (kGap)
  int64_t evictions;     // number of evictions caused by the next token; 0 while slots are empty
  int64_t pin_count, transient_count;
};

// ---- the model ------------------------------------------------------------------------------------------------------

enum NormKind : int64_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

struct Norm {
  const float *weight, *bias;  // bias may be null
  double epsilon;
  int64_t kind;
};

// With parameters p:
//   kXielu          p[0] x^2 + p[2] x for x > 0, otherwise p[1] (expm1(min(x, p[3])) - x) + p[2] x
//   kClampedSwiglu  g sigmoid(p[0] g) (u + p[2]) for the gate g = min(gate, p[1]) and u = up, at most p[1] either way
enum Activation : int64_t {
  kSilu = 0,
  kGeluTanh = 1,
  kGeluErf = 2,
  kRelu = 3,
  kReluSquared = 4,
  kXielu = 5,
  kClampedSwiglu = 6
};

// How a router's logits become the scores of experts. With kSparseMixer experts are chosen one after another: the score
// of each is its share of those that are left and as high, up to `jitter`, relative to the larger magnitude of the two.
enum Scoring : int64_t { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// What makes a group of experts worth more than another one: its best expert, or its best two.
enum GroupWorth : int64_t { kBestOne = 0, kBestTwo = 1 };

// Where gates are: in a matrix of their own; or in `gate` with an expert's rows of `up`, before them or in turns.
enum GateLayout : int64_t { kApart = 0, kHalves = 1, kInTurns = 2 };

// A mixture of experts, which are MLPs, without gates if `gate` is null: a token goes through those with the highest
// scores. Their outputs are added with their scores as weights, times `scale`. The rows of expert e start at e * stride
// in `gate` and `up`, and at e * hidden_size in `down`; each is a whole number of tiles.
struct Experts {
  Matrix router;             // [experts][hidden_size]; null if the layer has no experts
  const float* choice_bias;  // [experts], added to scores for the choice only, or null
  Matrix gate, up, down;     // of all experts
  Matrix shared_gate;        // [1][hidden_size]: its sigmoid is a factor on the MLP's output; or null
  int64_t chosen;            // experts per token
  int64_t inner_size, stride;
  int64_t scoring, normalized;  // whether the weights of a token's experts are divided by their sum
  double scale;
  int64_t groups, chosen_groups;  // experts of the best groups only; as many in each; 0 groups for no such limit
  int64_t group_worth;
  double jitter;          // with kSparseMixer
  int64_t gate_layout;    // `up` is null unless gates are apart; `gate` is null without gates
  int64_t weighs_inputs;  // whether weights are factors on what goes into an expert, not on its output
  const float* factors;   // [experts], on the weights, or null
  // Experts beside the MLP, if `output_norm` is one: router and experts read x with norms of their own, and
  //   m = mlp_norm(mlp(before_mlp(x))) + output_norm(their sum)
  Norm router_norm, input_norm, output_norm, mlp_norm;
};

// Takes a part of a vector, normed, through a matrix, to a later part of the same vector.
struct Projection {
  Matrix matrix;
  Norm norm;
  int64_t from, to;
};

// What a gate's values go through before the attention's output is multiplied by them.
enum GateKind : int64_t { kNoGate = 0, kSigmoidGate = 1, kSoftplusGate = 2 };

// How a recurrent mixer carries earlier tokens on.
enum MixerKind : int64_t { kNoMixer = 0, kShortConvolution = 1, kGatedDelta = 2, kMamba2 = 3 };

constexpr int64_t kMaxProjections = 6, kMaxKernel = 8;

// A causal convolution of each channel by itself.
struct Convolution {
  const float *weight, *bias;  // [channels][kernel], of the oldest input first; [channels] or null
  int64_t channels, kernel;    // kernel at most kMaxKernel
};

// Where a part of each head is in the output of the projections: that of key head g starts at offset + g * stride, with
// those of all value heads that share the key head.
struct HeadColumns {
  int64_t offset, stride;
};

// A mixer that keeps what it needs of earlier tokens in states of constant size; see mixer.h.
//   kShortConvolution  (b, c, x) = in(y), all [channels]; out(c * convolution(b * x))
//                      states: the last inputs of the convolution [channels][kernel], the newest last
//   kGatedDelta        queries, keys and values go through the convolution, in this order, and SiLU; the former two are
//                      then divided by their lengths, and queries by the root of key_size. For each value head
//                        s *= exp(rate * softplus(decay + decay_bias)), with s [key_size][value_size]
//                        s += key (x) ((value - key s) * beta_scale * sigmoid(beta))
//                        out(norm(query s) * silu(gate)); with out_in_turns its columns are in turns of the key heads,
//                        those of the first value head of each before those of the second ones
//                      states: those of the convolution; s of all heads
//   kMamba2            values, keys and queries, whose columns follow one another, go through the convolution, in this
//                      order, and SiLU. For each value head
//                        step = softplus(decay + decay_bias), in prompts between least_step and largest_step
//                        s = s * exp(rate * step) + step * value (x) key, with s [value_size][key_size]
//                        out(norm((s query + skip * value) * silu(gate))), norm of norm_groups parts of all heads; it
//                        comes before the gate with norm_before_gate
//                      states: those of the convolution; s of all heads
struct Mixer {
  int64_t kind;
  Matrix in[kMaxProjections];  // of the layer's normed input; their outputs are concatenated
  int64_t in_count;
  Convolution convolution;
  int64_t key_heads, heads, key_size, value_size;  // `heads` value heads, a multiple of the key heads
  HeadColumns query, key, value, gate, beta, decay;
  const float *rate, *decay_bias;  // [heads]
  double beta_scale;
  const float* skip;  // [heads]
  double least_step, largest_step;
  Norm norm;  // of [value_size], or of [heads * value_size]
  int64_t norm_groups, norm_before_gate, out_in_turns;
  Matrix out;
  int64_t first_state;  // index of its first state in `Stream`
};

// The number of versions of the residual stream, at most.
constexpr int64_t kMaxVersions = 4;

// Alternating updates (altup.h): a token has n = `Model::versions` versions v of the residual stream, [n][hidden_size].
// The layer computes the active one, and the others follow. With r(x) = tanh(router x / rms(x)), [n]:
//   before the layer   v_i += sum_j (prediction_ij . r(v_active)) v_j, from which x = v_active goes into the layer
//   after its MLP      v_i += (1 + correction_i . r(x)) (x - v_active), and x = v_active * embedding_scale
// What `embedding_out` then gives is added to all versions but the first.
struct AltUp {
  const float* router;  // [n][hidden_size]; null without versions
  double epsilon;       // of rms(x)
  const float *prediction, *correction;  // [n][n][n], [n][n]
  const float* embedding_scale;          // [hidden_size] or null
};

// A residual of low rank (LAuReL) of y = before_attention(x): x is scale * (x + a + y + norm(right(left(y)))) after the
// attention.
struct Laurel {
  Matrix left, right;  // null without
  Norm norm;
  double scale;
};

// A decoder layer:
//   a = attention(before_attention(x)) + mixer(before_attention(x));  x += after_attention(a)
//   m = mlp(before_mlp(x));                                           x += after_mlp(m)
//   e = embedding_out(act(embedding_gate(x)) * embedding of the token for this layer);  x += after_embedding(e)
//   x *= output_scale
// What is missing is left out: attention if qkv_count is 0, the mixer if its kind is kNoMixer, the MLP if neither
// `down` nor the router has weights, e if `embedding_gate` has none. With `parallel` the MLP reads x before `a` is
// added. The output of experts is added to that of the MLP, which may be missing then.
struct Layer {
  AttentionLayer attention;
  Norm before_attention, after_attention, before_mlp, after_mlp, after_embedding;
  Norm query_norm, key_norm, value_norm;
  // Norms of queries and keys are of all heads as one vector instead of each head; they come after RoPE.
  int64_t norms_all_heads, norms_after_rope;
  // The outputs of one to four matrices are written to one vector, each from its column on. What other layers have
  // written to it stays. Values are at most `qkv_clip` either way; 0 disables that.
  Matrix qkv[4];
  int64_t qkv_columns[4];
  int64_t qkv_count;
  double qkv_clip;
  // Latent queries, keys and values: what is then computed from that vector.
  Projection latent[2];
  int64_t latent_count;
  // Head h of each starts at offset + h * stride in that vector. The last `key_tail_size` elements of all keys are
  // those from key_tail_offset on.
  int64_t query_offset, query_stride, key_offset, key_stride, value_offset, value_stride;
  int64_t key_tail_offset, key_tail_size;
  // [head_size] or null: where in its part of that vector each element of a query or key is, before anything else.
  const int32_t* elements;
  // The attention's output is multiplied by a gate: of head h, `gate_size` values (the value size or 1) from
  // gate_offset + h * gate_stride on in that vector.
  int64_t gate_kind, gate_offset, gate_stride, gate_size;
  double value_scale;
  Norm attended_norm;  // of the attention's output [query_heads * value_size], before `out`
  int64_t kv_source;   // the layer whose keys and values these are, in the same places: this or an earlier one
  // Queries are multiplied by 1 + temperature * log(1 + floor((token index + temperature_start) / temperature_length)).
  double temperature, temperature_length;
  int64_t temperature_start;
  // [head_size] or null: the order of the elements of a head in which RoPE rotates halves; keys are stored in it,
  // except with kAbsolute.
  const int32_t* order;
  // Factor on the first `rope_scaled_dims` elements of queries and keys in that order (YaRN, LongRoPE).
  double rope_scale;
  int64_t rope_scaled_dims;
  // Angles per position [absolute_rotary_dims / 2] for rotating queries and keys at their token index; used with
  // kAbsolute only, or null.
  const float* frequencies;
  int64_t absolute_rotary_dims;
  Mixer mixer;
  Matrix out, gate, up, down;  // gate.weights null: down(act(up(x)))
  Norm inner_norm;             // of the input of `down`
  Experts experts;
  int64_t activation;
  double activation_parameters[4];
  // Of gates, only what is above their mean by more than `gate_deviations` standard deviations goes on; of the MLP
  // only.
  int64_t cuts_gates;
  double gate_deviations;
  AltUp altup;
  Laurel laurel;
  Matrix embedding_gate, embedding_out;  // see `Model`; null without
  double output_scale;
  int64_t parallel;
  int64_t first_group, group_count;  // range of the stream's `Slots`
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden_size, vocab_size;
  Matrix embedding;  // [vocab_size][hidden_size], of any kind
  double embedding_scale;
  const float* learned_positions;  // [n][hidden_size] or null
  int64_t learned_offset;          // row for token index 0
  Norm embedding_norm;             // before the first layer
  // Embeddings of the token for each layer, [layers * size], or null; tokens without a row have the first one:
  //   (layer_embedding_scale * its row + norm(layer_projection(x) * layer_projection_scale)) * layer_input_scale,
  // with x before the first layer, normed for each layer.
  Matrix layer_embedding, layer_projection;
  Norm layer_projection_norm;
  double layer_embedding_scale, layer_projection_scale, layer_input_scale;
  // Versions of the residual stream x, or 0. Version i > 0 is first to_versions[i - 1](x), then, before the final norm,
  // from_versions[i - 1](version i), both times as long as version 0. Their mean goes into the final norm.
  int64_t versions, active_version;
  Matrix to_versions[kMaxVersions - 1], from_versions[kMaxVersions - 1];
  Norm norm;                       // final norm, before the output layer
  Matrix output;
  double logit_scale, logit_softcap;  // softcap 0 disables it
  double residual_scale;              // factor on attention and MLP outputs
};

// The next token of a stream.
struct Stream {
  int64_t token;
  const Slots* slots;  // of all layers
  float** states;      // of all mixers
};

// Two ranges of memory that are compared.
struct Bytes {
  const void *ours, *theirs;
  int64_t count;
};

}  // extern "C"
