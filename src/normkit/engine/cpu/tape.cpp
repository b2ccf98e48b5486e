// A tape: instructions on small tables of double, which tape.py has made of a layer's own
// coefficients. So layers in no family have theirs without torch's operations.
//
// Its numbers: how many constants, and these; how much scratch it takes, how many instructions, and
// these. An operation, sizes, and for each operand, the result first, its base, offset and strides:
// an axis that is reduced or repeated has a stride of 0.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "tables.h"
#include "threads.h"

namespace normkit {
namespace {

// in the order of OPERATIONS in tape.py
enum Operation {
  LOAD, STORE, LEFT_OUT,
  COPY, TO_FLOAT, TO_BFLOAT16, WHOLE, NEGATIVE, ABSOLUTE, SIGN, SQRT, RSQRT, CUBE, RECIPROCAL,
  EXP, EXPM1, LOG, LOG1P, TANH, SIGMOID, FLOOR, NOT, SUM, HIGHEST, LOWEST,
  ADD, SUB, MUL, DIV, MAX, MIN, POW, EQ, NE, LT, LE, GT, GE,
  AND, OR, WHERE, ADDCMUL, LERP,
  CUMSUM, ARGMAX, SORT, SORT_DOWN, GATHER, SCATTER, SCATTER_ADD,
};
constexpr int SCRATCH = -1, CONSTANT = -2;  // bases that are no tensor of the call
constexpr int DIMS = 6, OPERANDS = 4;

struct Instruction {
  int dims, operands;
  int64_t size[DIMS];
  double* at[OPERANDS];
  int64_t stride[OPERANDS][DIMS];

  Instruction(Arguments& given, double* scratch) {
    dims = int(given.size());
    for (int d = 0; d < dims; ++d) size[d] = given.size();
    operands = int(given.size());
    for (int k = 0; k < operands; ++k) {
      const int64_t base = given.size(), offset = given.size();
      double* begin = base == SCRATCH    ? scratch
                      : base == CONSTANT ? const_cast<double*>(given.call.number) + 1
                                         : static_cast<double*>(given.call.at[base]);
      at[k] = begin + offset;
      for (int d = 0; d < dims; ++d) stride[k][d] = given.size();
    }
  }

  int64_t values() const {
    int64_t all = 1;
    for (int d = 0; d < dims; ++d) all *= size[d];
    return all;
  }

