// What tokens overwrite, so that they can be taken back.
//
// Each piece of memory is followed by where it was, so that pieces can be put back from the last one on.

#pragma once

#include <atomic>

#include "buffer.h"

class Journal {
 public:
  // What `save` takes of a piece of memory.
  static int64_t bytes_for(int64_t bytes) { return (bytes + 7) / 8 * 8 + int64_t(sizeof(Entry)); }

  // Forgets everything, and makes room for so many bytes.
  void begin(int64_t bytes) {
    buffer_.reserve(bytes);
    bytes_ = bytes, end_ = 0;
  }

  // Saves memory that a token is about to change. Several threads may.
  void save(int64_t token, void* memory, int64_t bytes) {
    const int64_t size = bytes_for(bytes);
    uint8_t* to = buffer_.at(end_.fetch_add(size, std::memory_order_relaxed));
    const Entry entry{static_cast<uint8_t*>(memory), bytes, token};
    std::memcpy(to, memory, bytes);
    std::memcpy(to + size - sizeof entry, &entry, sizeof entry);
  }

  // Takes back what the tokens from `first` on have changed.
  void undo(int64_t first) {
    for (int64_t end = end_; end > 0;) {
      Entry entry;
      std::memcpy(&entry, buffer_.at(end - int64_t(sizeof entry)), sizeof entry);
      end -= bytes_for(entry.bytes);
      if (entry.token >= first) std::memcpy(entry.memory, buffer_.at(end), entry.bytes);
    }
    end_ = 0;
  }

  // Of the room that was made last.
  int64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    uint8_t* memory;
    int64_t bytes, token;
  };

  Buffer<uint8_t> buffer_;
  int64_t bytes_ = 0;
  std::atomic<int64_t> end_{0};
};
