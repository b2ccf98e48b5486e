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

template <class T> inline void store(T* to, typename Lanes<wide<T>>::vector x) {
  std::memcpy(to, &x, sizeof x);
}
template <> inline void store(bfloat16* to, Lanes<float>::vector x) {  // rounded as by ``put``
  typedef uint16_t narrow __attribute__((vector_size(32)));
  typedef uint32_t bits __attribute__((vector_size(64)));
  const bits given = (bits)x, nan = bits{} + 0x7fc0;
  const bits rounded = (given + 0x7fff + ((given >> 16) & 1)) >> 16;
  const narrow made = __builtin_convertvector(x != x ? nan : rounded, narrow);
  std::memcpy(to, &made, sizeof made);
}

// Where there are only n values for the lanes; apart, for most vectors are full.
template <class T> inline void copy(T* to, const T* from, int64_t n) {
  for (; n >= 4; n -= 4, to += 4, from += 4) std::memcpy(to, from, 4 * sizeof(T));
  for (; n > 0; --n) *to++ = *from++;
}
template <class V> inline V first_of(V x, int n, V rest) {
  auto lane = x < x;
  for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) lane[i] = i;
  return lane < n ? x : rest;
}
template <class T, class V> __attribute__((noinline)) V load_some(const T* x, int64_t n, V rest) {
  T given[64 / sizeof(wide<T>)];
  store(given, rest);
  copy(given, x, n);
  return load(given);
}
template <class T, class V> __attribute__((noinline)) void store_some(T* to, int64_t n, V x) {
  T made[64 / sizeof(wide<T>)];
  store(made, x);
  copy(to, made, n);
}

template <class V> inline double total(V lanes, int width) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += lanes[i];
  return sum;
}

constexpr int64_t BLOCK = 4096;  // values added up in lanes before they go into a double

}  // namespace normkit
