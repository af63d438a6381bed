// The ranks of one head's slots: 16 bits each, or 32 where there are more slots than 16 bits can count.

#pragma once

#include "abi.h"

class Ranks {
 public:
  // `head` is the index within the group.
  Ranks(const Slots& slots, int64_t head)
      : narrow_(is_narrow(slots) ? static_cast<int16_t*>(slots.rank) + head * slots.slot_count : nullptr),
        wide_(is_narrow(slots) ? nullptr : static_cast<int32_t*>(slots.rank) + head * slots.slot_count) {}

  static bool is_narrow(const Slots& slots) { return slots.slot_count <= kMaxNarrowSlots; }
  static int64_t bytes(const Slots& slots) { return is_narrow(slots) ? sizeof(int16_t) : sizeof(int32_t); }

  int64_t operator[](int64_t slot) const { return narrow_ ? narrow_[slot] : wide_[slot]; }
  void set(int64_t slot, int64_t rank) const {
    narrow_ ? void(narrow_[slot] = int16_t(rank)) : void(wide_[slot] = int32_t(rank));
  }

  // Calls `function` with the array of ranks, for loops over slots.
  template <class Function>
  void visit(Function function) const {
    narrow_ ? function(narrow_) : function(wide_);
  }

 private:
  int16_t* narrow_;
  int32_t* wide_;
};