  Instruction part(int64_t begin, int64_t end) const {  // of the first axis
    Instruction made = *this;
    made.size[0] = end - begin;
    for (int k = 0; k < operands; ++k) made.at[k] += begin * stride[k][0];
    return made;
  }
};

// body(pointers) for each place of all axes but the last
template <class F> void rows_of(const Instruction& i, const F& body) {
  const int outer = i.dims - 1;
  int64_t index[DIMS] = {};
  double* at[OPERANDS];
  std::copy(i.at, i.at + i.operands, at);
  while (true) {
    body(at);
    int d = outer - 1;
    for (; d >= 0; --d) {
      for (int k = 0; k < i.operands; ++k) at[k] += i.stride[k][d];
      if (++index[d] < i.size[d]) break;
      for (int k = 0; k < i.operands; ++k) at[k] -= i.size[d] * i.stride[k][d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// f(result, operands …) along the last axis. Steps of 0 and 1 are known to the compiler, which makes
// vectors of them: ``Steps`` are those of the operands in turn, -1 for any.
template <int... Steps, class F, size_t... K>
void line(const F& f, double* const* at, const int64_t* s, int64_t n, std::index_sequence<K...>) {
  constexpr int known[] = {Steps...};
#pragma GCC ivdep
  for (int64_t j = 0; j < n; ++j)
    f(at[0][j * (known[0] < 0 ? s[0] : known[0])],
      at[K + 1][j * (known[K + 1] < 0 ? s[K + 1] : known[K + 1])]...);
}

template <int Count, class F> void elements(const Instruction& i, const F& f) {
  const int last = i.dims - 1;
  const int64_t n = i.size[last];
  int64_t s[OPERANDS] = {};
  for (int k = 0; k <= Count; ++k) s[k] = i.stride[k][last];
  auto are = [&](int a, int b = 1, int c = 1) {
    const int steps[] = {1, a, b, c};
    return std::equal(s, s + Count + 1, steps);
  };
  constexpr std::make_index_sequence<Count> each;
  rows_of(i, [&](double* const* at) {
    if constexpr (Count == 1) {
      if (are(1)) return line<1, 1>(f, at, s, n, each);
      if (are(0)) return line<1, 0>(f, at, s, n, each);
      line<-1, -1>(f, at, s, n, each);
    } else if constexpr (Count == 2) {
      if (are(1, 1)) return line<1, 1, 1>(f, at, s, n, each);
      if (are(1, 0)) return line<1, 1, 0>(f, at, s, n, each);
      if (are(0, 1)) return line<1, 0, 1>(f, at, s, n, each);
      line<-1, -1, -1>(f, at, s, n, each);
    } else {
      if (are(1, 1, 1)) return line<1, 1, 1, 1>(f, at, s, n, each);
      line<-1, -1, -1, -1>(f, at, s, n, each);
    }
  });
}

template <class F> void reduction(const Instruction& i, const F& f) {
  const int last = i.dims - 1;
  const int64_t n = i.size[last], to = i.stride[0][last], from = i.stride[1][last];
  rows_of(i, [&](double* const* at) {
    if (to == 0) {
      double all = *at[0];
      for (int64_t j = 0; j < n; ++j) f(all, at[1][j * from]);
      *at[0] = all;
    } else if (to == 1 && from == 1) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) f(at[0][j], at[1][j]);
    } else {
      for (int64_t j = 0; j < n; ++j) f(at[0][j * to], at[1][j * from]);
    }
  });
}

// A whole row at a time; ``other`` is the size of the axis that is chosen from, where one is.
void along_rows(Operation operation, const Instruction& i, int64_t other) {
  const int last = i.dims - 1;
  const int64_t n = i.size[last];
  auto step = [&](int k) { return i.stride[k][last]; };
  std::vector<int64_t> order(operation == SORT || operation == SORT_DOWN ? n : 0);
  rows_of(i, [&](double* const* at) {
    if (operation == CUMSUM) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) at[0][j * step(0)] = sum += at[1][j * step(1)];
    } else if (operation == ARGMAX) {
      int64_t best = 0;
      auto value = [&](int64_t j) { return at[1][j * step(1)]; };
      for (int64_t j = 1; j < n && !std::isnan(value(best)); ++j)
        if (!(value(j) <= value(best))) best = j;
      *at[0] = double(best);
    } else if (operation == SORT || operation == SORT_DOWN) {  // values and places, of the third
      const double* from = at[2];
      const int64_t s = step(2);
      for (int64_t j = 0; j < n; ++j) order[j] = j;
      std::stable_sort(order.begin(), order.end(), [&](int64_t j, int64_t k) {
        const double a = from[j * s], b = from[k * s];
        if (std::isnan(a) || std::isnan(b))  // the largest of all
          return operation == SORT ? !std::isnan(a) : std::isnan(a) && !std::isnan(b);
        return operation == SORT ? a < b : a > b;
      });
      for (int64_t j = 0; j < n; ++j) {
        at[0][j * step(0)] = from[order[j] * s];
        at[1][j * step(1)] = double(order[j]);
      }
    } else {  // result, index, and what is gathered from or scattered
      for (int64_t j = 0; j < n; ++j) {
        const double index = at[1][j * step(1)];
        const bool inside = index >= 0 && index < double(other);
        const int64_t found = inside ? int64_t(index) : 0;
        if (operation == GATHER)
          at[0][j * step(0)] =
              inside ? at[2][found * step(2)] : std::numeric_limits<double>::quiet_NaN();
        else if (inside && operation == SCATTER)
          at[0][found * step(0)] = at[2][j * step(2)];
        else if (inside)
          at[0][found * step(0)] += at[2][j * step(2)];
      }
    }
  });
}

inline double rounded(double x) {
  bfloat16 made;
  put(&made, float(x));
  return up(made);
}

void apply(Operation operation, const Instruction& i) {
#define ONE(name, result) \
  case name: return elements<1>(i, [](double& y, double a) { y = result; });
#define TWO(name, result) \
  case name: return elements<2>(i, [](double& y, double a, double b) { y = result; });
#define THREE(name, result) \
  case name: return elements<3>(i, [](double& y, double a, double b, double c) { y = result; });
#define OVER(name, result) \
  case name: return reduction(i, [](double& y, double a) { y = result; });
  switch (operation) {
    ONE(COPY, a)
    ONE(TO_FLOAT, double(float(a)))
    ONE(TO_BFLOAT16, rounded(a))
    ONE(WHOLE, std::trunc(a))
    ONE(NEGATIVE, -a)
    ONE(ABSOLUTE, std::fabs(a))
    ONE(SIGN, a != a ? 0.0 : double(a > 0) - double(a < 0))
    ONE(SQRT, std::sqrt(a))
    ONE(RSQRT, 1 / std::sqrt(a))
    ONE(CUBE, a * a * a)
    ONE(RECIPROCAL, 1 / a)
    ONE(EXP, std::exp(a))
    ONE(EXPM1, std::expm1(a))
    ONE(LOG, std::log(a))
    ONE(LOG1P, std::log1p(a))
    ONE(FLOOR, std::floor(a))
    ONE(TANH, std::tanh(a))
    ONE(SIGMOID, 1 / (1 + std::exp(-a)))
    ONE(NOT, a == 0)
    OVER(SUM, y + a)
    OVER(HIGHEST, a > y || a != a ? a : y)
    OVER(LOWEST, a < y || a != a ? a : y)
    TWO(ADD, a + b)
    TWO(SUB, a - b)
    TWO(MUL, a * b)
    TWO(DIV, a / b)
    TWO(MAX, a > b || a != a ? a : b)
    TWO(MIN, a < b || a != a ? a : b)
    TWO(POW, std::pow(a, b))
    TWO(EQ, a == b)
    TWO(NE, a != b)
    TWO(LT, a < b)
    TWO(LE, a <= b)
    TWO(GT, a > b)
    TWO(GE, a >= b)
    TWO(AND, a != 0 && b != 0)
    TWO(OR, a != 0 || b != 0)
    THREE(WHERE, a != 0 ? b : c)
    THREE(ADDCMUL, a + b * c)
    THREE(LERP, std::fabs(c) < 0.5 ? a + c * (b - a) : b - (b - a) * (1 - c))
    default: return;
  }
}

}  // namespace

// tensors: moments, made, parameters and statistics
int tape_map_kernel(const Call& call) {
  Arguments given{call};
  given.number += int(given.size());  // constants
  double* scratch = parts_of_call.take<double>(given.size());
  int left_out = 0;
  for (int64_t count = given.size(); count > 0; --count) {
    const auto operation = Operation(given.size());
    if (operation == LOAD || operation == STORE) {  // all of a tensor of any type
      double* at = scratch + given.size();
      const int64_t base = given.size(), size = given.size();
      const Table table{call.at[base], call.type[base]};
      for (int64_t j = 0; j < size; ++j)
        if (operation == LOAD) at[j] = table[j];
        else table.set(j, at[j]);
    } else if (operation == LEFT_OUT) {  // where this is 0
      left_out |= scratch[given.size()] == 0;
    } else {
      const Instruction i(given, scratch);
      if (operation >= CUMSUM) {
        along_rows(operation, i, given.size());
      } else if (i.dims < 2 || i.stride[0][0] == 0) {
        apply(operation, i);
      } else {
        share(call.threads, i.size[0], i.values() / i.size[0], [&](int64_t begin, int64_t end) {
          apply(operation, i.part(begin, end));
        });
      }
    }
  }
  return left_out;
}

// tensors: sums, made, parameters, extra (2, R, C), gradients of the parameters
int tape_gradient_kernel(const Call& call) { return tape_map_kernel(call); }

}  // namespace normkit
