// The library's thread pool. All threads run the same job and synchronize at barriers.

#pragma once

#include <cstdint>

// A half-open range of indices.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// A thread of a job.
class Worker {
 public:
  int64_t index, count;

  // This thread's share of `total` items, in whole units.
  Range partition(int64_t total, int64_t unit = 1) const {
    const int64_t units = (total + unit - 1) / unit;
    const int64_t begin = units * index / count * unit, end = units * (index + 1) / count * unit;
    return {begin < total ? begin : total, end < total ? end : total};
  }

  // Whether this thread processes an indivisible item.
  bool owns(int64_t item) const { return item % count == index; }

  // Waits until all threads of the job have arrived.
  void barrier() const;
};

// The calling thread works for someone who waits: where some cores are slower than others, it gets the fast ones. Linux
// finds that out by itself.
void prefer_fast_cores();

using Job = void (*)(void* context, const Worker& worker);

// Runs a job on `threads` threads, including the caller, or on those that there are if there is no memory for more;
// returns when all have finished. A job throws nothing.
void run_on_threads(int64_t threads, Job job, void* context);

template <class Body>
void parallel(int64_t threads, Body body) {
  run_on_threads(
      threads, [](void* context, const Worker& worker) { (*static_cast<Body*>(context))(worker); }, &body);
}
