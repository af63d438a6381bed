// Chunked prefill of the slots of one KV head of one stream.
//
// A chunk has three phases, whose work units may run on different threads: `prepare` cached and new keys and values,
// `attend` with blocks of queries, `evict`. Work is divided by shapes alone and sums have a fixed order, so results do
// not depend on the number of threads.

#pragma once

#include "abi.h"
#include "buffer.h"
#include "store.h"

namespace prefill {

// The new tokens of all streams and the output: left-aligned or, with `starts`, those of one stream after those of
// another.
struct NewTokens {
  const void *query, *key, *value;  // [streams][heads][tokens][size]
  const int64_t* strides;           // [3][3]: elements per stream, head and token, of query, key and value
  void* output;                     // [streams][tokens][query heads][value_size]
  const int64_t* counts;            // [streams]: tokens of each stream; the other outputs are zero
  int64_t streams, tokens, chunk;   // `chunk` tokens between evictions
  bool in_bfloat16;                 // otherwise float32, whatever the slots hold
  const int64_t* starts = nullptr;  // [streams]: the first token of each; then nothing else is written

  int64_t chunks(int64_t count) const { return (count + chunk - 1) / chunk; }
  int64_t output_row(int64_t stream) const { return starts ? starts[stream] : stream * tokens; }
  // Of query, key or value: the elements before a stream.
  int64_t elements_before(int64_t stream, int64_t which) const {
    return starts ? starts[stream] * strides[3 * which + 2] : stream * strides[3 * which];
  }
};

// The slots of a layer, and how many tokens they may hold.
struct LayerSlots {
  const Slots* const* streams;  // those of stream b start at streams[b]
  int64_t groups;
  const int64_t* limits;          // [streams][groups][chunks]: maximum number of cached tokens after each chunk
  int64_t stream_stride, chunks;  // of `limits`, in elements per stream and group

  const int64_t* limits_of(int64_t stream, int64_t group) const {
    return limits + stream * stream_stride + group * chunks;
  }
};

// Whether there are slots for all tokens to keep, one more for the next token, and another one for a ring.
bool fits(const AttentionLayer& layer, const LayerSlots& slots, const NewTokens& tokens);

// Feeds new tokens in chunks: attends to the cache and the chunk, updates the scores, evicts. Does not advance `seen`.
// Throws std::bad_alloc, with nothing changed.
void attend(const AttentionLayer& layer, const LayerSlots& slots, const NewTokens& tokens, int64_t threads);

// Per-thread buffers for one block of queries or keys.
struct Scratch {
  void reserve(const AttentionLayer& layer, int64_t num_keys);

  Buffer<float> keys;                    // [kKeyBlock][head_size]
  Buffer<float> queries, logits, accum;  // [rows][head_size], [rows][stride], [rows][padded value_size]
  Buffer<float> weights, squares;        // [rows]: factor on a row's contribution to the scores
};

// One KV head through all chunks of a call. Tokens are in stream order: cached ones, then new ones.
class Head {
 public:
  // Allocates buffers for this many keys, cached and new.
  void reserve(const AttentionLayer& layer, int64_t num_keys, int64_t chunk);

  // Loads the cached tokens of the slots.
  void load_slots(const AttentionLayer& layer, const Slots& slots, const NewTokens& tokens, int64_t stream,
                  int64_t head, int64_t count, const int64_t* limits);

  int64_t chunks() const { return tokens_->chunks(count_); }

  // Work units of this chunk: `prepare` for each key block, then `attend` for each split.
  int64_t key_blocks() const;
  int64_t splits() const;
  void prepare(int64_t block, Scratch& scratch);
  void attend(int64_t split, Scratch& scratch);

  // Updates the scores, evicts and advances to the next chunk. After the last chunk, writes the slots back.
  void evict();

 private:
  struct Block;
  void set_decays();
  void start_chunk();
  void attend_block(int64_t block, int64_t split, Scratch& scratch);
  void read_queries(const Block& block, float* queries) const;
  void softmax(const Block& block, int64_t stride, Scratch& scratch) const;
  void write_outputs(const Block& block, int64_t stride, const Scratch& scratch) const;
  void add_scores(const Block& block, int64_t split, int64_t stride, Scratch& scratch);
  void update_scores();
  void select_evictions();
  void store_tokens();
  void store_quantized();
  void compact();
  void write_back();
  int64_t next_free_slot(int64_t from) const;
  void read_new(int64_t which, int64_t head, int64_t token, int64_t size, float* x) const;
  void read_key(int64_t key_index, float* key) const;
  void read_value(int64_t key_index, float* value) const;
  int64_t first_key_from(int64_t index) const;

  const AttentionLayer* layer_ = nullptr;
  const Slots* slots_ = nullptr;
  const NewTokens* tokens_ = nullptr;
  store::HeadStore store_;
  int64_t stream_ = 0, local_head_ = 0, count_ = 0;  // new tokens of the stream
  const int64_t* limits_ = nullptr;                  // maximum number of cached tokens after each chunk
  int64_t chunk_ = 0, chunk_begin_ = 0;              // chunk index; its first new token
  // tokens before the chunk; cached keys; new keys; all keys
  int64_t seen_ = 0, num_held_ = 0, num_new_ = 0, num_keys_ = 0;
  int64_t groups_ = 0, block_queries_ = 0;
  bool long_term_ = false;
  int64_t score_stride_ = 0;

  Buffer<float> keys_, values_;                         // panels of rotated keys; [keys][padded value_size]
  Buffer<float> sums_, squares_;                        // [splits][score_stride]: attention received
  Buffer<float> scores_, long_term_scores_, worth_;     // [keys]
  Buffer<int32_t> index_, rank_, slot_, order_;         // [keys]
  Buffer<uint8_t> keep_, occupied_;                     // [keys], [slots]
  Buffer<float> key_offsets_, key_scales_;              // [2][head_size]: current and previous quantization parameters
  Buffer<float> decays_, long_term_decays_;             // factors on a query's attention, by its age
  Buffer<float> key_, value_, low_, high_;              // one key, one value, bounds of keys
};

}  // namespace prefill
