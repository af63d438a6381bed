// The library's own threads: a job is run by all of them together, and they meet at barriers within it.

#pragma once

#include <cstdint>

// A thread's part of what is counted.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// One of the threads that run a job.
class Worker {
 public:
  int64_t index, count;

  // The part of `total` items that is this thread's, in whole units.
  Range partition(int64_t total, int64_t unit = 1) const {
    const int64_t units = (total + unit - 1) / unit;
    const int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < total ? begin : total, end < total ? end : total};
  }

  // Whether an item that is not divided is this thread's.
  bool owns(int64_t item) const { return item % count == index; }

  // Waits until all threads of the job have come here.
  void barrier() const;
};

using Job = void (*)(void* context, const Worker& worker);

// Runs a job on so many threads, the caller among them; returns when all have finished.
void run_on_threads(int64_t threads, Job job, void* context);

template <class Body>
void parallel(int64_t threads, Body body) {
  run_on_threads(
      threads, [](void* context, const Worker& worker) { (*static_cast<Body*>(context))(worker); }, &body);
}
