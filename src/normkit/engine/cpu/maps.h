// The map of activations, and what follows it.
#pragma once
#include <type_traits>

#include "tables.h"

namespace normkit {

// The tables of a map; each has a row for each sample, or one for all (step 0).
struct Map {
  Table scale, shift, center;
  int64_t scale_step, shift_step, center_step;
  explicit Map(Arguments& given)
      : scale(given.table()), shift(given.table()), center(given.table()),
        scale_step(given.size()), shift_step(given.size()), center_step(given.size()) {}
  bool same() const { return !scale_step && !shift_step && !center_step; }

  // a, b, c of y = a·(x − c) + b in the type of the activations
  template <class A> void at(int64_t row, int64_t j, A& a, A& b, A& c) const {
    const double wide_a = scale[row * scale_step + j];
    const double wide_c = center ? center[row * center_step + j] : 0;
    a = A(wide_a);
    c = A(wide_c);
    double wide_b = shift ? shift[row * shift_step + j] : 0;
    if (const double rest = wide_c - double(c); rest != 0) wide_b -= wide_a * rest;
    b = A(wide_b);
  }
  template <class A> void lay(int64_t row, int64_t C, A* a, A* b, A* c) const {
    for (int64_t j = 0; j < C; ++j) at(row, j, a[j], b[j], c[j]);
  }
};

enum Follow { NOTHING, RESIDUAL, RELU, BOTH };

template <Follow F, class A> inline A finished(A y, A residual) {
  if constexpr (F == RESIDUAL || F == BOTH) y += residual;
  if constexpr (F == RELU || F == BOTH) y = y < 0 ? A{} : y;
  return y;
}
template <Follow F, class A> inline A before(A g, A x, A a, A b, A c, A residual) {
  if constexpr (F == RELU || F == BOTH) {
    A y = a * (x - c) + b;
    if constexpr (F == BOTH) y += residual;
    return y <= 0 ? A{} : g;
  }
  return g;
}

// the residual, or something else to read nothing from: no loop computes with a null
template <class T> const T* or_else(const T* residual, const T* x) {
  return residual ? residual : x;
}

template <class F> void by_follow(bool adds, bool relu, const F& body) {
  using std::integral_constant;
  if (adds && relu) body(integral_constant<Follow, BOTH>());
  else if (relu) body(integral_constant<Follow, RELU>());
  else if (adds) body(integral_constant<Follow, RESIDUAL>());
  else body(integral_constant<Follow, NOTHING>());
}

}  // namespace normkit
