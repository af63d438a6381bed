#include "memory_index.h"

#include <algorithm>

namespace memory {

ChapterMaker::ChapterMaker(const Codebook& codebook, CodeShape shape, ChapterLayout layout, const int64_t* segments,
                           int64_t scan, void* scratch)
    : codebook_(codebook),
      dims_(shape.dims()),
      layout_(layout),
      segments_(segments),
      scan_(scan),
      order_(static_cast<Entry*>(scratch)),
      points_(reinterpret_cast<float*>(order_ + layout.tokens)) {}

void ChapterMaker::write(uint8_t* summaries, uint8_t* blocks) {
  for (int64_t token = 0; token < layout_.tokens; ++token) {
    codebook_.decode(code(token), kBlock, points_ + token * dims_);
    order_[token] = {0, int32_t(token)};
  }
  split(order_, order_ + layout_.tokens);
  for (int64_t block = 0; block < layout_.blocks(); ++block) {
    Entry* entries = order_ + block * kBlock;
    std::sort(entries, entries + kBlock, [](const Entry& a, const Entry& b) { return a.second < b.second; });
    float mean[kMaxGroups * kGroupDims] = {};
    uint8_t* codes = blocks + block * layout_.block_bytes();
    for (int64_t i = 0; i < kBlock; ++i) {
      const int32_t token = entries[i].second;
      for (int64_t d = 0; d < dims_; ++d) mean[d] += point(token)[d] / kBlock;
      for (int64_t byte = 0; byte < layout_.code_bytes; ++byte) codes[byte * kBlock + i] = code(token)[byte * kBlock];
      const uint16_t place = uint16_t(token);
      std::memcpy(codes + layout_.codes_bytes() + i * int64_t(sizeof place), &place, sizeof place);
    }
    codebook_.encode_point(mean, summaries + block / kBlock * layout_.codes_bytes() + block % kBlock, kBlock);
  }
}

// Sorts some tokens into blocks: first those of smaller coordinates.
void ChapterMaker::split(Entry* begin, Entry* end) {
  const int64_t blocks = (end - begin) / kBlock;
  if (blocks < 2) return;
  const int64_t dimension = widest_dimension(begin, end);
  for (Entry* entry = begin; entry < end; ++entry) {
    const float x = point(entry->second)[dimension];
    entry->first = x == x ? x : 0;  // NaN has no order
  }
  Entry* middle = begin + blocks / 2 * kBlock;
  std::nth_element(begin, middle, end);
  split(begin, middle), split(middle, end);
}

int64_t ChapterMaker::widest_dimension(const Entry* begin, const Entry* end) const {
  float sums[kMaxGroups * kGroupDims] = {}, squares[kMaxGroups * kGroupDims] = {}, variances[kMaxGroups * kGroupDims];
  for (const Entry* entry = begin; entry < end; ++entry) {
    const float* x = point(entry->second);
    for (int64_t d = 0; d < dims_; ++d) sums[d] += x[d], squares[d] += x[d] * x[d];
  }
  for (int64_t d = 0; d < dims_; ++d) variances[d] = squares[d] - sums[d] * sums[d] / float(end - begin);
  return std::max_element(variances, variances + dims_) - variances;
}

}  // namespace memory

// Makes a head's parts of a chapter, whose first segment is `segments`. `scan` and `data` are where a segment has the
// head's codes and data.
extern "C" void h2o_memory_chapter(const int64_t* segments, int64_t count, int64_t scan, int64_t data, float* codebook,
                                   int64_t key_size, void* scratch, uint8_t* chapter) {
  const memory::CodeShape shape{key_size};
  const memory::ChapterLayout layout{count * memory::kSegment, shape.bytes()};
  memory::ChapterMaker(memory::Codebook(codebook, key_size), shape, layout, segments, scan, scratch)
      .write(chapter + layout.summaries(scan), chapter + data);
}
