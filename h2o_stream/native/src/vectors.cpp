#include "vectors.h"

using packed::kGroup;

Vectors::Vectors(int64_t count, int64_t size) { reserve(count, size); }

void Vectors::reserve(int64_t count, int64_t size) {
  const int64_t groups = simd::padded(size, kGroup) / kGroup;
  count_ = count, size_ = size;
  stride_ = simd::padded(size, 128);  // whole registers and cache lines
  group_stride_ = groups;
  if (numbers_.size() < count * stride_) numbers_ = Buffer<float>(count * stride_);
  if (scales_.size() < count * group_stride_) {
    groups_ = Buffer<dot::VectorGroup>(count * group_stride_);
    scales_ = Buffer<rounding::Scale>(count * group_stride_);
  }
}

void Vectors::quantize(int64_t vector, Range numbers) const {
  for (int64_t group = numbers.begin / kGroup; group < numbers.end / kGroup; ++group) {
    const int64_t index = vector * group_stride_ + group;
    scales_[index] = rounding::round_group(at(vector) + group * kGroup, [&](int64_t i, rounding::Codes codes) {
      groups_[index].store(i, codes);
    });
  }
}

std::array<Vectors::Part, 2> Vectors::parts(int64_t vector, int64_t columns, bool packed) const {
  if (!packed) return {Part{at(vector), columns * int64_t(sizeof(float))}, Part{nullptr, 0}};
  const int64_t first = vector * group_stride_, groups = columns / kGroup;
  return {Part{groups_.at(first), groups * int64_t(sizeof(dot::VectorGroup))},
          Part{scales_.at(first), groups * int64_t(sizeof(rounding::Scale))}};
}
