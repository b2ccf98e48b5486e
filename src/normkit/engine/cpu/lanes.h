// Values side by side, as wide as the widest registers.
#pragma once
#include "values.h"

namespace normkit {

template <class A> struct Lanes {
  static constexpr int width = 64 / sizeof(A);
  typedef A vector __attribute__((vector_size(64)));
  static vector all(A x) { return x - vector{}; }
};

template <class T> inline typename Lanes<wide<T>>::vector load(const T* x) {
  typename Lanes<T>::vector made;
  std::memcpy(&made, x, sizeof made);
  return made;
}
template <> inline Lanes<float>::vector load(const bfloat16* x) {
  typedef uint16_t narrow __attribute__((vector_size(32)));
  typedef uint32_t bits __attribute__((vector_size(64)));
  narrow given;
  std::memcpy(&given, x, sizeof given);
  return (Lanes<float>::vector)(__builtin_convertvector(given, bits) << 16);
}

template <class V> inline double total(V lanes, int width) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += lanes[i];
  return sum;
}

constexpr int64_t BLOCK = 4096;  // values added up in lanes before they go into a double

}  // namespace normkit
