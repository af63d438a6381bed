#include "assistants.h"

#include <pthread.h>

#include <exception>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using packed::kRows;

// Threads spin this long for the next job before they sleep: longer than the caller's work between two products.
constexpr auto kIdleTime = std::chrono::microseconds(200);

// Weights of a chunk: a few microseconds.
constexpr int64_t kChunkBytes = 24576;

// With fewer weights, asking costs more than it saves.
constexpr int64_t kMinBytes = 4 * kChunkBytes;

int64_t most_columns(const RowJob& job) {
  int64_t columns = 0;
  for (int64_t i = 0; i < job.count; ++i) columns = std::max(columns, job.matrices[i].columns);
  return columns;
}

bool is_packed(const RowJob& job) { return packed::is_packed(job.matrices[0].kind); }

// Whether all matrices read the same numbers of a vector.
bool can_be_shared(const RowJob& job) {
  return std::all_of(job.matrices, job.matrices + job.count,
                     [&](const Matrix& matrix) { return packed::is_packed(matrix.kind) == is_packed(job); });
}

bool is_in_time(const std::atomic<int32_t>& done, int32_t number, std::chrono::steady_clock::duration patience) {
  const auto is_done = [&] { return done.load(std::memory_order_acquire) == number; };
  if (is_done()) return true;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (std::chrono::steady_clock::now() < deadline) {
    for (int64_t i = 0; i < 4; ++i) cpu_relax();
    if (is_done()) return true;
  }
  return false;
}

Assistants* assistants = nullptr;

}  // namespace

// A forked process has none of the threads. See `global_pool` in threads.cpp.
Assistants& Assistants::get() {
  static std::once_flag once;
  std::call_once(once, [] {
    assistants = new Assistants;
    pthread_atfork(nullptr, nullptr, [] { assistants = new Assistants; });
  });
  return *assistants;
}

Assistants::Lock Assistants::join(int64_t threads) {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return lock;
  asked_ = std::min(threads, kMaxThreads) - 1, record_ = {};
  try {
    ready_.reserve(asked_);
    while (int64_t(assistants_.size()) < asked_) {
      auto assistant = std::make_unique<Assistant>();
      assistants_.reserve(assistants_.size() + 1);
      std::thread([this, &own = *assistant] { assist(own); }).detach();
      assistants_.push_back(std::move(assistant));
    }
  } catch (const std::exception&) {
    return {};
  }
#if defined(__linux__)
  caller_.store(int(syscall(SYS_gettid)), std::memory_order_relaxed);
#endif
  return lock;
}

void Assistants::leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& assistant : assistants_) {
    Offer offer = assistant->offer.load(std::memory_order_acquire);
    while (offer.begin < offer.end) {  // an exception has ended the job
      const Offer none{offer.job, offer.begin, offer.begin};
      if (assistant->offer.compare_exchange_weak(offer, none, std::memory_order_acq_rel)) offer = none;
    }
    for (int64_t chunk = assistant->first; chunk < offer.begin; ++chunk) {
      while (assistant->done[chunk].load(std::memory_order_acquire) != offer.job) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }
}

void Assistants::multiply(const Product* products, int64_t count, const Vectors& vectors, int64_t vector) {
  RowJob job;
  float* outs[RowJob::kMaxMatrices];
  for (int64_t i = 0; i < count; ++i) {
    const Matrix& matrix = *products[i].matrix;
    if (packed::has_columns(matrix.kind)) {  // whose rows are not one after the other
      skinny_gemm(matrix, vectors, Range{vector, vector + 1}, {0, matrix.rows}, products[i].out, 0);
      continue;
    }
    for (int64_t row = 0; row < matrix.rows;) {
      outs[job.count] = products[i].out + row;
      row = job.add(matrix, row);
      if (!job.full()) continue;
      run(job, outs, {vectors, vector});
      job = {};
    }
  }
  if (job.count) run(job, outs, {vectors, vector});
}

void Assistants::run(RowJob& job, float* const* outs, Factor factor) {
  job.divide(kChunkBytes);
  const bool large = job.nbytes() >= kMinBytes && most_columns(job) <= kMaxColumns && can_be_shared(job);
  if (large) ++record_.jobs;
  if (!large || !offer(job, factor)) return compute(job, {0, job.chunks()}, outs, factor);
  const int64_t own = job.chunks() / int64_t(ready_.size() + 1);
  const auto start = std::chrono::steady_clock::now();
  compute(job, {0, own}, outs, factor);
  const auto patience = (std::chrono::steady_clock::now() - start) / std::max<int64_t>(own, 1);
  bool in_time = int64_t(ready_.size()) == asked_;
  for (Assistant* assistant : ready_) in_time = collect(*assistant, job, outs, factor, patience) && in_time;
  record_.shared += in_time;
}

void Assistants::compute(const RowJob& job, Range chunks, float* const* outs, Factor factor) {
  job.for_each_part(chunks, [&](int64_t i, Range rows, int64_t) {
    skinny_gemm(job.matrices[i], factor.vectors, Range{factor.vector, factor.vector + 1}, rows, outs[i], 0);
  });
}

