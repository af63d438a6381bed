// Threads that multiply rows for a caller who never waits for them.
//
// Beside other processes any thread may be interrupted, for about as long as a step takes, and at a barrier all others
// wait for it. Here the caller offers chunks of rows to threads that are there, and when its own are done does whatever
// is left, also chunks that a thread has begun but not finished. Threads work on copies of what the caller changes and
// write to memory of their own, from which the caller copies finished chunks. Results do not depend on who is first.
//
// The exception are weights: a thread may read those of a product that the caller has long finished, until `leave`.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "event_counter.h"
#include "row_job.h"

class Assistants {
 public:
  // Of the jobs that were large enough, how many all threads have had their part in, in time.
  struct Record {
    int64_t jobs = 0, shared = 0;

    // Whether the threads were there all the time; at first they have to wake up.
    bool undisturbed() const { return 10 * shared >= 8 * jobs; }
  };

  // Those of the process.
  static Assistants& get();

  // Makes `threads - 1` threads assist the caller for as long as it has the lock. There is none if they assist another
  // or there is no memory for them.
  using Lock = std::unique_lock<std::mutex>;
  Lock join(int64_t threads);

  // Multiplies one of some vectors. Only for whom they assist.
  void multiply(const Product* products, int64_t count, const Vectors& vectors, int64_t vector);

  // Of the one whom they assist.
  const Record& record() const { return record_; }

  // Waits until no thread reads weights, nor will for a job that was not finished.
  void leave();

 private:
  // Longer vectors are not shared.
  static constexpr int64_t kMaxColumns = 32768, kMaxThreads = 256;

  // The vector that a job is multiplied with.
  struct Factor {
    const Vectors& vectors;
    int64_t vector;
  };

  // Chunks that a thread was offered and nobody has begun.
  struct alignas(8) Offer {  // Clang writes less aligned ones by calls of a library
    int32_t job;
    uint16_t begin, end;
  };

  struct Assistant {
    alignas(64) std::atomic<Offer> offer{Offer{0, 0, 0}};
    std::atomic<int32_t> idle{0};                      // the last job, when nothing is left to do of it
    std::atomic<int32_t> done[RowJob::kMaxChunks]{};   // the last job whose chunk is in `results`
    alignas(64) float results[RowJob::kMaxRows];       // by tile
    const Vectors vectors{1, kMaxColumns};             // a copy
    uint16_t first = 0;                                // chunk that it was offered
  };

  // Memory that threads read while it may be written; they find out afterwards.
  class SharedBytes {
   public:
    void write(int64_t& at, const void* from, int64_t bytes);
    void read(int64_t& at, void* to, int64_t bytes) const;

   private:
    std::atomic<uint64_t> words_[kMaxColumns / 2 + 128]{};
  };

  void run(RowJob& job, float* const* outs, Factor factor);
  bool offer(const RowJob& job, Factor factor);
  bool collect(Assistant& from, const RowJob& job, float* const* outs, Factor factor,
               std::chrono::steady_clock::duration patience);
  void post(const RowJob& job, Factor factor);
  bool fetch(int32_t number, RowJob& job, const Vectors& vectors) const;
  static void compute(const RowJob& job, Range chunks, float* const* outs, Factor factor);
  void assist(Assistant& own);
  void do_offered(Assistant& own, const RowJob& job, int32_t number);
  void avoid_caller() const;

  std::mutex mutex_;  // of the caller
  std::vector<std::unique_ptr<Assistant>> assistants_;
  std::vector<Assistant*> ready_;  // those that the job was offered to
  int64_t asked_ = 0;
  int32_t number_ = 0;  // of the job
  Record record_;
  EventCounter posted_;
  alignas(64) std::atomic<int32_t> writing_{0};  // the job whose bytes are being written or were
  std::atomic<int> caller_{0}, processor_{-1};   // thread id, and where it runs
  SharedBytes bytes_;
};
