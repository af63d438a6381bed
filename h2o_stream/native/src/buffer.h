// Zero-initialized memory aligned to a cache line.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

template <class Number>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) : count_(count) {
    if (!count) return;
    const int64_t bytes = (count * int64_t(sizeof(Number)) + 63) / 64 * 64 + 64;  // a vector past the end may be read
    numbers_.reset(static_cast<Number*>(std::aligned_alloc(64, bytes)));
    if (!numbers_) throw std::bad_alloc();
    std::memset(static_cast<void*>(numbers_.get()), 0, bytes);
  }

  Number* data() const { return numbers_.get(); }
  Number* at(int64_t place) const { return numbers_.get() + place; }
  Number& operator[](int64_t place) const { return numbers_.get()[place]; }
  int64_t size() const { return count_; }

  // Grows to `count` elements; growing discards the contents.
  void reserve(int64_t count) {
    if (count > count_) *this = Buffer(count);
  }

 private:
  struct Free {
    void operator()(Number* numbers) const { std::free(numbers); }
  };
  std::unique_ptr<Number, Free> numbers_;
  int64_t count_ = 0;
};
