// A pass over activations: Σ g·(x − c) and Σ g of each cell, g that before the activation.

#include <algorithm>

#include "columns.h"
#include "lanes.h"
#include "maps.h"

namespace normkit {

namespace {

// Σ g·(x − c) and Σ g of at most BLOCK values, g the gradient before the activation
template <Follow F, class T>
void gradient_sums(const T* g, const T* x, const T* r, T* kept, int64_t n, wide<T> a, wide<T> b,
                   wide<T> c, double& first, double& second) {
  using A = wide<T>;
  using L = Lanes<A>;
  constexpr int W = L::width;
  typename L::vector s{}, q{}, s2{}, q2{};
  const typename L::vector va = L::all(a), vb = L::all(b), vc = L::all(c);
  auto take = [&](int64_t i, auto& sum, auto& square) {
    auto d = load(x + i) - vc;
    auto here = load(g + i);
    if constexpr (F == RELU || F == BOTH) {
      auto y = va * d + vb;
      if constexpr (F == BOTH) y += load(r + i);
      here = y <= 0 ? typename L::vector{} : here;
      if (kept)
        for (int l = 0; l < W; ++l) put(kept + i + l, here[l]);
    }
    sum += here;
    square += here * d;
  };
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    take(i, s, q);
    take(i + W, s2, q2);
  }
  for (; i + W <= n; i += W) take(i, s, q);
  second += total(s + s2);
  first += total(q + q2);
  for (; i < n; ++i) {
    const A here = before<F>(up(g[i]), up(x[i]), a, b, c, F == BOTH ? up(r[i]) : A(0));
    if (kept) put(kept + i, here);
    second += here;
    first += double(here) * (up(x[i]) - c);
  }
}

template <Follow F, class T>
void column_sums(const T* g, const T* x, const T* r, T* kept, int64_t n, int64_t C,
                 const wide<T>* __restrict a, const wide<T>* __restrict b,
                 const wide<T>* __restrict c, wide<T>* __restrict s, wide<T>* __restrict q,
                 double* first, double* second) {
  using A = wide<T>;
  constexpr bool masks = F == RELU || F == BOTH;
  const int64_t span = span_of(C);
  for (int64_t j = 0; j < C; ++j) first[j] = second[j] = 0;
  for (int64_t i = 0; i < n; i += span) {
    const int64_t k = std::min(span, n - i);
    for (int64_t j = 0; j < C; ++j) s[j] = q[j] = 0;
    int64_t p = 0;
    if constexpr (!masks) {
      for (; p + 4 <= k; p += 4) {
        const T* __restrict grad = g + (i + p) * C;
        const T* __restrict at = x + (i + p) * C;
        for (int64_t j = 0; j < C; ++j) {
          const A g0 = up(grad[j]), g1 = up(grad[C + j]);
          const A g2 = up(grad[2 * C + j]), g3 = up(grad[3 * C + j]);
          s[j] += (g0 + g1) + (g2 + g3);
          q[j] += (g0 * (up(at[j]) - c[j]) + g1 * (up(at[C + j]) - c[j])) +
                  (g2 * (up(at[2 * C + j]) - c[j]) + g3 * (up(at[3 * C + j]) - c[j]));
        }
      }
    }
    for (; p < k; ++p) {
      const T* __restrict grad = g + (i + p) * C;
      const T* __restrict at = x + (i + p) * C;
      const T* __restrict rest = r + (i + p) * C;
      if (masks && kept) {
        T* __restrict to = kept + (i + p) * C;
        for (int64_t j = 0; j < C; ++j)
          put(to + j, before<F>(up(grad[j]), up(at[j]), a[j], b[j], c[j],
                                F == BOTH ? up(rest[j]) : A(0)));
      }
      for (int64_t j = 0; j < C; ++j) {
        const A here = before<F>(up(grad[j]), up(at[j]), a[j], b[j], c[j],
                                 F == BOTH ? up(rest[j]) : A(0));
        s[j] += here;
        q[j] += here * (up(at[j]) - c[j]);
      }
    }
    for (int64_t j = 0; j < C; ++j) {
      first[j] += q[j];
      second[j] += s[j];
    }
  }
}

template <Follow F, class T>
void sums(const T* g, const T* x, const T* r, T* kept, const Shape& s, const Map& map, int threads,
          double* out) {
  using A = wide<T>;
  const int64_t size = s.rows * s.C;
  // the center in full is another number than the one that was subtracted
  auto corrected = [&](int64_t i, double first, double second) {
    const double c = map.center ? map.center[i / s.C * map.center_step + i % s.C] : 0;
    const double rest = double(A(c)) - c;
    out[i] = rest != 0 ? first + rest * second : first;
    out[size + i] = second;
  };
  if (!s.last) {
    share(threads, size, 2 * s.L, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A a, b, c;
        map.at(i / s.C, i % s.C, a, b, c);
        double first = 0, second = 0;
        for (int64_t p = 0; p < s.L; p += BLOCK) {
          const int64_t at = i * s.L + p;
          gradient_sums<F>(g + at, x + at, r + at, kept ? kept + at : nullptr,
                           std::min(BLOCK, s.L - p), a, b, c, first, second);
        }
        corrected(i, first, second);
      }
    });
    return;
  }
  const int64_t parts = cuts(s, threads);
  double* made = parts > 1 ? parts_of_call.take<double>(2 * parts * size) : out;
  auto first = [&](int64_t part) { return s.L * part / parts; };
  share(threads, s.rows * parts, 2 * s.L * s.C / parts, [&](int64_t begin, int64_t end) {
    A* a = lanes_of_thread.take<A>(5 * s.C);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, from = first(i % parts), to = first(i % parts + 1);
      const int64_t at = (row * s.L + from) * s.C;
      if (i == begin || !map.same()) map.lay(row, s.C, a, a + s.C, a + 2 * s.C);
      column_sums<F>(g + at, x + at, r + at, kept ? kept + at : nullptr, to - from, s.C, a,
                     a + s.C, a + 2 * s.C, a + 3 * s.C, a + 4 * s.C, made + i * s.C,
                     made + parts * size + i * s.C);
    }
  });
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t j = 0; j < s.C; ++j) {
      double by_scale = 0, by_shift = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t at = (row * parts + part) * s.C + j;
        by_scale += made[at];
        by_shift += made[parts * size + at];
      }
      corrected(row * s.C + j, by_scale, by_shift);
    }
}

}  // namespace

// tensors: grad, x, residual, g or None, scale, shift, center, sums (2, rows, C)
int sums_kernel(const Call& call) {
  Arguments given{call, 4};
  const Shape s(given);
  const Map tables(given);
  const bool relu = given.size();
  double* out = given.doubles();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_follow(call.at[2] && relu, relu, [&](auto follow) {
      sums<follow.value>(at(0), at(1), or_else(at(2), at(1)), at(3), s, tables, call.threads, out);
    });
  });
  return 0;
}

}  // namespace normkit
