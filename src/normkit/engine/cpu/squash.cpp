// Dynamic tanh: y = activation(γ·tanh(α·x) + β + residual) of each value, and its gradients. With g
// the gradient before the activation and t the tanh, made again:
//
//   dx = γ·g·α·(1 − t²)    dα = Σ γ·g·x·(1 − t²)    dγ = Σ g·t    dβ = Σ g

#include <cmath>

#include "lanes.h"
#include "maps.h"
#include "threads.h"

namespace normkit {

namespace {

constexpr int64_t SPAN = 256;  // vectors added up before they go into doubles

// e^x − 1 without its first term is x·(1 + x·Q(x)), and tanh(x) is x·(1 + x²·P(x²)): coefficients of
// least largest error where |x| ≤ ln 2 / 2, and 0.625. The result is within two units of a float.
using Floats = Lanes<float>::vector;
inline Floats tanh_of(Floats x) {
  typedef int32_t whole __attribute__((vector_size(64)));
  const Floats square = x * x;
  const Floats near =
      x + x * square *
              (-0.3333328366f +
               square * (0.1333149076f +
                         square * (-0.0537434965f +
                                   square * (0.0206505861f - square * 0.0057170447f))));
  Floats twice = x < 0 ? -2 * x : 2 * x;
  twice = twice > 20 ? Lanes<float>::all(20) : twice;
  const float shift = 12582912;  // adding 3·2²² leaves no binary places
  const Floats power = (twice * 1.44269504f + shift) - shift;
  const Floats rest = (twice - power * 0.693359375f) + power * 2.12194440e-4f;
  const Floats series =
      1 + (rest + rest * rest *
                      (0.5f + rest * (0.1666651964f +
                                      rest * (0.0416662060f +
                                              rest * (0.0083688824f + rest * 0.0013950479f)))));
  const whole exponent = (__builtin_convertvector(power, whole) + 127) << 23;
  const Floats far = 1 - 2 / (series * (Floats)exponent + 1);
  return twice < 1.25f ? near : x < 0 ? -far : far;
}
inline Lanes<double>::vector tanh_of(Lanes<double>::vector x) {
  for (int l = 0; l < Lanes<double>::width; ++l) x[l] = std::tanh(x[l]);
  return x;
}

// γ, β and α: in the type of the activations, with zeros behind the last channel
template <class A> struct Parameters {
  using V = typename Lanes<A>::vector;
  A *scale, *shift;
  V alpha;
  static int64_t size(int64_t C) { return (C / Lanes<A>::width + 1) * Lanes<A>::width; }
  Parameters(int64_t C, Table weight, Table bias, Table given, A* memory)
      : scale(memory), shift(memory + size(C)), alpha(Lanes<A>::all(A(given[0]))) {
    std::fill_n(memory, 2 * size(C), A(0));
    for (int64_t j = 0; j < C; ++j) {
      scale[j] = A(or_one(weight, j));
      shift[j] = A(or_zero(bias, j));
    }
  }
};

// body(begin, count, j) for runs of values: of one channel j, or of channels from j on
template <class A, class F>
void runs_of(const Shape& s, int64_t begin, int64_t end, const F& body) {
  if (!s.last) {
    for (int64_t i = begin; i < end; ++i) body(i * s.L, s.L, i % s.C);
    return;
  }
  for (int64_t i = begin; i < end; ++i) body(i * s.C, s.C, 0);
}

inline int64_t items(const Shape& s) { return s.rows * (s.last ? s.L : s.C); }

template <Follow F, class T>
void map(const T* x, const T* r, T* y, const Shape& s, const Parameters<wide<T>>& p, int threads) {
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  constexpr int W = Lanes<A>::width;
  share(threads, items(s), 4 * (s.last ? s.C : s.L), [&](int64_t begin, int64_t end) {
    runs_of<A>(s, begin, end, [&](int64_t at, int64_t count, int64_t j) {
      for (int64_t i = 0; i < count; i += W) {
        const V scale = s.last ? load(p.scale + i) : Lanes<A>::all(p.scale[j]);
        const V shift = s.last ? load(p.shift + i) : Lanes<A>::all(p.shift[j]);
        const V rest = F == RESIDUAL || F == BOTH ? load(r + at + i, count - i) : V{};
        const V t = tanh_of(p.alpha * load(x + at + i, count - i));
        store(y + at + i, finished<F>(scale * t + shift, rest), count - i);
      }
    });
  });
}

// Σ g·t and Σ g of each channel and, last, Σ γ·g·x·(1 − t²): 2·C + 1 for each part of the values
template <Follow F, class T>
void gradient(const T* grad, const T* x, const T* r, T* kept, T* dx, const Shape& s,
              const Parameters<wide<T>>& p, int64_t parts, double* sums, wide<T>* memory,
              int threads) {
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  constexpr int W = Lanes<A>::width;
  const int64_t all = items(s), wide_C = Parameters<A>::size(s.C);
  share(threads, parts, 8 * s.rows * s.L * s.C / parts, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      double* own = sums + part * (2 * s.C + 1);
      A* by_scale = memory + part * 2 * wide_C;  // of channels that are neighbours in memory
      A* by_shift = by_scale + wide_C;
      V by_alpha{}, along{}, alone{};
      int64_t added = 0;
      auto settle = [&](int64_t j) {
        own[2 * s.C] += total(by_alpha);
        if (s.last) {
          for (int64_t c = 0; c < s.C; ++c) {
            own[c] += by_scale[c];
            own[s.C + c] += by_shift[c];
          }
          std::fill_n(by_scale, 2 * wide_C, A(0));
        } else {
          own[j] += total(along);
          own[s.C + j] += total(alone);
        }
        by_alpha = along = alone = V{};
        added = 0;
      };
      runs_of<A>(s, all * part / parts, all * (part + 1) / parts,
                 [&](int64_t at, int64_t count, int64_t j) {
        for (int64_t i = 0; i < count; i += W) {
          const V scale = s.last ? load(p.scale + i) : Lanes<A>::all(p.scale[j]);
          const V shift = s.last ? load(p.shift + i) : Lanes<A>::all(p.shift[j]);
          const V value = load(x + at + i, count - i), t = tanh_of(p.alpha * value);
          const V rest = F == BOTH ? load(r + at + i, count - i) : V{};
          const V g = before<F>(load(grad + at + i, count - i), t, scale, shift, V{}, rest);
          const V slope = scale * g * ((1 - t) * (1 + t));
          if (kept) store(kept + at + i, g, count - i);
          if (dx) store(dx + at + i, p.alpha * slope, count - i);
          by_alpha += slope * value;
          if (s.last) {
            store(by_scale + i, load(by_scale + i) + g * t);
            store(by_shift + i, load(by_shift + i) + g);
          } else {
            along += g * t;
            alone += g;
            if (++added == SPAN) settle(j);
          }
        }
        if (!s.last || ++added == SPAN) settle(j);
      });
      settle(0);
    }
  });
}

}  // namespace

