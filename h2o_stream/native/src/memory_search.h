// The search in the memory of a head: finds the tokens that queries attend to.
//
// The codes of all tokens are compared with a query by a table, and the keys of the best of these exactly; the query
// attends to the best of all. Every token is seen at its own distance, but none farther than `memory_distance`, so that
// for older tokens it is the query that is rotated, once; codes of newer ones that lie together are compared at the
// distance of one of them. Some queries of a head, a batch, share their candidates, so that codes and keys are read
// once. Of many older tokens only those are compared whose blocks the index finds (memory_index.h).
//
// The memory is searched in parts, for threads to share. What is found does not depend on who searches which.

#pragma once

#include <vector>

#include "abi.h"
#include "buffer.h"
#include "memory.h"
#include "threads.h"

namespace memory {

// Parts in which steps search.
constexpr int64_t kParts = 4;

// One for each thread.
class Search {
 public:
  // Allocates buffers for so many queries at a time.
  void reserve(const AttentionLayer& layer, int64_t queries);

  // Begins a search in a memory: distances are those from token `newest`, and about so many tokens are compared exactly
  // with each query, `memory_candidates` of the layer or `memory_question_candidates`.
  void begin(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest, int64_t candidates);

  // Adds a query [head_size], un-rotated.
  void add_query(const float* query);

  // Counts the added queries for a codebook that has not been learned. One thread may do so.
  void count_queries();

  // Searches part `part` of `parts`.
  void search(int64_t part, int64_t parts);

  // What a query attends to in the part that was searched last, with logits: products times `scaling`.
  std::vector<Match>& find(int64_t query, float scaling);

  // The best of some places, with their products.
  std::vector<Match>& best_of(const AttentionLayer& layer, const std::vector<int32_t>& places, const float* products,
                              float scaling);

 private:
  // A token by whose code a query may attend to it, and by how much its sum exceeds the limit.
  struct Candidate {
    int32_t excess, place;
  };
  using Candidates = std::vector<Candidate>;

  // Blocks of older tokens that a batch of queries is compared with: some of the index, then those of the memory from
  // `unindexed` on.
  struct OlderBlocks {
    const HeadMemory& memory;
    const IndexBlock* chosen;
    int64_t num_chosen, unindexed, count;

    const uint8_t* codes(int64_t i) const {
      return i < num_chosen ? chosen[i].codes : memory.codes(unindexed + i - num_chosen);
    }
    // Negative if the token has been forgotten.
    int64_t place(int64_t i, int64_t token) const {
      return i < num_chosen ? chosen[i].place(token) : (unindexed + i - num_chosen) * kBlock + token;
    }
  };

  bool is_exact() const;
  int64_t far_blocks() const;
  Range queries_of(int64_t batch) const { return {batch * kTogether, std::min((batch + 1) * kTogether, count_)}; }
  int64_t middle_of(int64_t block) const;
  template <class Visit>
  void for_each_near(int64_t part, int64_t parts, Visit visit) const;
  void prepare();
  void choose_blocks(int64_t batch);
  OlderBlocks older(int64_t batch) const;
  template <class Codes>
  void estimate_limits(Range queries, int64_t blocks, int64_t wanted, int64_t sampled, Codes codes_of);
  void scan_near(int64_t block);
  void scan_older(int64_t batch, Range blocks, int64_t prefetched);
  template <class Codes, class Visit>
  void scan(Range blocks, int64_t prefetched, int64_t queries, const Table* tables, const int32_t* limits,
            Codes codes_of, Visit visit);
  void add_candidate(int64_t batch, int32_t excess, int64_t place);
  static void keep_best(Candidates& candidates, int64_t first, int64_t wanted);
  void multiply(int64_t batch);

  const AttentionLayer* layer_ = nullptr;
  HeadMemory memory_;
  int32_t newest_ = 0;
  int64_t num_candidates_ = 0;      // that are wanted for each query
  int64_t count_ = 0, stride_ = 0;  // queries; their padded size
  bool has_thresholds_ = false;
  // Queries [queries][stride]: un-rotated, and rotated by the largest distance and by one of newer tokens.
  Buffer<float> queries_, far_queries_, near_queries_;
  Buffer<float> key_;
  // By query: tables for older tokens and for a block of newer ones; the products that candidates reach; the sums of
  // older ones that do; and those of the tokens that are scanned.
  std::vector<Table> far_, near_;
  std::vector<float> thresholds_;
  std::vector<int32_t> far_limits_, near_limits_;
  // Chapters whose index is used, the first block behind them, and, by batch, the blocks that are scanned.
  int64_t chapters_ = 0, unindexed_ = 0;
  std::vector<std::vector<IndexBlock>> chosen_;
  Candidates summaries_;
  // By batch of queries: newer candidates, then older ones; and how many are newer.
  std::vector<Candidates> candidates_;
  std::vector<int64_t> num_near_;
  Buffer<uint8_t> sums_;     // [blocks][queries][kBlock]
  int64_t multiplied_ = -1;  // the batch of the products
  // Of the candidates of a batch.
  std::vector<int32_t> places_;
  Buffer<const int8_t*> keys_;
  Buffer<float> scales_;
  Buffer<int32_t> distances_;
  Buffer<simd::Floats> unsummed_;
  Buffer<float> products_;  // [kTogether][max_places_]: of places
  int64_t max_places_ = 0;
  std::vector<Match> matches_;
};

}  // namespace memory
