// Zero-initialized memory aligned to a cache line.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

template <class Element>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : count_(count) {
    if (!count) return;
    const int64_t bytes = (count * int64_t(sizeof(Element)) + 63) / 64 * 64 + 64;  // a vector past the end may be read
    data_.reset(static_cast<Element*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_.get()), 0, bytes);
  }

  Element* data() const { return data_.get(); }
  Element* at(int64_t index) const { return data_.get() + index; }
  Element& operator[](int64_t index) const { return data_.get()[index]; }
  int64_t size() const { return count_; }

  // Grows to `count` elements; growing discards the contents.
  void reserve(int64_t count) {
    if (count > count_) *this = Buffer(count);
  }

 private:
  struct Free {
    void operator()(Element* data) const { std::free(data); }
  };
  std::unique_ptr<Element, Free> data_;
  int64_t count_ = 0;
};
