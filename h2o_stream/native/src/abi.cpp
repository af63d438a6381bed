#include "abi.h"

#include "simd.h"

// The SHA-256 of the abi.py that declares this library's interface.
extern "C" const char* h2o_abi() { return H2O_ABI; }

// The instruction set this library was compiled for.
extern "C" int64_t h2o_library_instructions() {
#if defined(H2O_AVX512)
  return kAvx512;
#elif defined(H2O_VNNI)
  return kAvxVnni;
#elif defined(H2O_AVX2)
  return kAvx2;
#elif defined(H2O_NEON_I8MM)
  return kI8mm;
#elif defined(H2O_NEON_DOT)
  return kNeon;
#else
  return kPortable;
#endif
}
