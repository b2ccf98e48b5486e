// The types of activations, and what each is computed in.
#pragma once
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace normkit {

struct bfloat16 {
  uint16_t bits;
};

template <class T> struct Wide { using type = T; };
template <> struct Wide<bfloat16> { using type = float; };
template <class T> using wide = typename Wide<T>::type;  // what a type is computed in

inline float up(float x) { return x; }
inline double up(double x) { return x; }
inline float up(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float made;
  std::memcpy(&made, &bits, 4);
  return made;
}
inline void put(float* to, float x) { *to = x; }
inline void put(double* to, double x) { *to = x; }
inline void put(bfloat16* to, float x) {  // to nearest even; what is not a number stays one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  to->bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

template <class F> void by_type(int8_t type, const F& body) {
  if (type == FLOAT) body(float());
  else if (type == DOUBLE) body(double());
  else body(bfloat16());
}

}  // namespace normkit
