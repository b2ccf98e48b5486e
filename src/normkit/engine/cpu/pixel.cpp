// Positional normalization: x̂ = (x − mean) / √(var + eps) of each pixel over its channels, then
// y = activation(γ·x̂ + β + residual); and its gradients.
//
// A vector has channels of one pixel where those are neighbours in memory, else one channel of as
// many pixels as it has lanes. Some vectors side by side, and all channels: that is a patch. It is
// read from memory once, and then lies in a near cache in the type that is computed in. With g the
// gradient before the activation and r the inverse of the deviation:
//
//   dx = r·(γg − Σγg / C − x̂·Σγg·x̂ / (C − correction))

#include <cmath>

#include "lanes.h"
#include "maps.h"
#include "threads.h"

namespace normkit {

namespace {

constexpr int SIDE = 4;          // vectors of a patch side by side;
constexpr int64_t NARROW = 256;  // one, where they are of pixels that have more channels
constexpr int64_t SPAN = 128;    // vectors added up before they go into doubles

// The lanes of a vector together, by halves: a sum of each pixel would wait too long for ``total``.
template <class V, class A = std::decay_t<decltype(V{}[0])>> inline double folded(V x) {
  typedef A half __attribute__((vector_size(32)));
  typedef A quarter __attribute__((vector_size(16)));
  half two[2];
  std::memcpy(two, &x, sizeof x);
  two[0] += two[1];
  quarter four[2];
  std::memcpy(four, two, sizeof four);
  four[0] += four[1];
  double sum = 0;
  for (size_t i = 0; i < 16 / sizeof(A); ++i) sum += four[0][i];
  return sum;
}

template <class Type, bool LAST, int SIDES> struct Patch {
  using T = Type;
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  static constexpr bool last = LAST;
  static constexpr int U = SIDES, W = Lanes<A>::width;
  static constexpr int PIXELS = LAST ? 1 : W, STEP = LAST ? W : 1;  // pixels, channels of a vector

  using Sum = double[U * PIXELS];  // of each pixel

  int64_t C, stride;     // channels, and in memory from one to the next
  int64_t start, pixel;  // where it begins in memory, and in tables of pixels
  int64_t left;          // pixels of it
  int64_t size;          // of memory

  // the u-th vector of channels from i on; ``rest`` where there are no values
  V of(const T* x, int64_t i, int u, V rest = V{}) const {
    const int64_t at = place(i, u), n = there(i, u);
    if (n >= W) return load(x + at);
    return at + W <= size ? first_of(load(x + at), n, rest) : load_some(x + at, n, rest);
  }
  void put(T* to, int64_t i, int u, V x) const {
    const int64_t n = there(i, u);
    if (n >= W) store(to + place(i, u), x);
    else store_some(to + place(i, u), n, x);
  }
  int64_t place(int64_t i, int u) const { return start + (LAST ? u * C + i : i * stride + u * W); }
  int64_t there(int64_t i, int u) const { return LAST ? C - i : left - u * W; }

  static V parameter(const A* table, int64_t i) {
    if constexpr (LAST) return load(table + i);
    else return Lanes<A>::all(table[i]);
  }
  // what the pixels of the u-th vector have for all their channels
  static V laid(const Sum& table, int u) {
    V made;
    if constexpr (LAST) made = Lanes<A>::all(A(table[u]));
    else for (int l = 0; l < W; ++l) made[l] = A(table[u * W + l]);
    return made;
  }
  // sums over channels of what body(i, k, sums) adds for those from i on, the vectors from k on
  template <int N, class F> void add_up(Sum (&sums)[N], const F& body) const {
    for (int64_t i = 0, k = 0; i < C;) {
      V here[N][U] = {};
      for (const int64_t stop = std::min(C, i + SPAN * STEP); i < stop; i += STEP, k += U)
        body(i, k, here);
      for (int n = 0; n < N; ++n)
        for (int u = 0; u < U; ++u)
          if constexpr (LAST) sums[n][u] += folded(here[n][u]);
          else for (int l = 0; l < W; ++l) sums[n][u * W + l] += here[n][u][l];
    }
  }
};

// x̂ = a·(x − c) + b for the pixels of a patch; what of the mean does not fit into c is in b
template <class P> struct Standardizing {
  using A = typename P::A;
  using V = typename P::V;
  V a[P::U], b[P::U], c[P::U];
  Standardizing(const typename P::Sum& mean, const typename P::Sum& inverse) {
    typename P::Sum rest;
    for (int n = 0; n < P::U * P::PIXELS; ++n) rest[n] = inverse[n] * (double(A(mean[n])) - mean[n]);
    for (int u = 0; u < P::U; ++u) {
      a[u] = P::laid(inverse, u);
      b[u] = P::laid(rest, u);
      c[u] = P::laid(mean, u);
    }
  }
  V of(V x, int u) const { return a[u] * (x - c[u]) + b[u]; }
};

// Of a thread: two values of each place of a patch, sums of channels, and γ and β, with zeros
// behind the last channel.
template <class P> struct Memory {
  using A = typename P::A;
  using V = typename P::V;
  int64_t C, rows;  // of vectors
  V *first, *second, *by_scale, *by_shift;
  A *scale, *shift;
  Memory(int64_t C, Table weight, Table bias) : C(C), rows((C + P::STEP - 1) / P::STEP) {
    const int64_t places = rows * SIDE, parameters = C / P::W + 1;
    first = lanes_of_thread.take<V>(2 * places + 2 * rows + 2 * parameters);
    second = first + places;
    by_scale = second + places;
    by_shift = by_scale + rows;
    std::fill_n(by_scale, 2 * rows + 2 * parameters, V{});
    scale = reinterpret_cast<A*>(by_shift + rows);
    shift = scale + parameters * P::W;
    for (int64_t j = 0; j < C; ++j) {
      scale[j] = A(or_one(weight, j));
      shift[j] = A(or_zero(bias, j));
    }
  }
  // the sums of channels into doubles, and from zero on again
  void settle(double* of_scale, double* of_shift) {
    auto move = [&](V* sums, double* to) {
      for (int64_t j = 0; j < C; ++j)
        to[j] += P::last ? double(sums[j / P::W][j % P::W]) : total(sums[j], P::W);
      std::fill_n(sums, rows, V{});
    };
    move(by_scale, of_scale);
    move(by_shift, of_shift);
  }
};

struct Statistics {  // tables of pixels, if they are kept
  double *mean, *inverse;
  double divisor, eps;
};

template <Follow F, class P, class M, class T = typename P::T>
void map_patch(const P& p, const M& memory, const T* x, const T* r, T* y, const Statistics& s) {
  using A = typename P::A;
  using V = typename P::V;
  constexpr int U = P::U;
  const double C = double(p.C);
  V* block = memory.first;
  V near[U], center[U];  // equal values have no variance: their distances from one of them are 0
  for (int u = 0; u < U; ++u)
    near[u] = P::last ? Lanes<A>::all(up(x[p.place(0, u)])) : p.of(x, 0, u);
  typename P::Sum apart[1] = {}, about[2] = {}, mean, inverse;
  p.add_up(apart, [&](int64_t i, int64_t k, auto& sums) {
    for (int u = 0; u < U; ++u) {
      block[k + u] = p.of(x, i, u, near[u]);
      sums[0][u] += block[k + u] - near[u];
    }
  });
  for (double& each : apart[0]) each /= C;
  for (int u = 0; u < U; ++u) {
    center[u] = near[u] + P::laid(apart[0], u);
    for (int l = 0; l < P::PIXELS; ++l) mean[u * P::PIXELS + l] = center[u][l];
    if (const int64_t more = p.C % P::STEP) {  // channels, in the last vector
      V& there = block[p.C / P::STEP * U + u];
      there = first_of(there, more, center[u]);
    }
  }
  p.add_up(about, [&](int64_t, int64_t k, auto& sums) {
    for (int u = 0; u < U; ++u) {
      const V d = block[k + u] - center[u];
      sums[0][u] += d;
      sums[1][u] += d * d;
    }
  });
  for (int n = 0; n < U * P::PIXELS; ++n) {
    const double rest = about[0][n] / C, inside = about[1][n] - rest * rest * C;
    mean[n] += rest;
    inverse[n] = 1 / std::sqrt((inside < 0 ? 0 : inside) / s.divisor + s.eps);
  }
  if (s.mean) {
    const int64_t count = std::min<int64_t>(U * P::PIXELS, p.left);
    std::copy_n(mean, count, s.mean + p.pixel);
    std::copy_n(inverse, count, s.inverse + p.pixel);
  }
  const Standardizing<P> hat(mean, inverse);
  for (int64_t i = 0, k = 0; i < p.C; i += P::STEP, k += U) {
    const V scale = P::parameter(memory.scale, i), shift = P::parameter(memory.shift, i);
    for (int u = 0; u < U; ++u) {
      const V rest = F == RESIDUAL || F == BOTH ? p.of(r, i, u) : V{};
      p.put(y, i, u, finished<F>(scale * hat.of(block[k + u], u) + shift, rest));
    }
  }
}

template <Follow F, class P, class M, class T = typename P::T>
void gradient_patch(const P& p, const M& memory, const T* grad, const T* x, const T* r, T* kept,
                    T* dx, const Statistics& s) {
  using V = typename P::V;
  constexpr int U = P::U;
  V *g = memory.first, *hats = memory.second;
  typename P::Sum mean = {}, inverse = {}, along[2] = {};
  const int64_t count = std::min<int64_t>(U * P::PIXELS, p.left);
  std::copy_n(s.mean + p.pixel, count, mean);
  std::copy_n(s.inverse + p.pixel, count, inverse);
  const Standardizing<P> hat(mean, inverse);
  p.add_up(along, [&](int64_t i, int64_t k, auto& sums) {
    const V scale = P::parameter(memory.scale, i), shift = P::parameter(memory.shift, i);
    V by_scale{}, by_shift{};
    for (int u = 0; u < U; ++u) {
      const V at = hat.of(p.of(x, i, u, hat.c[u]), u);
      const V rest = F == BOTH ? p.of(r, i, u) : V{};
      const V here = before<F>(p.of(grad, i, u), at, scale, shift, V{}, rest);
      if (kept) p.put(kept, i, u, here);
      g[k + u] = scale * here;
      hats[k + u] = at;
      sums[0][u] += g[k + u];
      sums[1][u] += g[k + u] * at;
      by_scale += here * at;
      by_shift += here;
    }
    memory.by_scale[k / U] += by_scale;
    memory.by_shift[k / U] += by_shift;
  });
  if (!dx) return;
  for (double& each : along[0]) each /= double(p.C);
  for (double& each : along[1]) each /= s.divisor;
  V constant[U], slope[U];
  for (int u = 0; u < U; ++u) {
    constant[u] = P::laid(along[0], u);
    slope[u] = P::laid(along[1], u);
  }
  for (int64_t i = 0, k = 0; i < p.C; i += P::STEP, k += U)
    for (int u = 0; u < U; ++u)
      p.put(dx, i, u, hat.a[u] * (g[k + u] - constant[u] - hats[k + u] * slope[u]));
}

// All patches: rows of memory cut into as many pixels, and what is left of a row one by one.
template <class T, bool LAST> struct Patches {
  using One = Patch<T, LAST, 1>;
  int64_t C, stride, size, row, rows, pixels, of_row, count;
  explicit Patches(const Shape& s)
      : C(s.C), stride(s.L), size(s.rows * s.C * s.L), row(LAST ? s.rows * s.L : s.L), rows(LAST ? 1 : s.rows),
        pixels(One::PIXELS * (LAST || C <= NARROW ? SIDE : 1)), of_row((row + pixels - 1) / pixels),
        count(rows * of_row) {}
  template <class F> void each(int64_t begin, int64_t end, const F& body) const {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t at = k / of_row, from = k % of_row * pixels;
      const int64_t left = std::min(pixels, row - from), start = at * C * row + (LAST ? C : 1) * from;
      if (left > (SIDE - 1) * One::PIXELS) {
        body(Patch<T, LAST, SIDE>{C, stride, start, at * row + from, left, size});
        continue;
      }
      for (int64_t i = 0; i < left; i += One::PIXELS)
        body(One{C, stride, start + (LAST ? C : 1) * i, at * row + from + i,
                 std::min<int64_t>(One::PIXELS, left - i), size});
    }
  }
};

template <class F> void by_format(bool last, const F& body) {
  if (last) body(std::true_type());
  else body(std::false_type());
}

}  // namespace

