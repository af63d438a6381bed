#include "threads.h"

#include <pthread.h>
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "event_counter.h"

namespace {

class Pool {
 public:
  void run(int64_t threads, Job job, void* context) {
    std::lock_guard<std::mutex> lock(job_mutex_);
    threads = std::min(threads, start_workers(threads - 1) + 1);
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
  // Starts workers until there are so many, or until there is no memory for another one; returns how many there are.
  int64_t start_workers(int64_t count) {
    try {
      while (int64_t(workers_.size()) < count) {
        auto start = std::make_unique<EventCounter>();
        workers_.reserve(workers_.size() + 1);
        std::thread([this, &start = *start, index = int64_t(workers_.size()) + 1] { work(start, index); }).detach();
        workers_.push_back(std::move(start));
      }
    } catch (const std::exception&) {
    }
    return int64_t(workers_.size());
  }

  void work(EventCounter& start, int64_t index) {
    prefer_fast_cores();
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

void prefer_fast_cores() {
#if defined(__APPLE__)
  pthread_set_qos_class_self_np(QOS_CLASS_USER_INTERACTIVE, 0);
#endif
}

void run_on_threads(int64_t threads, Job job, void* context) {
  if (threads <= 1) return job(context, Worker{0, 1});
  global_pool().run(threads, job, context);
}
