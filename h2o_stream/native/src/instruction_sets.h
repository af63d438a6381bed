// What the compiler may use of a processor: H2O_AVX2, H2O_AVX512, H2O_VNNI; H2O_NEON, H2O_NEON_DOT, H2O_NEON_I8MM.

#pragma once

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define H2O_AVX2
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(H2O_AVX2) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)
#define H2O_AVX512
#endif

// Products of bytes and of 16-bit numbers are added up by one instruction.
#if defined(H2O_AVX512) || (defined(H2O_AVX2) && defined(__AVXVNNI__))
#define H2O_VNNI
#endif

// Every 64-bit Arm processor; those with products of bytes; those with products of matrices of bytes.
#if defined(__aarch64__) && defined(__ARM_NEON)
#define H2O_NEON
#include <arm_neon.h>
#endif
#if defined(H2O_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define H2O_NEON_DOT
#endif
#if defined(H2O_NEON_DOT) && defined(__ARM_FEATURE_MATMUL_INT8)
#define H2O_NEON_I8MM
#endif
