// How many threads run a step: all of them, or one while other processes want the processor.
//
// Threads of a step wait for each other 150 times a token. When one of them has lost its processor to somebody else the
// others wait for as long as it is away, and one thread alone is quicker. What a step gives does not depend on it.

#pragma once

#include <algorithm>
#include <cstdint>

class ThreadChoice {
 public:
  int64_t choose(int64_t most) const { return state_ == kTogether || state_ == kTryTogether ? most : 1; }

  // What the last step took.
  void learn(double seconds) {
    switch (state_) {
      case kTogether: return watch(seconds);
      case kTryAlone:
        if (!tried(seconds)) return;
        if (mean_ < 0.9 * together_) {
          alone_ = mean_, stay_ = kShortest;
          return enter(kAlone, stay_);
        }
        usual_ = together_;
        return enter(kTogether, 0);
      case kAlone:
        alone_ += (seconds - alone_) / 8;
        if (--left_ == 0) enter(kTryTogether, kTrial);
        return;
      case kTryTogether:
        if (seconds < 3 * alone_ && !tried(seconds)) return;
        if (left_ == 0 && mean_ < 0.9 * alone_) {
          together_ = mean_;
          return enter(kTogether, 0);
        }
        stay_ = std::min(2 * stay_, kLongest);
        return enter(kAlone, stay_);
    }
  }

 private:
  enum State { kTogether, kTryAlone, kAlone, kTryTogether };

  // Steps of a trial; steps alone until all are tried again, more each time that it is in vain.
  static constexpr int64_t kTrial = 4, kShortest = 32, kLongest = 256;

  void watch(double seconds) {
    together_ = together_ == 0 ? seconds : together_ + (seconds - together_) / 8;
    usual_ = usual_ == 0 ? together_ : std::min(usual_ * 1.0005, together_);
    if (together_ > 1.6 * usual_) enter(kTryAlone, kTrial);
  }

  // Counts a step of a trial; whether it was the last.
  bool tried(double seconds) {
    mean_ += seconds / kTrial;
    return --left_ == 0;
  }

  void enter(State state, int64_t steps) { state_ = state, left_ = steps, mean_ = 0; }

  State state_ = kTogether;
  int64_t left_ = 0, stay_ = kShortest;
  double together_ = 0, alone_ = 0, usual_ = 0, mean_ = 0;
};
