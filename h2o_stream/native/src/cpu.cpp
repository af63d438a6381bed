// What the processor supports. Compiled for any processor, into a library of its own.

#include "abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace {

#if defined(__x86_64__)
// Not every compiler's __builtin_cpu_supports knows F16C and AVX-VNNI. Operating system support follows from AVX2.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#elif defined(__aarch64__) && defined(__linux__)
// Bits of Linux, which headers of older systems do not name.
bool has_products_of_bytes() { return getauxval(AT_HWCAP) >> 20 & 1; }
bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
}
bool has_products_of_bytes() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }
#endif

}  // namespace

// Whether the processor and the operating system support an instruction set.
extern "C" int64_t h2o_cpu_supports(int64_t instructions) {
  if (instructions == kPortable) return true;
#if defined(__x86_64__)
  if (instructions > kAvx512) return false;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return false;
  if (instructions == kAvx2) return true;
  if (instructions == kAvxVnni) return has_avx_vnni();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
  return (instructions == kNeon && has_products_of_bytes()) ||
         (instructions == kI8mm && has_products_of_bytes() && has_i8mm());
#else
  return false;
#endif
}

// Whether the processor multiplies bfloat16 numbers.
extern "C" int64_t h2o_cpu_multiplies_bfloat16() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return h2o_cpu_supports(kAvx512) && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 5);
#else
  return false;
#endif
}