// Offers a job to the threads that wait for one, in equal parts behind the caller's own; returns whether there are any.
bool Assistants::offer(const RowJob& job, Factor factor) {
  ready_.clear();
  for (int64_t i = 0; i < asked_; ++i) {
    if (assistants_[i]->idle.load(std::memory_order_acquire) == number_) ready_.push_back(assistants_[i].get());
  }
  if (ready_.empty()) return false;
  number_ = int32_t(uint32_t(number_) + 1);
  post(job, factor);
  const int64_t chunks = job.chunks(), parts = int64_t(ready_.size()) + 1;
  for (int64_t i = 1; i < parts; ++i) {
    const uint16_t begin = uint16_t(chunks * i / parts), end = uint16_t(chunks * (i + 1) / parts);
    ready_[i - 1]->first = begin;
    ready_[i - 1]->offer.store(Offer{number_, begin, end}, std::memory_order_release);
  }
#if defined(__linux__)
  processor_.store(sched_getcpu(), std::memory_order_relaxed);
#endif
  posted_.advance();
  return true;
}

// Takes back what a thread has not begun, and what it does not finish in time; returns whether it has done its part.
bool Assistants::collect(Assistant& from, const RowJob& job, float* const* outs, Factor factor,
                         std::chrono::steady_clock::duration patience) {
  Offer offer = from.offer.load(std::memory_order_acquire);
  while (offer.begin < offer.end) {
    const Offer less{number_, offer.begin, uint16_t(offer.end - 1)};
    if (!from.offer.compare_exchange_weak(offer, less, std::memory_order_acq_rel)) continue;
    compute(job, {less.end, less.end + 1}, outs, factor);
    offer = from.offer.load(std::memory_order_acquire);
  }
  bool in_time = offer.begin > from.first;
  for (int64_t chunk = from.first; chunk < offer.begin; ++chunk) {
    if (is_in_time(from.done[chunk], number_, patience)) {
      job.for_each_part({chunk, chunk + 1}, [&](int64_t i, Range rows, int64_t first_tile) {
        std::copy_n(from.results + first_tile * kRows + rows.begin, rows.size(), outs[i] + rows.begin);
      });
    } else {
      compute(job, {chunk, chunk + 1}, outs, factor);
      in_time = false;
    }
  }
  return in_time;
}

void Assistants::post(const RowJob& job, Factor factor) {
  writing_.store(number_, std::memory_order_seq_cst);
  const int64_t columns = most_columns(job);
  const int64_t header[] = {job.count, job.tiles, job.chunk_tiles, columns};
  int64_t at = 0;
  bytes_.write(at, header, sizeof header);
  bytes_.write(at, job.matrices, job.count * sizeof(Matrix));
  for (const Vectors::Part& part : factor.vectors.parts(factor.vector, columns, is_packed(job))) {
    bytes_.write(at, part.data, part.bytes);
  }
}

// Copies the job of this number and its vector; returns false if another one was posted meanwhile.
bool Assistants::fetch(int32_t number, RowJob& job, const Vectors& vectors) const {
  const auto is_current = [&] { return writing_.load(std::memory_order_acquire) == number; };
  int64_t at = 0, header[4];
  bytes_.read(at, header, sizeof header);
  if (!is_current()) return false;
  job.count = header[0], job.tiles = header[1], job.chunk_tiles = header[2];
  bytes_.read(at, job.matrices, job.count * sizeof(Matrix));
  if (!is_current()) return false;
  for (const Vectors::Part& part : vectors.parts(0, header[3], is_packed(job))) bytes_.read(at, part.data, part.bytes);
  return is_current();
}

// What a thread does for ever.
void Assistants::assist(Assistant& own) {
  RowJob job;
  prefer_fast_cores();
  for (int32_t number = 0;;) {
    posted_.wait_past(number, kIdleTime);
    number = posted_.value();
    avoid_caller();
    if (fetch(number, job, own.vectors)) do_offered(own, job, number);
    own.idle.store(number, std::memory_order_release);
  }
}

void Assistants::do_offered(Assistant& own, const RowJob& job, int32_t number) {
  Offer offer = own.offer.load(std::memory_order_acquire);
  while (offer.job == number && offer.begin < offer.end) {
    const int64_t chunk = offer.begin;
    const Offer less{number, uint16_t(chunk + 1), offer.end};
    if (!own.offer.compare_exchange_weak(offer, less, std::memory_order_acq_rel)) continue;
    job.for_each_part({chunk, chunk + 1}, [&](int64_t i, Range rows, int64_t first_tile) {
      skinny_gemm(job.matrices[i], own.vectors, 1, rows, own.results + first_tile * kRows, 0);
    });
    own.done[chunk].store(number, std::memory_order_release);
    offer = own.offer.load(std::memory_order_acquire);
  }
}

// Leaves the caller's processor, where it would only take time from the caller, for another one that the caller may
// use.
void Assistants::avoid_caller() const {
#if defined(__linux__)
  const int processor = processor_.load(std::memory_order_relaxed);
  if (processor < 0 || processor != sched_getcpu()) return;
  cpu_set_t others;
  if (sched_getaffinity(caller_.load(std::memory_order_relaxed), sizeof others, &others)) return;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others)) sched_setaffinity(0, sizeof others, &others);
#endif
}

void Assistants::SharedBytes::write(int64_t& at, const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 8) {
    uint64_t word = 0;
    std::memcpy(&word, static_cast<const char*>(from) + i, std::min<int64_t>(8, bytes - i));
    words_[at++].store(word, std::memory_order_release);
  }
}

void Assistants::SharedBytes::read(int64_t& at, void* to, int64_t bytes) const {
  for (int64_t i = 0; i < bytes; i += 8) {
    const uint64_t word = words_[at++].load(std::memory_order_acquire);
    std::memcpy(static_cast<char*>(to) + i, &word, std::min<int64_t>(8, bytes - i));
  }
}
