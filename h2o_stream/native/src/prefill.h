// Chunks of a prompt through the slots of one KV head of one stream.
//
// A chunk goes through three phases, the parts of which may be run by different threads: `prepare` the keys and values
// of what is held and what is new, `attend` with blocks of queries, `evict`. How work is cut depends on shapes alone,
// and the parts of a sum are added up in a fixed order, so that results do not depend on the number of threads.

#pragma once

#include "abi.h"
#include "buffer.h"
#include "store.h"

namespace prefill {

// The new tokens of all streams, and where the attention's output goes.
struct NewTokens {
  const void *query, *key, *value;  // [streams][heads][tokens][size]
  const int64_t* strides;           // [3][3]: of stream, head and token, in numbers; of query, key and value
  void* output;                     // [streams][tokens][query heads][value_size]
  int64_t tokens, chunk;
  bool in_bfloat16;                 // otherwise float32
};

// What a thread computes in, for one block of queries or some places.
struct Scratch {
  void reserve(const AttentionLayer& layer, int64_t num_keys);

  Buffer<float> keys;                   // [places prepared together][head_size]
  Buffer<float> queries, logits, accum; // [rows][head_size], [rows][stride], [rows][padded value_size]
  Buffer<float> weights, squares;       // [rows]: what a row counts in the scores
};

// The KV head `head` of its `Slots`, through all chunks of a call. Tokens are in their order: held ones, then new ones.
class Head {
 public:
  // Makes room for so many places, held and new, in a chunk of so many.
  void reserve(const AttentionLayer& layer, int64_t num_keys, int64_t chunk);

  // Takes what is held out of the slots.
  void load_slots(const AttentionLayer& layer, const Slots& slots, const NewTokens& tokens, int64_t stream, int64_t head,
             int64_t count, const int64_t* limits);

  int64_t chunks() const { return (count_ + tokens_->chunk - 1) / tokens_->chunk; }

  // Units of work of this chunk: calls with each number below `pieces`, then with each below `bands`.
  int64_t key_blocks() const;
  int64_t splits() const;
  void prepare(int64_t block, Scratch& scratch);
  void attend(int64_t split, Scratch& scratch);

  // Adds up the scores, evicts, and goes to the next chunk; after the last, puts what is held back into the slots.
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
  int64_t stream_ = 0, local_head_ = 0, count_ = 0;  // tokens of the stream in this call
  const int64_t* limits_ = nullptr;           // of each chunk
  int64_t chunk_ = 0, chunk_begin_ = 0;             // of the chunk, of its first token
  int64_t seen_ = 0, num_held_ = 0, num_new_ = 0, num_keys_ = 0;  // before the chunk; new in it; held and new
  int64_t groups_ = 0, block_queries_ = 0;
  bool long_term_ = false;
  int64_t score_stride_ = 0;

  Buffer<float> keys_, values_;            // panels of rotated keys; [places][padded value_size]
  Buffer<float> sums_, squares_;           // [bands][sums_stride_]: attention received
  Buffer<float> scores_, long_term_scores_, priority_;   // [places]
  Buffer<int32_t> index_, rank_, slot_, order_;  // [places]
  Buffer<uint8_t> keep_, occupied_;            // [places], [slots]
  Buffer<float> key_offsets_, key_scales_;  // [2][head_size]: grids of keys, as they are and as they were
  Buffer<float> decays_, long_term_decays_;  // of a query's attention, by how many come after it
  Buffer<float> key_, value_;              // one of each
};

}  // namespace prefill
