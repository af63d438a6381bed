// __builtin_shufflevector for GCC before 12.

#pragma once

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12

#include <type_traits>

// GCC compiles this to a permutation.
template <int... indices, class Vector>
inline auto h2o_shuffle(Vector a, Vector b) {
  using Element = std::remove_cv_t<std::remove_reference_t<decltype(a[0])>>;
  constexpr int count = sizeof(Vector) / sizeof(Element);
  using Result __attribute__((vector_size(sizeof(Element) * sizeof...(indices)))) = Element;
  return Result{(indices < count ? a[indices % count] : b[indices % count])...};
}

#define __builtin_shufflevector(a, b, ...) h2o_shuffle<__VA_ARGS__>(a, b)

#endif