// tensors: x, residual, y, weight, bias, alpha, tables or None: these three in double, from which y
// can be made again
int squash_map_kernel(const Call& call) {
  Arguments given{call, 3};
  const Shape s(given);
  const Table weight = given.table(), bias = given.table(), alpha = given.table();
  double* kept = given.doubles();
  const bool relu = given.size();
  for (int64_t j = 0; kept && j < s.C; ++j) {
    kept[j] = or_one(weight, j);
    kept[s.C + j] = or_zero(bias, j);
  }
  if (kept) kept[2 * s.C] = alpha[0];
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    using A = wide<T>;
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    A* memory = lanes_of_thread.take<A>(2 * Parameters<A>::size(s.C));
    const Parameters<A> parameters(s.C, weight, bias, alpha, memory);
    by_follow(call.at[1], relu, [&](auto follow) {
      map<follow.value>(at(0), at(1), at(2), s, parameters, call.threads);
    });
  });
  return 0;
}

// tensors: grad, x, residual, g or None, dx or None, tables, dweight, dbias, dalpha
int squash_gradient_kernel(const Call& call) {
  Arguments given{call, 5};
  const Shape s(given);
  double* kept = given.doubles();
  const Table weight{kept, DOUBLE}, bias{kept + s.C, DOUBLE}, alpha{kept + 2 * s.C, DOUBLE};
  const Table dweight = given.table(), dbias = given.table(), dalpha = given.table();
  const bool relu = given.size();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    using A = wide<T>;
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    const bool alone = call.threads < 2 || s.rows * s.L * s.C < 2 * GRAIN;
    const int64_t parts = alone ? 1 : std::min<int64_t>(items(s), 2 * call.threads);
    const int64_t size = Parameters<A>::size(s.C);
    A* memory = lanes_of_thread.take<A>(2 * size * (1 + parts));
    std::fill_n(memory, 2 * size * (1 + parts), A(0));
    const Parameters<A> parameters(s.C, weight, bias, alpha, memory);
    double* sums = parts_of_call.take<double>(parts * (2 * s.C + 1));
    std::fill_n(sums, parts * (2 * s.C + 1), 0.0);
    by_follow(call.at[2] && relu, relu, [&](auto follow) {
      gradient<follow.value>(at(0), at(1), at(2), at(3), at(4), s, parameters, parts, sums,
                             memory + 2 * size, call.threads);
    });
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t j = 0; j <= 2 * s.C; ++j) sums[j] += sums[part * (2 * s.C + 1) + j];
    for (int64_t j = 0; j < s.C; ++j) {
      if (dweight) dweight.set(j, sums[j]);
      if (dbias) dbias.set(j, sums[s.C + j]);
    }
    if (dalpha) dalpha.set(0, sums[2 * s.C]);
  });
  return 0;
}

}  // namespace normkit
