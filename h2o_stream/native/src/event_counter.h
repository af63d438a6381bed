// A counter whose changes threads wait for.

#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Threads spin this long before they sleep: longer than the time between two barriers of a small model.
constexpr auto kSpinTime = std::chrono::microseconds(60);

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // `yield` takes no time at all
#else
  sched_yield();
#endif
}

// A counter whose changes threads wait for, first spinning, then sleeping.
class EventCounter {
 public:
  int32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      changed_.notify_all();
    }
  }

  void wait_past(int32_t before, std::chrono::microseconds spin_time = kSpinTime) {
    auto start = std::chrono::steady_clock::time_point{};
    for (int64_t spins = 0; value() == before; ++spins) {
      cpu_relax();
      if (spins % 64 != 63) continue;
      const auto time = std::chrono::steady_clock::now();
      if (start == std::chrono::steady_clock::time_point{}) start = time;
      if (time - start > spin_time) return sleep(before);
    }
  }

 private:
  void sleep(int32_t before) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != before; });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

  alignas(64) std::atomic<int32_t> value_{0};
  alignas(64) std::atomic<int32_t> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};
