// Instruction sets: what the processor supports, and what this library was compiled for.

#include "simd.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

// In the order of INSTRUCTIONS in library.py.
enum Instructions : int64_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows F16C. Operating system support follows from AVX2.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

}  // namespace

// The best instruction set that the processor and the operating system support.
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

// The instruction set this library was compiled for.
extern "C" int64_t h2o_library_level() {
#if defined(H2O_AVX512)
  return kAvx512;
#elif defined(H2O_AVX2)
  return kAvx2;
#else
  return kPortable;
#endif
}
