#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Threads spin this long before they sleep: longer than the time between two barriers of a small model.
constexpr auto kSpinTime = std::chrono::microseconds(60);

void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
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

  void wait_past(int32_t before) {
    auto start = std::chrono::steady_clock::time_point{};
    for (int64_t spins = 0; value() == before; ++spins) {
      cpu_relax();
      if (spins % 64 != 63) continue;
      const auto time = std::chrono::steady_clock::now();
      if (start == std::chrono::steady_clock::time_point{}) start = time;
      if (time - start > kSpinTime) return sleep(before);
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

class Pool {
 public:
  void run(int64_t threads, Job job, void* context) {
    std::lock_guard<std::mutex> lock(job_mutex_);
    while (int64_t(workers_.size()) + 1 < threads) {
      workers_.push_back(std::make_unique<EventCounter>());
      std::thread([this, start = workers_.back().get(), index = int64_t(workers_.size())] {
        work(*start, index);
      }).detach();
    }
    job_ = job, context_ = context, threads_ = threads;
    for (int64_t i = 0; i < threads - 1; ++i) workers_[i]->advance();
    job(context, Worker{0, threads});
    barrier();
  }

  void barrier() {
    const int32_t before = generation_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      generation_.advance();
    } else {
      generation_.wait_past(before);
    }
  }

 private:
  void work(EventCounter& start, int64_t index) {
    for (int32_t before = 0;; ++before) {
      start.wait_past(before);
      job_(context_, Worker{index, threads_});
      barrier();
    }
  }

  std::mutex job_mutex_;
  std::vector<std::unique_ptr<EventCounter>> workers_;  // one per worker, advanced to start it
  Job job_ = nullptr;
  void* context_ = nullptr;
  int64_t threads_ = 1;
  EventCounter generation_;
  alignas(64) std::atomic<int64_t> arrived_{0};
};

Pool* pool = nullptr;

// A forked process has none of the threads, so it gets a new pool. Pools are never destroyed: threads may be asleep in
// them.
Pool& global_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void Worker::barrier() const {
  if (count > 1) global_pool().barrier();
}

void run_on_threads(int64_t threads, Job job, void* context) {
  if (threads <= 1) return job(context, Worker{0, 1});
  global_pool().run(threads, job, context);
}
