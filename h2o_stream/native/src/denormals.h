// Arithmetic with numbers too small to be normal takes a hundred times as long on x86.

#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#endif

// While one exists, what the thread computes is zero in place of such a number.
class ZeroDenormals {
 public:
  ZeroDenormals(const ZeroDenormals&) = delete;
  ZeroDenormals& operator=(const ZeroDenormals&) = delete;
#if defined(__SSE2__)
  ZeroDenormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~ZeroDenormals() { _mm_setcsr(before_); }

 private:
  const unsigned before_ = _mm_getcsr();
#elif defined(__aarch64__)
  ZeroDenormals() { set(before_ | 1u << 24); }
  ~ZeroDenormals() { set(before_); }

 private:
  static uint64_t get() {
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(uint64_t control) { asm volatile("msr fpcr, %0" : : "r"(control)); }

  const uint64_t before_ = get();
#else
  ZeroDenormals() {}
  ~ZeroDenormals() {}
#endif
};
