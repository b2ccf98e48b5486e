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
  if constexpr (sizeof(A) == 8) return four[0][0] + four[0][1];
  else return (four[0][0] + four[0][2]) + (four[0][1] + four[0][3]);
}

template <class Type, bool LAST, int SIDES> struct Patch {
  using T = Type;
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  static constexpr bool last = LAST;
  static constexpr int U = SIDES, W = Lanes<A>::width;
  static constexpr int PIXELS = LAST ? 1 : W, STEP = LAST ? W : 1;  // pixels, channels of a vector
  using Sum = double[U * PIXELS];  // of each pixel

  int64_t C, stride;    // channels, and in memory from one to the next
  int64_t start, size;  // where it begins in memory, and how much there is of that
  int64_t pixel, left;  // its first one, and how many from there on

  // the u-th vector of channels from i on; ``rest`` where there are no values
  V of(const T* x, int64_t i, int u, V rest = V{}) const {
    const int64_t at = place(i, u), n = there(i, u);
    if (n >= W) return load(x + at);
    return at + W <= size ? first_of(load(x + at), n, rest)
                          : first_of(load(x + at, n), n, rest);
  }
  void put(T* to, int64_t i, int u, V x) const {
    const int64_t n = there(i, u);
    if (n >= W) store(to + place(i, u), x);
    else store(to + place(i, u), x, n);
  }
  int64_t place(int64_t i, int u) const { return start + (LAST ? u * C + i : i * stride + u * W); }
  int64_t there(int64_t i, int u) const { return LAST ? C - i : left - u * W; }

  int64_t pixels() const { return std::min<int64_t>(U * PIXELS, left); }
  // what the patch after it will read: the machine does not see that coming by itself
  void fetch_next(const T* x, int64_t i, int u) const {
    __builtin_prefetch(x + place(i, u) + (LAST ? U * C : U * W));
  }

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

// What a step knows: numbers, and a table that its forward leaves: γ and β of each channel, mean and
// 1 / deviation of each pixel.
struct Step {
  double of_mean, of_variance, eps;  // parts of a sum over channels: a division takes too long
  double *affine, *mean, *inverse;
  Step(Arguments& given, const Shape& s)
      : of_mean(1 / double(s.C)), of_variance(1 / (double(s.C) - given.real())), eps(given.real()),
        affine(given.doubles()), mean(affine + 2 * s.C), inverse(mean + s.rows * s.L) {}
};

// Mean and 1 / deviation of the pixels of a patch, which is read into a block of vectors.
template <class P>
void find(const P& p, const typename P::T* x, typename P::V* block, const Step& step,
          typename P::Sum& mean, typename P::Sum& inverse) {
  using V = typename P::V;
  constexpr int U = P::U;
  V center[U];  // at first one of the values: equal ones have no variance
  for (int u = 0; u < U; ++u)
    center[u] = P::last ? Lanes<typename P::A>::all(up(x[p.place(0, u)])) : p.of(x, 0, u);
  typename P::Sum apart[1] = {}, about[2] = {};
  p.add_up(apart, [&](int64_t i, int64_t k, auto& sums) {
    for (int u = 0; u < U; ++u) {
      block[k + u] = p.of(x, i, u, center[u]);
      sums[0][u] += block[k + u] - center[u];
    }
  });
  for (double& each : apart[0]) each *= step.of_mean;
  for (int u = 0; u < U; ++u) {
    center[u] += P::laid(apart[0], u);
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
    const double rest = about[0][n] * step.of_mean, inside = about[1][n] - about[0][n] * rest;
    mean[n] += rest;
    inverse[n] = 1 / std::sqrt((inside < 0 ? 0 : inside) * step.of_variance + step.eps);
  }
}

// x̂ = a·(x − c) + b for the pixels of a patch; what of the mean does not fit into c is in b.
template <class P> struct Standardizing {
  using A = typename P::A;
  using V = typename P::V;
  V a[P::U], b[P::U], c[P::U];
  Standardizing(const typename P::Sum& mean, const typename P::Sum& inverse) {
    typename P::Sum rest;
    for (int n = 0; n < P::U * P::PIXELS; ++n)
      rest[n] = inverse[n] * (double(A(mean[n])) - mean[n]);
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
  Memory(int64_t C, const double* affine) : C(C), rows((C + P::STEP - 1) / P::STEP) {
    const int64_t places = rows * SIDE, parameters = C / P::W + 1;
    first = lanes_of_thread.take<V>(2 * places + 2 * rows + 2 * parameters);
    second = first + places;
    by_scale = second + places;
    by_shift = by_scale + rows;
    std::fill_n(by_scale, 2 * rows + 2 * parameters, V{});
    scale = reinterpret_cast<A*>(by_shift + rows);
    shift = scale + parameters * P::W;
    std::copy_n(affine, C, scale);
    std::copy_n(affine + C, C, shift);
  }
  // the sums of channels into doubles, and from zero on again
  void settle(double* of_scale, double* of_shift) {
    auto move = [&](V* sums, double* to) {
      for (int64_t j = 0; j < C; ++j)
        to[j] += P::last ? double(sums[j / P::W][j % P::W]) : total(sums[j]);
      std::fill_n(sums, rows, V{});
    };
    move(by_scale, of_scale);
    move(by_shift, of_shift);
  }
};

template <Follow F, class P, class M, class T = typename P::T>
void map_patch(const P& p, const M& memory, const T* x, const T* r, T* y, const Step& step) {
  using V = typename P::V;
  typename P::Sum mean, inverse;
  find(p, x, memory.first, step, mean, inverse);
  std::copy_n(mean, p.pixels(), step.mean + p.pixel);
  std::copy_n(inverse, p.pixels(), step.inverse + p.pixel);
  const Standardizing<P> hat(mean, inverse);
  for (int64_t i = 0, k = 0; i < p.C; i += P::STEP, k += P::U) {
    const V scale = P::parameter(memory.scale, i), shift = P::parameter(memory.shift, i);
    for (int u = 0; u < P::U; ++u) {
      const V rest = F == RESIDUAL || F == BOTH ? p.of(r, i, u) : V{};
      p.put(y, i, u, finished<F>(scale * hat.of(memory.first[k + u], u) + shift, rest));
    }
  }
}

template <Follow F, class P, class M, class T = typename P::T>
void gradient_patch(const P& p, const M& memory, const T* grad, const T* x, const T* r, T* kept,
                    T* dx, const Step& step) {
  using V = typename P::V;
  constexpr int U = P::U;
  V *g = memory.first, *hats = memory.second;
  typename P::Sum mean = {}, inverse = {}, along[2] = {};  // 0 where there are no pixels
  std::copy_n(step.mean + p.pixel, p.pixels(), mean);
  std::copy_n(step.inverse + p.pixel, p.pixels(), inverse);
  const Standardizing<P> hat(mean, inverse);
  p.add_up(along, [&](int64_t i, int64_t k, auto& sums) {
    const V scale = P::parameter(memory.scale, i), shift = P::parameter(memory.shift, i);
    V by_scale{}, by_shift{};
    for (int u = 0; u < U; ++u) {
      p.fetch_next(x, i, u);
      p.fetch_next(grad, i, u);
      const V at = hat.of(p.of(x, i, u, hat.c[u]), u), rest = F == BOTH ? p.of(r, i, u) : V{};
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
  for (double& each : along[0]) each *= step.of_mean;
  for (double& each : along[1]) each *= step.of_variance;
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
      : C(s.C), stride(s.L), size(s.rows * s.C * s.L), row(LAST ? s.rows * s.L : s.L),
        rows(LAST ? 1 : s.rows),
        pixels(One::PIXELS * (LAST || C <= NARROW ? SIDE : 1)), of_row((row + pixels - 1) / pixels),
        count(rows * of_row) {}
  template <class F> void each(int64_t begin, int64_t end, const F& body) const {
    for (int64_t k = begin; k < end; ++k) {
      const int64_t at = k / of_row, from = k % of_row * pixels;
      const int64_t left = std::min(pixels, row - from);
      const int64_t start = at * C * row + (LAST ? C : 1) * from;
      if (left > (SIDE - 1) * One::PIXELS) {
        body(Patch<T, LAST, SIDE>{C, stride, start, size, at * row + from, left});
        continue;
      }
      for (int64_t i = 0; i < left; i += One::PIXELS)
        body(One{C, stride, start + (LAST ? C : 1) * i, size, at * row + from + i,
                 std::min<int64_t>(One::PIXELS, left - i)});
    }
  }
};

template <class F> void by_format(bool last, const F& body) {
  if (last) body(std::true_type());
  else body(std::false_type());
}

}  // namespace

// tensors: weight, bias, table: so that y can be made again of x, a residual and the table
int pixel_affine_kernel(const Call& call) {
  Arguments given{call};
  const Table weight = given.table(), bias = given.table();
  double* table = given.doubles();
  const int64_t C = given.size();
  for (int64_t j = 0; j < C; ++j) {
    table[j] = or_one(weight, j);
    table[C + j] = or_zero(bias, j);
  }
  return 0;
}

// tensors: x, residual, y, table
int pixel_map_kernel(const Call& call) {
  Arguments given{call, 3};
  const Shape s(given);
  const bool relu = given.size();
  const Step step(given, s);
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_format(s.last, [&](auto last) {
      const Patches<T, last.value> patches(s);
      by_follow(call.at[1], relu, [&](auto follow) {
        share(call.threads, patches.count, s.C * patches.pixels, [&](int64_t begin, int64_t end) {
          const Memory<typename decltype(patches)::One> memory(s.C, step.affine);
          patches.each(begin, end, [&](const auto& patch) {
            map_patch<follow.value>(patch, memory, at(0), at(1), at(2), step);
          });
        });
      });
    });
  });
  return 0;
}

// tensors: grad, x, residual, g or None, dx or None, table, dweight, dbias
int pixel_gradient_kernel(const Call& call) {
  Arguments given{call, 5};
  const Shape s(given);
  const bool relu = given.size();
  const Step step(given, s);
  const Table dweight = given.table(), dbias = given.table();
  const int64_t C = s.C, values = s.rows * C * s.L;
  const int64_t wanted = call.threads < 2 || values < 2 * GRAIN ? 1 : 2 * call.threads;
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_format(s.last, [&](auto last) {
      const Patches<T, last.value> patches(s);
      const int64_t parts = std::min(patches.count, wanted);
      double* sums = parts_of_call.take<double>(2 * parts * C);
      std::fill_n(sums, 2 * parts * C, 0.0);
      by_follow(call.at[2] && relu, relu, [&](auto follow) {
        share(call.threads, parts, 2 * values / parts, [&](int64_t begin, int64_t end) {
          Memory<typename decltype(patches)::One> memory(C, step.affine);
          for (int64_t part = begin; part < end; ++part) {
            double* own = sums + 2 * part * C;
            int64_t added = 0;
            auto body = [&](const auto& patch) {
              gradient_patch<follow.value>(patch, memory, at(0), at(1), at(2), at(3), at(4),
                                           step);
              if (++added % (SPAN / SIDE) == 0) memory.settle(own, own + C);
            };
            patches.each(patches.count * part / parts, patches.count * (part + 1) / parts, body);
            memory.settle(own, own + C);
          }
        });
      });
      for (int64_t part = 1; part < parts; ++part)
        for (int64_t j = 0; j < 2 * C; ++j) sums[j] += sums[2 * part * C + j];
      for (int64_t j = 0; j < C; ++j) {
        if (dweight) dweight.set(j, sums[j]);
        if (dbias) dbias.set(j, sums[C + j]);
      }
    });
  });
  return 0;
}

}  // namespace normkit
