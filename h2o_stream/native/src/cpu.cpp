// Which instruction sets there are: what the processor has, and what this library was compiled for.

#include "simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// In the order of library.py's INSTRUCTIONS.
enum Instructions : int64_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows half precision. AVX2, which is asked for too, covers the registers.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

}  // namespace

// The best that the processor and the system have.
extern "C" int64_t h2o_cpu_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return kPortable;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vnni");
  return wide ? kAvx512 : kAvx2;
#else
  return kPortable;
#endif
}

// What the vectors of this library are made of.
extern "C" int64_t h2o_library_level() {
#if defined(H2O_AVX512)
  return kAvx512;
#elif defined(H2O_AVX2)
  return kAvx2;
#else
  return kPortable;
#endif
}
