// The search in the memory of a head: finds the tokens that queries attend to.
//
// The codes of all tokens are compared with a query by a table, and the keys of the best of these exactly; the query
// attends to the best of all. Every token is seen at its own distance, but none farther than `memory_distance`, so that
// for older tokens it is the query that is rotated, once; codes of newer ones that lie together are compared at the
// distance of one of them. Some queries of a head share their candidates, so that codes and keys are read once.
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

  // Begins a search in a memory: distances are those from token `newest`.
  void begin(const AttentionLayer& layer, const HeadMemory& memory, int32_t newest);

  // Adds a query [head_size], un-rotated.
  void add_query(const float* query);

  // Counts the added queries for a codebook that has not been learned. One thread may do so.
  void count_queries();

  // Searches part `part` of `parts`.
  void search(int64_t part, int64_t parts);

  // What a query attends to in the part that was searched last, best first, with logits: products times `scaling`.
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

  bool is_exact() const;
  int64_t far_blocks() const;
  void set_thresholds(int64_t far);
  void make_tables(int64_t distance, std::vector<Table>& tables);
  void scan_near(int64_t block);
  void scan(Range blocks, const std::vector<Table>& tables);
  template <int64_t queries>
  void scan(Range blocks, const Table* tables, int64_t first);
  template <int64_t queries>
  void add_candidates(int64_t block, const uint64_t* tokens, const uint8_t* sums, int64_t first);
  void keep_best(Candidates& candidates, int64_t first, int64_t wanted) const;
  void multiply(int64_t batch);
  const float* rotate(int64_t query, int64_t distance);

  const AttentionLayer* layer_ = nullptr;
  HeadMemory memory_;
  int32_t newest_ = 0;
  int64_t count_ = 0, stride_ = 0;  // queries; their padded size
  bool has_thresholds_ = false;
  Buffer<float> queries_, far_queries_;  // [queries][stride]: un-rotated, and rotated by the largest distance
  Buffer<float> rotated_;                // a query or key
  // By query: tables for older tokens and for a block of newer ones; the products that candidates reach; the sums of
  // older ones that do; and those of the tokens that are scanned.
  std::vector<Table> far_, near_;
  std::vector<float> thresholds_;
  std::vector<int32_t> far_limits_, limits_;
  // By batch of queries: newer candidates, then older ones; and how many are newer.
  std::vector<Candidates> candidates_;
  std::vector<int64_t> num_near_;
  Buffer<uint8_t> sample_;   // [blocks][kTogether][kBlock]: sums
  int64_t multiplied_ = -1;  // the batch of the products
  std::vector<int32_t> places_;
  Buffer<float> products_;  // [kTogether][max_places_]: of places
  int64_t max_places_ = 0;
  std::vector<Match> matches_;
};

// Adds a match to the best ones, which are sorted and at most `wanted`.
void add_match(const Match& match, int64_t wanted, std::vector<Match>& best);

}  // namespace memory
