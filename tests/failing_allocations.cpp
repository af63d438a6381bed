// Lets some allocations of the compiled library fail, or starts of threads. Preloaded, so that it comes before the C
// library; see run_failing_allocations.py.

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

extern "C" void* __libc_malloc(size_t bytes);

namespace {

std::atomic<bool> counts{false};
std::atomic<long> calls{0}, begin{0}, end{0}, failures{0};

// Whether a call from this address is one of those that fail.
bool fails(void* caller) {
  Dl_info from;
  if (!counts || !dladdr(caller, &from) || !std::strstr(from.dli_fname, "_h2o_")) return false;
  const long number = calls++;
  if (number < begin || number >= end) return false;
  ++failures;
  return true;
}

template <class Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// From now on `count` allocations fail, after the first `number`.
void fail_allocations(long number, long count) {
  calls = 0, failures = 0, begin = number, end = number + count;
  counts = true;
}

// From now on none fails; returns how many have.
long allow_allocations() {
  counts = false;
  return failures;
}

void* malloc(size_t bytes) { return fails(__builtin_return_address(0)) ? nullptr : __libc_malloc(bytes); }

void* aligned_alloc(size_t alignment, size_t bytes) {
  static const auto allocate = original<void*(size_t, size_t)>("aligned_alloc");
  return fails(__builtin_return_address(0)) ? nullptr : allocate(alignment, bytes);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto create = original<decltype(pthread_create)>("pthread_create");
  return fails(__builtin_return_address(0)) ? EAGAIN : create(thread, attributes, run, argument);
}
}
