// Arithmetic with numbers too small to be normal takes a hundred times as long on x86.

#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
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
#else
  ZeroDenormals() {}
  ~ZeroDenormals() {}
#endif
};
