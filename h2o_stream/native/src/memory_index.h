// The index of a memory: blocks of tokens whose keys are alike, so that a search scans the best blocks in place of all.
//
// A chapter is some full segments, in order. For each head it has the codes of their tokens once more, sorted so that
// those of keys that are alike lie together, the places of these tokens, and a summary of each block: the code of the
// mean of its keys. Queries are compared with all summaries, and then with the codes of the best blocks.
//
// A chapter follows from its segments and the head's codebook. It is made when they are full, and does not change.

#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "abi.h"
#include "memory_codes.h"

namespace memory {

// A head's parts of a chapter of `tokens` tokens, at most 65,536. Summaries [summary blocks][code bytes][kBlock] lie
// where a segment has codes, those of all heads together, so that they are on few pages; blocks where a segment has the
// head's data: codes [code bytes][kBlock] and places in the chapter [kBlock], as uint16, of each.
struct ChapterLayout {
  int64_t tokens, code_bytes;

  int64_t blocks() const { return tokens / kBlock; }
  int64_t summary_blocks() const { return (blocks() + kBlock - 1) / kBlock; }
  int64_t codes_bytes() const { return kBlock * code_bytes; }
  int64_t block_bytes() const { return codes_bytes() + kBlock * int64_t(sizeof(uint16_t)); }
  int64_t bytes() const { return blocks() * block_bytes(); }
  // Where summaries begin, by where codes begin in a segment.
  int64_t summaries(int64_t scan) const { return scan / kSegment * kBlock * summary_blocks(); }
};

// A block of the index.
struct IndexBlock {
  const uint8_t *codes, *places;
  int64_t start, last;  // the first place of its chapter, and the last one in it

  // The place of a token; negative if it has been forgotten.
  int64_t place(int64_t lane) const {
    uint16_t place;
    std::memcpy(&place, places + lane * int64_t(sizeof place), sizeof place);
    return start + std::min<int64_t>(place, last);  // whatever a state has
  }
};

// The index of a head. Its blocks are counted through all chapters.
class HeadIndex {
 public:
  HeadIndex() = default;
  // `scan` and `data` are where a segment has the head's codes and data.
  HeadIndex(const AttentionLayer& layer, const Slots& slots, int64_t scan, int64_t data)
      : layout_{layer.memory_chapter * kSegment, CodeShape{layer.head_size}.bytes()},
        chapters_(slots.memory_chapters),
        bounds_(slots.memory_chapter_bounds),
        summaries_(layout_.summaries(scan)),
        data_(data) {}

  int64_t chapters() const { return bounds_[1]; }
  int64_t chapter_blocks() const { return layout_.blocks(); }
  int64_t summary_blocks() const { return layout_.summary_blocks(); }
  // The place where a chapter begins; negative if some of its tokens have been forgotten.
  int64_t start(int64_t chapter) const { return bounds_[0] + chapter * layout_.tokens; }
  // A block of summaries, counted through all chapters.
  const uint8_t* summaries(int64_t i) const {
    return chapter(i / summary_blocks()) + summaries_ + i % summary_blocks() * layout_.codes_bytes();
  }
  // What a summary stands for; -1 for nothing.
  int64_t block_of(int64_t i, int64_t lane) const {
    const int64_t block = i % summary_blocks() * kBlock + lane;
    return block < layout_.blocks() ? i / summary_blocks() * layout_.blocks() + block : -1;
  }
  IndexBlock block(int64_t number) const {
    const int64_t i = number / chapter_blocks();
    const uint8_t* codes = chapter(i) + data_ + number % chapter_blocks() * layout_.block_bytes();
    return {codes, codes + layout_.codes_bytes(), start(i), layout_.tokens - 1};
  }

 private:
  const uint8_t* chapter(int64_t i) const { return reinterpret_cast<const uint8_t*>(chapters_[i]); }

  ChapterLayout layout_{};
  const int64_t *chapters_ = nullptr, *bounds_ = nullptr;
  int64_t summaries_ = 0, data_ = 0;
};

// Makes a head's parts of a chapter: halves tokens along the dimension in which they differ most, down to blocks.
class ChapterMaker {
 public:
  // `segments` are addresses, `scan` is where codes begin in each; `scratch` has `scratch_bytes`.
  ChapterMaker(const Codebook& codebook, CodeShape shape, ChapterLayout layout, const int64_t* segments, int64_t scan,
               void* scratch);

  static int64_t scratch_bytes(CodeShape shape, ChapterLayout layout) {
    return layout.tokens * int64_t(shape.dims() * sizeof(float) + sizeof(Entry));
  }
  // Writes summaries and blocks.
  void write(uint8_t* summaries, uint8_t* blocks);

 private:
  using Entry = std::pair<float, int32_t>;  // a token and its coordinate

  void split(Entry* begin, Entry* end);
  int64_t widest_dimension(const Entry* begin, const Entry* end) const;
  const float* point(int32_t token) const { return points_ + token * dims_; }
  const uint8_t* code(int64_t token) const {
    return reinterpret_cast<const uint8_t*>(segments_[token / kSegment]) + scan_ +
           token % kSegment / kBlock * layout_.codes_bytes() + token % kBlock;
  }

  const Codebook& codebook_;
  const int64_t dims_;
  const ChapterLayout layout_;
  const int64_t* segments_;
  const int64_t scan_;
  Entry* order_;
  float* points_;  // [tokens][dims]: keys, as their codes say
};

}  // namespace memory
