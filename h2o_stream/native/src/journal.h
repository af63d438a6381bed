// What tokens change, so that they can be taken back.
//
// Each change is followed by how it is undone, so that changes can be undone from the last one on.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

class Journal {
 public:
  // What `save` takes of so many bytes, and `note` of a change of this size.
  static constexpr int64_t room_for(int64_t bytes) { return (bytes + 7) / 8 * 8 + int64_t(sizeof(Entry)); }

  // Forgets everything, and makes room for so many bytes; memory that is not used is not touched.
  void begin(int64_t bytes) {
    if (bytes > room_) {
      room_ = 0;
      buffer_.reset(static_cast<uint8_t*>(std::malloc(bytes)));
      if (!buffer_) throw std::bad_alloc();
      room_ = bytes;
    }
    end_ = 0;
  }

  // Saves memory that a token is about to change. Several threads may.
  void save(int64_t token, void* memory, int64_t bytes) {
    const auto restore = [](const uint8_t* saved, const Entry& entry) {
      std::memcpy(entry.memory, saved, entry.bytes);
    };
    append(memory, {restore, memory, bytes, token});
  }

  // Notes a change, which has `void undo() const`. Several threads may.
  template <class Change>
  void note(int64_t token, const Change& change) {
    const auto undo = [](const uint8_t* saved, const Entry&) { reinterpret_cast<const Change*>(saved)->undo(); };
    append(&change, {undo, nullptr, sizeof change, token});
  }

  // Undoes what the tokens from `first` on have changed, and forgets the rest.
  void undo(int64_t first) {
    for (int64_t end = end_; end > 0;) {
      Entry entry;
      std::memcpy(&entry, buffer_.get() + end - sizeof entry, sizeof entry);
      end -= room_for(entry.bytes);
      if (entry.token >= first) entry.undo(buffer_.get() + end, entry);
    }
    end_ = 0;
  }

  int64_t bytes() const { return end_; }

 private:
  struct Entry {
    void (*undo)(const uint8_t* saved, const Entry& entry);
    void* memory;
    int64_t bytes, token;
  };
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };

  void append(const void* saved, const Entry& entry) {
    const int64_t size = room_for(entry.bytes);
    uint8_t* to = buffer_.get() + end_.fetch_add(size, std::memory_order_relaxed);
    std::memcpy(to, saved, entry.bytes);
    std::memcpy(to + size - sizeof entry, &entry, sizeof entry);
  }

  std::unique_ptr<uint8_t, Free> buffer_;
  int64_t room_ = 0;
  std::atomic<int64_t> end_{0};
};

// Where a token's changes go; without a journal nowhere.
struct JournalPage {
  Journal* journal = nullptr;
  int64_t token = 0;

  void save(void* memory, int64_t bytes) const {
    if (journal) journal->save(token, memory, bytes);
  }
  template <class Change>
  void note(const Change& change) const {
    if (journal) journal->note(token, change);
  }
};
