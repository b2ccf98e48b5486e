// What a loop is called with: tables, numbers, the shape of activations.
#pragma once
#include "values.h"

namespace normkit {

struct Table {  // numbers of any type, one at a time
  void* at;
  int8_t type;
  explicit operator bool() const { return at != nullptr; }
  double operator[](int64_t i) const {
    switch (type) {
      case FLOAT: return static_cast<float*>(at)[i];
      case DOUBLE: return static_cast<double*>(at)[i];
      case INT64: return double(static_cast<int64_t*>(at)[i]);
      default: return up(static_cast<bfloat16*>(at)[i]);
    }
  }
  void set(int64_t i, double x) const {
    switch (type) {
      case FLOAT: static_cast<float*>(at)[i] = float(x); break;
      case DOUBLE: static_cast<double*>(at)[i] = x; break;
      case INT64: static_cast<int64_t*>(at)[i] = int64_t(x); break;
      default: put(static_cast<bfloat16*>(at) + i, float(x));
    }
  }
};

struct Arguments {
  const Call& call;
  int tensor = 0, number = 0;
  Table table() {
    Table made{call.at[tensor], call.type[tensor]};
    ++tensor;
    return made;
  }
  template <class T> T* of() { return static_cast<T*>(call.at[tensor++]); }
  double* doubles() { return of<double>(); }
  int64_t size() { return int64_t(call.number[number++]); }
  double real() { return call.number[number++]; }
};

struct Shape {
  int64_t rows, C, L;
  bool last;
  explicit Shape(Arguments& given)
      : rows(given.size()), C(given.size()), L(given.size()), last(given.size()) {}
};

inline double or_one(Table table, int64_t i) { return table ? table[i] : 1; }
inline double or_zero(Table table, int64_t i) { return table ? table[i] : 0; }

}  // namespace normkit