// tensors: x, residual, y, weight, bias, tables or None: mean and inverse of each pixel, and weight
// and bias in double, from which y can be made again
int pixel_map_kernel(const Call& call) {
  Arguments given{call, 3};
  const Shape s(given);
  const Table weight = given.table(), bias = given.table();
  double* kept = given.doubles();
  const int64_t size = s.rows * s.L;
  const bool relu = given.size();
  const Statistics statistics{kept, kept + size, s.C - given.real(), given.real()};
  for (int64_t j = 0; kept && j < s.C; ++j) {
    kept[2 * size + j] = or_one(weight, j);
    kept[2 * size + s.C + j] = or_zero(bias, j);
  }
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_format(s.last, [&](auto last) {
      const Patches<T, last.value> patches(s);
      by_follow(call.at[1], relu, [&](auto follow) {
        share(call.threads, patches.count, s.C * patches.pixels, [&](int64_t begin, int64_t end) {
          const Memory<typename decltype(patches)::One> memory(s.C, weight, bias);
          patches.each(begin, end, [&](const auto& patch) {
            map_patch<follow.value>(patch, memory, at(0), at(1), at(2), statistics);
          });
        });
      });
    });
  });
  return 0;
}

// tensors: grad, x, residual, g or None, dx or None, tables, dweight, dbias
int pixel_gradient_kernel(const Call& call) {
  Arguments given{call, 5};
  const Shape s(given);
  double* kept = given.doubles();
  const Table dweight = given.table(), dbias = given.table();
  const int64_t size = s.rows * s.L;
  const bool relu = given.size();
  const Statistics statistics{kept, kept + size, s.C - given.real(), 0};
  const Table weight{kept + 2 * size, DOUBLE}, bias{kept + 2 * size + s.C, DOUBLE};
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_format(s.last, [&](auto last) {
      const Patches<T, last.value> patches(s);
      const bool alone = call.threads < 2 || size * s.C < 2 * GRAIN;
      const int64_t parts = alone ? 1 : std::min<int64_t>(patches.count, 2 * call.threads);
      double* sums = parts_of_call.take<double>(2 * parts * s.C);
      std::fill_n(sums, 2 * parts * s.C, 0.0);
      by_follow(call.at[2] && relu, relu, [&](auto follow) {
        share(call.threads, parts, 2 * size * s.C / parts, [&](int64_t begin, int64_t end) {
          Memory<typename decltype(patches)::One> memory(s.C, weight, bias);
          for (int64_t part = begin; part < end; ++part) {
            double* own = sums + 2 * part * s.C;
            int64_t added = 0;
            auto body = [&](const auto& patch) {
              gradient_patch<follow.value>(patch, memory, at(0), at(1), at(2), at(3), at(4),
                                           statistics);
              if (++added % (SPAN / SIDE) == 0) memory.settle(own, own + s.C);
            };
            patches.each(patches.count * part / parts, patches.count * (part + 1) / parts, body);
            memory.settle(own, own + s.C);
          }
        });
      });
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t j = 0; j < 2 * s.C; ++j) sums[j] += sums[2 * part * s.C + j];
      for (int64_t j = 0; j < s.C; ++j) {
        if (dweight) dweight.set(j, sums[j]);
        if (dbias) dbias.set(j, sums[s.C + j]);
      }
    });
  });
  return 0;
}

}  // namespace normkit
