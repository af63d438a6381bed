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
// Packed kinds: 16 rows are a tile, and a tile is a sequence of blocks of 256 columns; the last block may have fewer, a
// multiple of 32. A group is 32 columns. A block of n groups is its grid (what codes are multiplied by), padded with
// zeros to a multiple of 64 bytes, and its codes. Rows beyond the last are zero. In the order of memory:
//   kInt8  grid   half scale[n][16]
//          codes  int8 [n][8][16][4]: of group g, columns 4q to 4q + 3 of row r at [g][q][r]
//          value = scale * code
//   kInt4  grid   half [n][2][16]: scales, then offsets, of each group
//          codes  uint8 [n][4][16][4]: byte [g][q][r][k] is column 4q + k (lower half) and 16 + 4q + k (upper half)
//          value = scale * code + offset
//   kQ4K   grid   half d[16], half dmin[16], uint8 scale[n][16], uint8 min[n][16]
//          codes  as kInt4
//          value = (d * scale) * code - dmin * min
//   kQ6K   grid   half d[16], int8 scale[2n][16]: for every 16 columns
//          codes  the lower four bits of each code as kInt4, then the upper two: uint8 [n][2][16][4], where bits 2j and
//                 2j + 1 of byte [g][h][r][k] belong to column 16h + 4j + k
//          value = (d * scale) * (code - 32)
// The first two hold GGUF's Q8_0, Q5_0, Q4_0 and Q4_1 without loss, the others (n = 8) its Q4_K, Q6_K and Q3_K.
enum MatrixKind : int64_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kQ4K = 4, kQ6K = 5 };

struct Matrix {
  const void* weights;  // [rows][columns], or [tiles][bytes]; null where a layer has no such matrix
  const float* bias;    // [rows] or null
  int64_t rows, columns, kind;
};

// ---- attention over the slots of a layer ----------------------------------------------------------------------------

enum PolicyKind : int64_t { kAccumulated = 0, kTova = 1, kRandom = 2, kRecency = 3 };

// Where RoPE sees the kept tokens. With kAsFed keys are stored as they are to be attended to: rotated at token indices
// before they came, or not at all.
enum PositionMode : int64_t { kGap = 0, kRolling = 1, kAbsolute = 2 };

// What is the same for all streams, in one decoder layer.
struct AttentionLayer {
  int64_t query_heads, kv_heads, head_size, value_size;
  double scaling, softcap;  // of query times key; softcap 0 for none
  int64_t policy, position_mode;
  double decay;             // of scores, per token
  double long_term;         // weight of the long-term score; 0 where there is none
  double long_term_decay;   // per token
  int64_t long_term_distance;              // tokens between a key and a query that looks at it from afar
  int64_t sinks;            // first tokens, never evicted
  const int64_t* pins;      // [pin_count][2] token indices, first and last + 1, never evicted
  int64_t pin_count;
  int64_t sliding_window;          // keys of this age and older are hidden; 0 for none
  int64_t seed, layer_index;     // of the policy that draws; of the layer
  const float* rope;        // [distances][rotary]: rotary / 2 cosines, then as many sines; null with kAsFed
  int64_t rope_rows, rotary_dims;
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
  int64_t head_count, slot_count;
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
  int64_t query_offset, query_stride, key_offset, key_stride, value_offset, value_stride;
  // Factor on the first `rope_scaled` numbers of queries and keys: what YaRN and LongRoPE scale them by.
  double rope_scale;
  int64_t rope_scaled_dims;
  // With kAsFed, and not null: queries and keys are rotated at their token index when they come, by these angles per
  // position [absolute_rotary / 2].
  const float* frequencies;
  int64_t absolute_rotary_dims;
  Matrix out, gate, up, down;  // gate.weights null: a plain MLP, down(act(up(x)))
  int64_t activation, parallel;
  int64_t first_group, group_count;  // which of a stream's `Slots` are this layer's
};

struct Model {
  const Layer* layers;
  int64_t layer_count, hidden_size, vocab_size;
  Matrix embedding;  // [vocabulary][hidden], of any kind
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
