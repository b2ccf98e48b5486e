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

template <class T> inline void store(T* to, typename Lanes<T>::vector x) {
  std::memcpy(to, &x, sizeof x);
}
inline void store(bfloat16* to, Lanes<float>::vector x) {  // rounded as by put
  typedef uint16_t narrow __attribute__((vector_size(32)));
  typedef uint32_t bits __attribute__((vector_size(64)));
  const bits given = (bits)x, rounded = (given + 0x7fff + ((given >> 16) & 1)) >> 16;
  const narrow made = __builtin_convertvector((bits)(x != x) ? 0x7fc0 - bits{} : rounded, narrow);
  std::memcpy(to, &made, sizeof made);
}

// the same of the first ``n``: beside them are zeros, and nothing is written
template <int most, class T> inline void copy_some(T* to, const T* from, int64_t n) {
  if constexpr (most > 0) {
    if (n & most) std::memcpy(to, from, most * sizeof(T));
    copy_some<most / 2>(to + (n & most), from + (n & most), n);
  }
}
template <class T> inline typename Lanes<wide<T>>::vector load(const T* x, int64_t n) {
  constexpr int W = Lanes<wide<T>>::width;
  if (n >= W) return load(x);
  T some[W]{};
  copy_some<W / 2>(some, x, n);
  return load(some);
}
template <class T> inline void store(T* to, typename Lanes<wide<T>>::vector x, int64_t n) {
  constexpr int W = Lanes<wide<T>>::width;
  if (n >= W) return store(to, x);
  T some[W];
  store(some, x);
  copy_some<W / 2>(to, some, n);
}

template <class V> inline V first_of(V x, int n, V rest) {  // and the rest in the other lanes
  auto lane = x < x;
  for (size_t i = 0; i < sizeof x / sizeof x[0]; ++i) lane[i] = i;
  return lane < n ? x : rest;
}

// in double: lanes on to others, and their sum, by halves
template <class A, int bytes> struct Halves {
  typedef A part __attribute__((vector_size(bytes)));
  part at[2];
  template <class V> explicit Halves(const V& x) { std::memcpy(at, &x, sizeof at); }
};
template <class V> inline Lanes<double>::vector widened(V x) {
  return __builtin_convertvector(x, Lanes<double>::vector);
}
inline void add(double* to, Lanes<double>::vector x) { store(to, load(to) + x); }
inline void add(double* to, Lanes<float>::vector x) {
  const Halves<float, 32> halves(x);
  add(to, widened(halves.at[0]));
  add(to + 8, widened(halves.at[1]));
}
inline double total(Lanes<double>::vector x) {
  const Halves<double, 32> four(x);
  const Halves<double, 16> two(four.at[0] + four.at[1]);
  const auto last = two.at[0] + two.at[1];
  return last[0] + last[1];
}
inline double total(Lanes<float>::vector x) {
  const Halves<float, 32> halves(x);
  return total(widened(halves.at[0]) + widened(halves.at[1]));
}

constexpr int64_t BLOCK = 4096;  // values added up in lanes before they go into a double

}  // namespace normkit
