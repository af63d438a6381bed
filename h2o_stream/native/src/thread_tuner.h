// Chooses between all threads and a single one, which others may assist, depending on the load of the machine.
//
// The threads of a step synchronize about 150 times per token. If another process preempts one of them, the others wait
// for it and a single thread is faster. Results do not depend on the choice.

#pragma once

#include <algorithm>
#include <cstdint>

class ThreadTuner {
 public:
  int64_t choose(int64_t max_threads) const { return state_ == kParallel || state_ == kTryParallel ? max_threads : 1; }

  // Records the duration of the last step. `assisted`: whether a single thread has assistants; `undisturbed`: whether
  // they were there all the time.
  void record(double seconds, bool assisted, bool undisturbed) {
    switch (state_) {
      case kParallel: return record_parallel(seconds, assisted ? 3 : 8);
      case kTrySerial:
        if (!count_trial(seconds)) return;
        if (trial_mean_ < 0.9 * parallel_mean_) {
          serial_mean_ = trial_mean_, serial_steps_ = kMinSerialSteps;
          return enter_serial(assisted);
        }
        baseline_ = parallel_mean_;
        return enter(kParallel, 0);
      case kSerial:
        serial_mean_ += (seconds - serial_mean_) / 8;
        undisturbed_ = assisted && undisturbed ? undisturbed_ + 1 : 0;
        if (--steps_left_ == 0 || undisturbed_ >= serial_steps_ / 4) enter(kTryParallel, kTrialSteps);
        return;
      case kTryParallel:
        if (seconds < kHopeless * serial_mean_ && !count_trial(seconds)) return;
        if (steps_left_ == 0 && trial_mean_ < serial_mean_) {
          parallel_mean_ = trial_mean_;
          return enter(kParallel, 0);
        }
        if (undisturbed_ || !assisted) serial_steps_ = std::min(2 * serial_steps_, kMaxSerialSteps);
        return enter_serial(assisted);
    }
  }

 private:
  enum State { kParallel, kTrySerial, kSerial, kTryParallel };

  // Steps per trial; single-threaded steps between trials, doubled after each failed trial. With assistants a fourth of
  // them in which they are undisturbed, or the most steps.
  static constexpr int64_t kTrialSteps = 4, kMinSerialSteps = 32, kMaxSerialSteps = 256;

  // A step that takes so many times as long ends a trial: a thread had to wait for its turn.
  static constexpr double kHopeless = 1.75;

  // A trial with assistants costs little, so that a mean of few steps may begin it.
  void record_parallel(double seconds, int64_t steps_of_mean) {
    parallel_mean_ += parallel_mean_ == 0 ? seconds : (seconds - parallel_mean_) / double(steps_of_mean);
    baseline_ = baseline_ == 0 ? parallel_mean_ : std::min(baseline_ * 1.0005, parallel_mean_);
    if (parallel_mean_ > 1.6 * baseline_) enter(kTrySerial, kTrialSteps);
  }

  // Counts a step of a trial; returns whether it was the last.
  bool count_trial(double seconds) {
    trial_mean_ += seconds / kTrialSteps;
    return --steps_left_ == 0;
  }

  void enter_serial(bool assisted) {
    undisturbed_ = 0;
    enter(kSerial, assisted ? kMaxSerialSteps : serial_steps_);
  }

  void enter(State state, int64_t steps) { state_ = state, steps_left_ = steps, trial_mean_ = 0; }

  State state_ = kParallel;
  int64_t steps_left_ = 0, serial_steps_ = kMinSerialSteps, undisturbed_ = 0;
  double parallel_mean_ = 0, serial_mean_ = 0, baseline_ = 0, trial_mean_ = 0;
};
