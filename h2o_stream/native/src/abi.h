// The plain C interface of the library: structures that Python fills through ctypes, and the functions it calls.
//
// Nothing here knows Python or torch: all tensors are addresses of contiguous memory.
// h2o_stream/native/abi.py mirrors every structure; tests/test_describe.py compares the two, field by field.
//
// Shapes: B streams (rows of a batch), Hq query heads, Hkv KV heads, G = Hq / Hkv, S slots, D head size, Q new tokens.

#pragma once

#include <cstdint>

extern "C" {

// ---- matrices -------------------------------------------------------------------------------------------------------

// How the numbers of a matrix are held.
//
// Packed matrices (8 and 4 bits): every 32 numbers of a row (a group) share a scale in half precision, and in 4 bits an
// offset, as in GGUF's Q8_0 and Q4_1: value = code * scale (8 bits, code is int8), code * scale + offset (4 bits, 0..15).
// In 4 bits the 16 bytes of a group hold its first 16 numbers in their lower halves and the other 16 in the upper ones.
// Four rows are a tile, so that memory is read in one go:
//   codes [4][columns / packing] bytes          packing: numbers in a byte, 1 or 2
//   grid  [4][packing][columns / 32] halves     scales, in 4 bits followed by offsets
//   zeros up to a multiple of 32 bytes.
// Rows beyond the last are zero. `columns` is a multiple of 32.
enum MatrixKind : int64_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3 };

struct Matrix {
  const void* weights;  // [rows][columns], or tiles; null where a layer has no such matrix
  const float* bias;    // [rows] or null
  int64_t rows, columns, kind;
};

// ---- attention over the slots of a layer ----------------------------------------------------------------------------

enum PolicyKind : int64_t { kAccumulated = 0, kTova = 1, kRandom = 2, kRecency = 3 };

// Where RoPE sees the kept tokens. With kAsFed keys are stored as they are to be attended to: rotated at token indices
// before they came, or not at all.
enum PositionMode : int64_t { kGap = 0, kRolling = 1, kAsFed = 2 };

// What is the same for all streams, in one decoder layer.
struct AttentionLayer {
  int64_t query_heads, kv_heads, head_size, value_size;
  double scaling, softcap;  // of query times key; softcap 0 for none
  int64_t policy, positions;
  double decay;             // of scores, per token
  double long_term;         // weight of the long-term score; 0 where there is none
  double long_term_decay;   // per token
  int64_t far;              // tokens between a key and a query that looks at it from afar
  int64_t sinks;            // first tokens, never evicted
  const int64_t* pins;      // [pin_count][2] token indices, first and last + 1, never evicted
  int64_t pin_count;
  int64_t sliding;          // keys of this age and older are hidden; 0 for none
  int64_t seed, number;     // of the policy that draws; of the layer
  const float* rope;        // [distances][rotary]: rotary / 2 cosines, then as many sines; null with kAsFed
  int64_t distances, rotary;
  int64_t in_bfloat16;      // keys and values as they are held, otherwise float32
  int64_t kv_bits;          // 16, or 8, 4, 2: all slots but the first exact_sinks + residual hold codes
  int64_t exact_sinks, residual;
};

// The slots of some KV heads of one stream in one layer; all of [heads][...]. See h2o_stream/cache/slots.py.
//
// With kv_bits 16 keys and values have S places; with fewer, exact_sinks + residual, and the rest are codes
// (h2o_stream/cache/store.py, QuantizedStore): a byte holds numbers that lie D * bits / 8 apart.
struct Slots {
  void *keys, *values;                 // [heads][S or exact][D]
  uint8_t *key_codes, *value_codes;    // [heads][S - exact][D * bits / 8] or null
  float* key_range;                    // [heads][2][D] or null: least and greatest key of a channel
  uint16_t* value_grid;                // [heads][S - exact][2] halves or null: offset and step
  float *scores, *long_term;           // [heads][S]; -inf and 0 where empty; long_term may be null
  int32_t *index, *rank;               // [heads][S]; token index, -1 where empty; held tokens newer than it
  int64_t* free;                       // [heads]: an empty slot for the next token
  int64_t* seen;                       // tokens of the stream so far: read before, written after
  const int32_t* heads;                // [head_count] numbers of the KV heads
  int64_t head_count, slots;
  int64_t recent, span;                // newest tokens that stay; distance up to which distances are true (kGap)
  int64_t evictions;                   // how many tokens the next one evicts; 0 while slots are empty
};

// ---- the model ------------------------------------------------------------------------------------------------------

enum NormKind : int64_t { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

struct Norm {
  const float *weight, *bias;  // bias may be null
  double epsilon;
  int64_t kind;
};

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kRelu = 3 };

// A decoder layer:
//   a = attention(before_attention(x));  x += after_attention(a)
//   m = mlp(before_mlp(x));              x += after_mlp(m)
// With `parallel` the MLP reads x as it was before the attention was added.
struct Layer {
  AttentionLayer attention;
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm query_norm, key_norm;  // of each head
  // What is multiplied to one vector [q_size + k_size + v_size]: one to three matrices, one after the other.
  Matrix qkv[3];
  int64_t qkv_count;
  // Where head h of each lies in that vector: at first + h * step.
  int64_t query_first, query_step, key_first, key_step, value_first, value_step;
  // Factor on the first `rope_scaled` numbers of queries and keys: what YaRN and LongRoPE scale them by.
  double rope_scale;
  int64_t rope_scaled;
  // With kAsFed, and not null: queries and keys are rotated at their token index when they come, by these angles per
  // position [absolute_rotary / 2].
  const float* frequencies;
  int64_t absolute_rotary;
  Matrix out, gate, up, down;  // gate.weights null: a plain MLP, down(act(up(x)))
  int64_t activation, parallel;
  int64_t first_group, group_count;  // which of a stream's `Slots` are this layer's
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden, vocabulary;
  const void* embedding;  // [vocabulary][hidden]
  int64_t embedding_in_bfloat16;
  double embedding_scale;
  const float* learned_positions;  // [n][hidden] or null
  int64_t learned_offset;          // row of token index 0
  Norm norm;                       // in front of the output layer
  Matrix output;
  double logit_scale, logit_softcap;  // softcap 0 for none
  double residual_scale;              // factor on what attention and MLP add
};

// One token of one stream.
struct Stream {
  int64_t token;
  const Slots* slots;  // of all layers, one after the other
};

}  // extern "C"
