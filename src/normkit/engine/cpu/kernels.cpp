// The four passes over activations and the coefficients of each family, as loops for a CPU.
//
// Activations are float, double or bfloat16, (rows, C, L) or, with channels last, (rows, L, C): L
// positions of one cell. Tables are double, so that a step's small arithmetic adds no error of its
// own; what is added up over positions is added in lanes of the activations' width, some thousands
// of values at a time, and these parts in double. A center far from zero does not fit into a float:
// what is left of it goes into the shift.
//
// Formulas are those of engine/families, where they are explained.

#include "kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

// torch's own OpenMP, whatever its file is called; without it everything is done by one thread
extern "C" __attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
extern "C" __attribute__((weak)) int omp_get_thread_num();
extern "C" __attribute__((weak)) int omp_get_num_threads();

namespace normkit {
namespace {

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

// ------------------------------------------------------------------ threads

constexpr int64_t GRAIN = 32768;  // values that are worth a thread, as in torch

template <class F> struct Work {
  const F* body;
  int64_t count;
};

template <class F> void part_of(void* given) {
  const auto& work = *static_cast<Work<F>*>(given);
  const int64_t me = omp_get_thread_num(), all = omp_get_num_threads();
  const int64_t begin = work.count * me / all, end = work.count * (me + 1) / all;
  if (begin < end) (*work.body)(begin, end);
}

// body(begin, end) for parts of ``count`` items with ``values`` values each
template <class F> void share(int threads, int64_t count, int64_t values, const F& body) {
  const int64_t most = std::min<int64_t>({threads, count, 1 + count * values / GRAIN});
  if (most < 2 || !GOMP_parallel || !omp_get_thread_num || !omp_get_num_threads) {
    body(0, count);
    return;
  }
  Work<F> work{&body, count};
  GOMP_parallel(part_of<F>, &work, unsigned(most), 0);
}

// ------------------------------------------------------------------ tables

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

// ------------------------------------------------------------------ sums along memory

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

template <class V> inline double total(V lanes, int width) {
  double sum = 0;
  for (int i = 0; i < width; ++i) sum += lanes[i];
  return sum;
}

constexpr int64_t BLOCK = 4096;  // values added up in lanes before they go into a double

// Σ (x − c) and Σ (x − c)² of at most BLOCK values
template <class T> void about(const T* x, int64_t n, wide<T> c, double& first, double& second) {
  using A = wide<T>;
  using L = Lanes<A>;
  constexpr int W = L::width;
  typename L::vector s{}, q{}, s2{}, q2{}, center = L::all(c);
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    auto d = load(x + i) - center, e = load(x + i + W) - center;
    s += d;
    q += d * d;
    s2 += e;
    q2 += e * e;
  }
  for (; i + W <= n; i += W) {
    auto d = load(x + i) - center;
    s += d;
    q += d * d;
  }
  first = total(s + s2, W);
  second = total(q + q2, W);
  for (; i < n; ++i) {
    A d = up(x[i]) - c;
    first += d;
    second += double(d) * d;
  }
}

// Mean and sum of squares about it of so many values, joined with those of others.
inline void join(double& mean, double& square, int64_t& count, double m, double q, int64_t n) {
  const double apart = m - mean, all = double(count + n);
  mean += apart * (double(n) / all);
  square += q + apart * apart * (double(count) * double(n) / all);
  count += n;
}

// Taken about a value, then about their mean; further ones about the mean so far.
template <class T> void run_moments(const T* x, int64_t n, double& mean, double& var) {
  using A = wide<T>;
  double square = 0;
  int64_t done = 0;
  mean = 0;
  for (int64_t i = 0; i < n; i += BLOCK) {
    const int64_t k = std::min(BLOCK, n - i);
    double s, q;
    A c = A(mean);
    if (i == 0) {
      c = up(x[0]);
      about(x, k, c, s, q);
      c = A(c + s / double(k));
    }
    about(x + i, k, c, s, q);
    const double inside = q - s * s / double(k);
    join(mean, square, done, double(c) + s / double(k), inside < 0 ? 0 : inside, k);
  }
  var = square / double(n);
}

// ------------------------------------------------------------------ moments

struct Scratch {  // of a thread, kept
  std::vector<char> memory;
  template <class A> A* take(int64_t count) {
    const size_t bytes = (count * sizeof(A) + 63) / 64 * 64 + 64;
    if (memory.size() < bytes) memory.resize(bytes);
    auto address = (reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64;
    return reinterpret_cast<A*>(address);
  }
};
thread_local Scratch lanes_of_thread, parts_of_call;

// positions whose sums are added up before they go into a double; they stay in a near cache
inline int64_t span_of(int64_t C) { return std::clamp<int64_t>(8192 / C, 8, 256) / 4 * 4; }

// Moments of each channel over positions side by side: mean and square are (C)
template <class T>
void column_moments(const T* x, int64_t n, int64_t C, double* mean, double* square) {
  using A = wide<T>;
  A* __restrict c = lanes_of_thread.take<A>(3 * C);
  A* __restrict s = c + C;
  A* __restrict q = s + C;
  const int64_t span = span_of(C);
  int64_t done = 0;
  for (int64_t j = 0; j < C; ++j) mean[j] = square[j] = 0;
  for (int64_t i = 0; i < n; i += span) {
    const int64_t k = std::min(span, n - i);
    for (int turn = i == 0 ? 0 : 1; turn < 2; ++turn) {  // first about a value, then the mean
      for (int64_t j = 0; j < C; ++j) {
        c[j] = i ? A(mean[j]) : turn ? A(c[j] + s[j] / A(k)) : up(x[j]);
      }
      for (int64_t j = 0; j < C; ++j) s[j] = q[j] = 0;
      const T* __restrict at = x + i * C;
      int64_t p = 0;
      for (; p + 4 <= k; p += 4, at += 4 * C)
        for (int64_t j = 0; j < C; ++j) {
          const A d0 = up(at[j]) - c[j], d1 = up(at[C + j]) - c[j];
          const A d2 = up(at[2 * C + j]) - c[j], d3 = up(at[3 * C + j]) - c[j];
          s[j] += (d0 + d1) + (d2 + d3);
          q[j] += (d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3);
        }
      for (; p < k; ++p, at += C)
        for (int64_t j = 0; j < C; ++j) {
          const A d = up(at[j]) - c[j];
          s[j] += d;
          q[j] += d * d;
        }
    }
    const double here = double(k), all = double(done + k), share = here / all;
    const double weight = double(done) * here / all;
    for (int64_t j = 0; j < C; ++j) {
      const double rest = double(s[j]) / here, inside = double(q[j]) - double(s[j]) * rest;
      const double apart = double(c[j]) + rest - mean[j];
      mean[j] += apart * share;
      square[j] += (inside < 0 ? 0 : inside) + apart * apart * weight;
    }
    done += k;
  }
}

// in how many parts the positions of a row are cut, so that all threads have something to do
inline int64_t cuts(const Shape& s, int threads) {
  if (threads < 2 || s.rows >= 2 * threads || s.rows * s.C * s.L < 2 * GRAIN) return 1;
  return std::min<int64_t>(s.L, (2 * threads + s.rows - 1) / s.rows);
}

template <class T> void moments(const T* x, const Shape& s, int threads, double* out) {
  const int64_t size = s.rows * s.C;
  if (!s.last) {
    share(threads, size, s.L, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) run_moments(x + i * s.L, s.L, out[i], out[size + i]);
    });
    return;
  }
  const int64_t parts = cuts(s, threads);
  double* mean = out;
  double* square = out + size;
  if (parts > 1) {
    mean = parts_of_call.take<double>(2 * parts * size);
    square = mean + parts * size;
  }
  auto first = [&](int64_t part) { return s.L * part / parts; };
  share(threads, s.rows * parts, s.L * s.C / parts, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, from = first(i % parts), to = first(i % parts + 1);
      const T* at = x + (row * s.L + from) * s.C;
      column_moments(at, to - from, s.C, mean + i * s.C, square + i * s.C);
    }
  });
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t j = 0; j < s.C; ++j) {
      double m = mean[row * parts * s.C + j], q = square[row * parts * s.C + j];
      int64_t count = first(1);
      for (int64_t part = 1; part < parts; ++part) {
        const int64_t at = (row * parts + part) * s.C + j;
        join(m, q, count, mean[at], square[at], first(part + 1) - first(part));
      }
      out[row * s.C + j] = m;
      out[size + row * s.C + j] = q / double(s.L);
    }
}

// ------------------------------------------------------------------ maps

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
  if constexpr (F == RELU || F == BOTH) y = y < 0 ? A(0) : y;
  return y;
}
template <Follow F, class A> inline A before(A g, A x, A a, A b, A c, A residual) {
  if constexpr (F == RELU || F == BOTH) {
    A y = a * (x - c) + b;
    if constexpr (F == BOTH) y += residual;
    return y <= 0 ? A(0) : g;
  }
  return g;
}

template <Follow F, class T>
void map(const T* x, const T* r, T* y, const Shape& s, const Map& map, int threads) {
  using A = wide<T>;
  constexpr bool adds = F == RESIDUAL || F == BOTH;
  if (!s.last) {
    share(threads, s.rows * s.C, s.L, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A a, b, c;
        map.at(i / s.C, i % s.C, a, b, c);
        const T* __restrict from = x + i * s.L;
        const T* __restrict rest = r + i * s.L;
        T* __restrict to = y + i * s.L;
        for (int64_t p = 0; p < s.L; ++p)
          put(to + p, finished<F>(a * (up(from[p]) - c) + b, adds ? up(rest[p]) : A(0)));
      }
    });
    return;
  }
  share(threads, s.rows * s.L, s.C, [&](int64_t begin, int64_t end) {
    A* __restrict a = lanes_of_thread.take<A>(3 * s.C);
    A* __restrict b = a + s.C;
    A* __restrict c = b + s.C;
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / s.L, stop = map.same() ? end : std::min(end, (row + 1) * s.L);
      map.lay(row, s.C, a, b, c);
      for (; i < stop; ++i) {
        const T* __restrict from = x + i * s.C;
        const T* __restrict rest = r + i * s.C;
        T* __restrict to = y + i * s.C;
        for (int64_t j = 0; j < s.C; ++j)
          put(to + j, finished<F>(a[j] * (up(from[j]) - c[j]) + b[j], adds ? up(rest[j]) : A(0)));
      }
    }
  });
}

// ------------------------------------------------------------------ sums of gradients

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
  second += total(s + s2, W);
  first += total(q + q2, W);
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
      T* __restrict to = kept + (i + p) * C;
      if (masks && kept) {
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
  double* made = parts_of_call.take<double>(2 * parts * size);
  auto first = [&](int64_t part) { return s.L * part / parts; };
  share(threads, s.rows * parts, 2 * s.L * s.C / parts, [&](int64_t begin, int64_t end) {
    A* a = lanes_of_thread.take<A>(5 * s.C);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, from = first(i % parts), to = first(i % parts + 1);
      const int64_t at = (row * s.L + from) * s.C;
      if (i == begin || !map.same()) map.lay(row, s.C, a, a + s.C, a + 2 * s.C);
      column_sums<F>(g + at, x + at, r + at, kept ? kept + at : nullptr, to - from, s.C, a,
                     a + s.C, a + 2 * s.C, a + 3 * s.C, a + 4 * s.C, made + 2 * i * s.C,
                     made + (2 * i + 1) * s.C);
    }
  });
  for (int64_t row = 0; row < s.rows; ++row)
    for (int64_t j = 0; j < s.C; ++j) {
      double by_scale = 0, by_shift = 0;
      for (int64_t part = 0; part < parts; ++part) {
        by_scale += made[2 * (row * parts + part) * s.C + j];
        by_shift += made[(2 * (row * parts + part) + 1) * s.C + j];
      }
      corrected(row * s.C + j, by_scale, by_shift);
    }
}

// ------------------------------------------------------------------ gradient of the input

// dx = a·g + constant + slope·(x − c)
template <Follow F, class T>
void input_gradient(const T* g, const T* x, const T* r, T* out, const Shape& s, const Map& map,
                    Table constant, Table slope, int64_t step, int threads) {
  using A = wide<T>;
  const bool slopes = bool(slope);  // else x has no part in it, be it a number or not
  auto rest = [&](int64_t row, int64_t j, A& k0, A& k1) {
    double wide0 = constant ? constant[row * step + j] : 0;
    const double wide1 = slope ? slope[row * step + j] : 0;
    const double c = map.center ? map.center[row * map.center_step + j] : 0;
    if (const double apart = double(A(c)) - c; apart != 0) wide0 += wide1 * apart;
    k0 = A(wide0);
    k1 = A(wide1);
  };
  if (!s.last) {
    share(threads, s.rows * s.C, 2 * s.L, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        A a, b, c, k0, k1;
        map.at(i / s.C, i % s.C, a, b, c);
        rest(i / s.C, i % s.C, k0, k1);
        const T* __restrict grad = g + i * s.L;
        const T* __restrict from = x + i * s.L;
        const T* __restrict added = r + i * s.L;
        T* __restrict to = out + i * s.L;
        for (int64_t p = 0; p < s.L; ++p) {
          const A here = before<F>(up(grad[p]), up(from[p]), a, b, c,
                                   F == BOTH ? up(added[p]) : A(0));
          put(to + p, a * here + (slopes ? k0 + k1 * (up(from[p]) - c) : k0));
        }
      }
    });
    return;
  }
  const bool same = map.same() && !step;
  share(threads, s.rows * s.L, 2 * s.C, [&](int64_t begin, int64_t end) {
    A* __restrict a = lanes_of_thread.take<A>(5 * s.C);
    A* __restrict b = a + s.C;
    A* __restrict c = b + s.C;
    A* __restrict k0 = c + s.C;
    A* __restrict k1 = k0 + s.C;
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / s.L, stop = same ? end : std::min(end, (row + 1) * s.L);
      map.lay(row, s.C, a, b, c);
      for (int64_t j = 0; j < s.C; ++j) rest(row, j, k0[j], k1[j]);
      for (; i < stop; ++i) {
        const T* __restrict grad = g + i * s.C;
        const T* __restrict from = x + i * s.C;
        const T* __restrict added = r + i * s.C;
        T* __restrict to = out + i * s.C;
        for (int64_t j = 0; j < s.C; ++j) {
          const A here = before<F>(up(grad[j]), up(from[j]), a[j], b[j], c[j],
                                   F == BOTH ? up(added[j]) : A(0));
          put(to + j, a[j] * here + (slopes ? k0[j] + k1[j] * (up(from[j]) - c[j]) : k0[j]));
        }
      }
    }
  });
}

// ------------------------------------------------------------------ what a pass is called with

template <class F> void by_type(int8_t type, const F& body) {
  if (type == FLOAT) body(float());
  else if (type == DOUBLE) body(double());
  else body(bfloat16());
}

template <class F> void by_follow(bool adds, bool relu, const F& body) {
  using std::integral_constant;
  if (adds && relu) body(integral_constant<Follow, BOTH>());
  else if (relu) body(integral_constant<Follow, RELU>());
  else if (adds) body(integral_constant<Follow, RESIDUAL>());
  else body(integral_constant<Follow, NOTHING>());
}

// tensors: x, mean and var (2, rows, C)
int moments_kernel(const Call& call) {
  Arguments given{call};
  const Shape s(given);
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    moments(static_cast<T*>(call.at[0]), s, call.threads, static_cast<double*>(call.at[1]));
  });
  return 0;
}

// tensors: x, residual, y, scale, shift, center
int map_kernel(const Call& call) {
  Arguments given{call, 3};
  const Shape s(given);
  const Map tables(given);
  const bool relu = given.size();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_follow(call.at[1], relu, [&](auto follow) {
      map<follow.value>(at(0), at(1), at(2), s, tables, call.threads);
    });
  });
  return 0;
}

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
      sums<follow.value>(at(0), at(1), at(2), at(3), s, tables, call.threads, out);
    });
  });
  return 0;
}

// tensors: grad, x, residual, dx, scale, shift, center, constant, slope
int input_gradient_kernel(const Call& call) {
  Arguments given{call, 4};
  const Shape s(given);
  const Map tables(given);
  const bool relu = given.size();
  const int64_t step = given.size();
  const Table constant = given.table(), slope = given.table();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    by_follow(call.at[2] && relu, relu, [&](auto follow) {
      input_gradient<follow.value>(at(0), at(1), at(2), at(3), s, tables, constant, slope, step,
                                   call.threads);
    });
  });
  return 0;
}

// ------------------------------------------------------------------ running statistics

struct Memory {
  Table mean, second, batches, nonfinite;
  double weight, correction;
  explicit Memory(Arguments& given)
      : mean(given.table()), second(given.table()), batches(given.table()),
        nonfinite(given.table()), weight(given.real()), correction(given.real()) {}

  // All of them, or none if one is not finite; whether it was.
  int enter(const double* new_mean, const double* new_second, int64_t size, bool wanted,
            double rate) const {
    if (!batches) return 0;
    auto fits = [](Table table, double x) {
      return table.type == FLOAT ? std::isfinite(float(x)) : std::isfinite(x);
    };
    bool finite = true;
    for (int64_t i = 0; i < size; ++i)
      finite &= fits(mean, new_mean[i]) && fits(second, new_second[i] * correction);
    if (!finite) {
      nonfinite.set(0, nonfinite[0] + 1);
      return 1;
    }
    batches.set(0, batches[0] + 1);
    for (int64_t i = 0; wanted && i < size; ++i) {
      mean.set(i, mean[i] + rate * (new_mean[i] - mean[i]));
      second.set(i, second[i] + rate * (new_second[i] * correction - second[i]));
    }
    return 0;
  }
};

// The pool of all rows of (rows, C): means times a factor a channel, variances as they are
void pool_rows(const double* mean, const double* var, int64_t rows, int64_t C, const double* factor,
               double* middle, double* spread) {
  for (int64_t j = 0; j < C; ++j) middle[j] = spread[j] = 0;
  for (int64_t n = 1; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) middle[j] += mean[n * C + j] - mean[j];
  for (int64_t j = 0; j < C; ++j) middle[j] = mean[j] + middle[j] / double(rows);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) {
      const double apart = (mean[n * C + j] - middle[j]) * (factor ? factor[j] : 1);
      spread[j] += var[n * C + j] + apart * apart;
    }
  for (int64_t j = 0; j < C; ++j) {
    spread[j] /= double(rows);
    if (factor) middle[j] *= factor[j];
  }
}

// The pool of D numbers side by side
inline void pool_run(const double* mean, const double* var, int64_t D, double& middle,
                     double& spread) {
  double sum = 0, square = 0;
  for (int64_t j = 1; j < D; ++j) sum += mean[j] - mean[0];
  middle = mean[0] + sum / double(D);
  for (int64_t j = 0; j < D; ++j) square += var[j] + (mean[j] - middle) * (mean[j] - middle);
  spread = square / double(D);
}

inline double or_one(Table table, int64_t i) { return table ? table[i] : 1; }
inline double or_zero(Table table, int64_t i) { return table ? table[i] : 0; }

// ------------------------------------------------------------------ pool: bn, bgn, gn, ln, in

// tensors: moments, made, weight, bias, memory; made: the map (3, R, C), mean and second (2, R,
// groups), and r and d (2, C) of a batch renormalization
int pool_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), groups = given.size();
  const bool of_samples = given.size();
  const double eps = given.real();
  const bool renorm = given.size();
  const double* mean = given.doubles();
  double* made = given.doubles();
  const Table weight = given.table(), bias = given.table();
  const Memory memory(given);
  const Table toward_mean = given.table(), toward_std = given.table(), counter = given.table();
  const double* var = mean + rows * C;
  const int64_t R = of_samples ? rows : 1, D = C / groups, size = R * C;
  double* statistics = made + 3 * size;
  double* second = statistics + R * groups;
  std::vector<double> pooled;
  if (!of_samples && rows > 1) {
    pooled.resize(2 * C);
    pool_rows(mean, var, rows, C, nullptr, pooled.data(), pooled.data() + C);
    mean = pooled.data();
    var = mean + C;
  }
  double most_r = 1, most_d = 0;
  if (renorm) {
    const double r_max = given.real(), r_start = given.real(), r_end = given.real();
    const double d_max = given.real(), d_start = given.real(), d_end = given.real();
    auto progress = [&](double start, double end) {
      return std::min(std::max((counter[0] - start) / (end - start), 0.0), 1.0);
    };
    most_r = 1 + (r_max - 1) * progress(r_start, r_end);
    most_d = d_max * progress(d_start, d_end);
  }
  for (int64_t n = 0; n < R; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      double middle, spread;
      pool_run(mean + n * C + g * D, var + n * C + g * D, D, middle, spread);
      const double root = std::sqrt(spread + eps);
      statistics[n * groups + g] = middle;
      second[n * groups + g] = renorm ? root : spread;
      double a = 1 / root, b = 0;
      if (renorm) {
        auto clipped = [](double x, double low, double high) {
          return x < low ? low : x > high ? high : x;  // what is not a number stays so
        };
        const double r = clipped(root / toward_std[g], 1 / most_r, most_r);
        b = clipped((middle - toward_mean[g]) / toward_std[g], -most_d, most_d);
        a *= r;
        second[groups + g] = r;
        second[2 * groups + g] = b;
      }
      for (int64_t j = g * D; j < (g + 1) * D; ++j) {
        const double gamma = or_one(weight, j);
        made[n * C + j] = a * gamma;
        made[size + n * C + j] = b * gamma + or_zero(bias, j);
        made[2 * size + n * C + j] = middle;
      }
    }
  return memory.enter(statistics, second, groups, true, memory.weight);
}

// tensors: sums, made, weight, extra (2, R, C), dweight, dbias
int pool_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), L = given.size(), groups = given.size();
  const bool of_samples = given.size();
  const double eps = given.real();
  const bool renorm = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  const Table weight = given.table();
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table();
  const double* db = da + rows * C;
  const int64_t R = of_samples ? rows : 1, D = C / groups, size = R * C;
  const double* second = made + 3 * size + R * groups;
  const double values = double(rows / R) * double(L) * double(D);
  std::vector<double> both(2 * C, 0.0);
  if (!of_samples && rows > 1) {
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t j = 0; j < C; ++j) {
        both[j] += da[n * C + j];
        both[C + j] += db[n * C + j];
      }
    da = both.data();
    db = da + C;
  }
  std::vector<double> scales(C, 0.0), shifts(C, 0.0);
  for (int64_t n = 0; n < R; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      const double spread = second[n * groups + g];
      const double inverse = renorm ? 1 / spread : 1 / std::sqrt(spread + eps);
      const double r = renorm ? second[groups + g] : 1, d = renorm ? second[2 * groups + g] : 0;
      double by_scale = 0, by_shift = 0;
      for (int64_t j = g * D; j < (g + 1) * D; ++j) {
        const double first = da[n * C + j], last = db[n * C + j], gamma = or_one(weight, j) * r;
        scales[j] += first * inverse * r + last * d;
        shifts[j] += last;
        by_scale += gamma * first;
        by_shift += gamma * last;
      }
      for (int64_t j = g * D; j < (g + 1) * D; ++j) {
        extra[n * C + j] = -by_shift * inverse / values;
        extra[size + n * C + j] = -by_scale * inverse * inverse * inverse / values;
      }
    }
  for (int64_t j = 0; j < C; ++j) {
    if (dweight) dweight.set(j, scales[j]);
    if (dbias) dbias.set(j, shifts[j]);
  }
  return 0;
}

// ------------------------------------------------------------------ fixed: bn in eval mode

// tensors: made, mean, var, weight, bias; made: the map (3, C), and 1/√(var + eps) (C)
int fixed_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t C = given.size(), groups = given.size(), D = C / groups;
  const double eps = given.real();
  double* made = given.doubles();
  const Table mean = given.table(), var = given.table(), weight = given.table();
  const Table bias = given.table();
  for (int64_t j = 0; j < C; ++j) {
    made[3 * C + j] = 1 / std::sqrt(var[j / D] + eps);
    made[j] = or_one(weight, j) * made[3 * C + j];
    made[C + j] = or_zero(bias, j);
    made[2 * C + j] = mean[j / D];
  }
  return 0;
}

// tensors: sums, made, extra (2, C), dweight, dbias
int fixed_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table();
  const double* db = da + rows * C;
  std::fill(extra, extra + 2 * C, 0.0);
  for (int64_t j = 0; j < C; ++j) {
    double by_scale = 0, by_shift = 0;
    for (int64_t n = 0; n < rows; ++n) {
      by_scale += da[n * C + j];
      by_shift += db[n * C + j];
    }
    if (dweight) dweight.set(j, by_scale * made[3 * C + j]);
    if (dbias) dbias.set(j, by_shift);
  }
  return 0;
}

// ------------------------------------------------------------------ gate: rbn, iebn, ubn

inline double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

enum Source { OF_BATCH, GIVEN, BY_SCORE };
enum LooksAt { AT_NOTHING, AT_NORMALIZED, AT_INPUT };

// tensors: moments, made, center, gate_weight, gate_bias, weight, bias, given mean and second,
// score, gates (N, C) or None, memory; made: the map (3, N, C), the moments (2, N, C), statistics
// (4, C) of the batch and those used, and 1 or 0: whether the batch was used
int gate_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), size = rows * C;
  const double eps = given.real(), tau = given.real();
  const int64_t source = given.size(), looks_at = given.size();
  const double* found = given.doubles();
  double* made = given.doubles();
  const Table center = given.table(), gate_weight = given.table(), gate_bias = given.table();
  const Table weight = given.table(), bias = given.table();
  const Table old_mean = given.table(), old_second = given.table(), score = given.table();
  const Table gates = given.table();
  const Memory memory(given);
  double* statistics = made + 5 * size;
  double* used = statistics + 2 * C;
  std::memcpy(made + 3 * size, found, 2 * size * sizeof(double));
  std::vector<double> factor(C, 1.0);
  for (int64_t j = 0; center && j < C; ++j) factor[j] += center[j];
  pool_rows(found, found + size, rows, C, factor.data(), statistics, statistics + C);
  const bool condensed = source == OF_BATCH || (source == BY_SCORE && score[0] > tau);
  used[2 * C] = condensed;
  for (int64_t j = 0; j < C; ++j) {
    used[j] = condensed ? statistics[j] : old_mean[j];
    used[C + j] = condensed ? statistics[C + j] : old_second[j];
    const double scale = 1 / std::sqrt(used[C + j] + eps), gamma = or_one(weight, j);
    const double by = or_zero(gate_weight, j), start = gate_bias[j], w = factor[j] - 1;
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      const double m = found[at];
      const double p = looks_at == AT_NORMALIZED ? (m * factor[j] - used[j]) * scale : m;
      const double s = sigmoid(looks_at == AT_NOTHING ? start : by * p + start);
      made[at] = gamma * s * scale;
      made[size + at] = or_zero(bias, j);
      made[2 * size + at] = used[j] - w * m;
      if (gates) gates.set(at, s);
    }
  }
  return memory.enter(statistics, statistics + C, C, condensed, memory.weight);
}

// tensors: sums, made, center, gate_weight, gate_bias, weight, gradients of the gates, extra (2, N,
// C), and the gradients of weight, bias, gate_weight, gate_bias and center
int gate_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), L = given.size(), size = rows * C;
  const double eps = given.real();
  const int64_t source = given.size(), looks_at = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  const Table center = given.table(), gate_weight = given.table(), gate_bias = given.table();
  const Table weight = given.table(), dgates = given.table();
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table(), dgate_weight = given.table();
  const Table dgate_bias = given.table(), dcenter = given.table();
  const double* db = da + size;
  const double* mean = made + 3 * size;
  const double* used = made + 5 * size + 2 * C;
  const double pooled = source == GIVEN ? 0 : used[2 * C] / double(rows);  // if the batch was used
  for (int64_t j = 0; j < C; ++j) {
    const double middle = used[j], scale = 1 / std::sqrt(used[C + j] + eps);
    const double w = or_zero(center, j), gamma = or_one(weight, j);
    const double by = looks_at == AT_NOTHING ? 0 : gate_weight[j], start = gate_bias[j];
    double by_weight = 0, by_bias = 0, by_middle = 0, by_z = 0, by_zp = 0, by_p = 0, by_pa = 0;
    double by_m = 0;
    auto gate = [&](int64_t at, double& p) {
      p = looks_at == AT_NORMALIZED ? (mean[at] * (1 + w) - middle) * scale : mean[at];
      return sigmoid(looks_at == AT_NOTHING ? start : by * p + start);
    };
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      double p;
      const double s = gate(at, p);
      const double dz = (da[at] * gamma * scale + or_zero(dgates, at)) * s * (1 - s);
      by_bias += db[at];
      by_weight += da[at] * s;
      by_middle += gamma * s * scale * db[at];
      by_z += dz;
      by_m += mean[at];
      by_zp += dz * p;
      if (looks_at == AT_NORMALIZED) {
        by_p += dz * by;
        by_pa += dz * by * (mean[at] * (1 + w) - middle);
      }
    }
    const double dscale = gamma * by_weight + by_pa;
    const double dmiddle = (-by_middle - scale * by_p) * pooled;
    const double dvar = -0.5 * scale * scale * scale * dscale * pooled;
    // where the statistics are the batch's, the factors of m sum to zero: about the mean of m, for
    // otherwise it would cancel
    const double about = by_m * pooled;
    double by_center = 0;
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      double p;
      const double s = gate(at, p), m = mean[at];
      const double dp = (da[at] * gamma * scale + or_zero(dgates, at)) * s * (1 - s) * by;
      const double apart = m * (1 + w) - middle;
      double inner = 2 * dvar * apart + dmiddle;  // gradient of m' = (1 + w)·m
      if (looks_at == AT_NORMALIZED) inner += dp * scale;
      const double added = gamma * s * scale * db[at];  // of what is added to x
      double dm = (1 + w) * inner + w * added;
      if (looks_at == AT_INPUT) dm += dp;
      by_center += (m - about) * (inner + added);
      const double slope = 2 * dvar / double(L);
      extra[at] = dm / double(L) - apart * slope;
      extra[size + at] = slope;
    }
    if (dweight) dweight.set(j, by_weight * scale);
    if (dbias) dbias.set(j, by_bias);
    if (dgate_weight) dgate_weight.set(j, by_zp);
    if (dgate_bias) dgate_bias.set(j, by_z);
    if (dcenter) dcenter.set(j, by_center);
  }
  return 0;
}

// score ← decay · score + (1 − decay) · factor · S, S the mean cosine of the first samples; tensors:
// x, moments, score
int score_kernel(const Call& call) {
  Arguments given{call, 1};
  const int64_t rows = given.size(), C = given.size(), L = given.size();
  const int64_t samples = given.size(), values = C * L;
  const double decay = given.real(), factor = given.real();
  const double* mean = given.doubles();
  const Table score = given.table();
  const double* var = mean + rows * C;
  double alike = 1;
  if (samples > 1) {
    std::vector<double> weights(samples), squares((values + BLOCK - 1) / BLOCK);
    for (int64_t n = 0; n < samples; ++n) {
      double square = 0;
      for (int64_t j = n * C; j < (n + 1) * C; ++j) square += var[j] + mean[j] * mean[j];
      weights[n] = square > 0 ? 1 / std::sqrt(square * double(L)) : 0;
    }
    by_type(call.type[0], [&](auto of) {
      using T = decltype(of);
      using A = wide<T>;
      const T* x = static_cast<T*>(call.at[0]);
      const int64_t blocks = int64_t(squares.size());
      share(call.threads, blocks, BLOCK * samples, [&](int64_t begin, int64_t end) {
        A* __restrict sum = lanes_of_thread.take<A>(BLOCK);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t k = std::min(BLOCK, values - i * BLOCK);
          std::fill(sum, sum + k, A(0));
          for (int64_t n = 0; n < samples; ++n) {
            const T* __restrict at = x + n * values + i * BLOCK;
            const A weight = A(weights[n]);
            for (int64_t d = 0; d < k; ++d) sum[d] += weight * up(at[d]);
          }
          double square = 0;
          for (int64_t d = 0; d < k; ++d) square += double(sum[d]) * sum[d];
          squares[i] = square;
        }
      });
    });
    double all = 0;
    for (double square : squares) all += square;
    const double n = double(samples);
    alike = (all - n) / (n * (n - 1));
  }
  const double old = score[0], mixed = decay * old + (1 - decay) * factor * alike;
  if (std::isfinite(mixed)) score.set(0, mixed);  // NaN would compare as not condensed for ever
  return 0;
}

// ------------------------------------------------------------------ channel: bcn

struct GroupAffine {  // one number a group, one a channel, or none
  Table table;
  int64_t D;
  bool of_group;
  double at(int64_t j, double other) const {
    return table ? table[of_group ? j / D : j] : other;
  }
};

// tensors: moments, made, weight, bias, group_weight, group_bias, given mean and second, rate,
// memory; made: the map (3, N, C), the moments (2, N, C), statistics (4, C) of the batch and those
// used
int channel_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), groups = given.size(), size = rows * C;
  const double eps = given.real();
  const bool constant = given.size(), of_group = given.size();
  const double* found = given.doubles();
  double* made = given.doubles();
  const Table weight = given.table(), bias = given.table();
  const int64_t D = C / groups;
  const GroupAffine own_weight{given.table(), D, of_group}, own_bias{given.table(), D, of_group};
  const Table old_mean = given.table(), old_second = given.table(), rate = given.table();
  const Memory memory(given);
  double* statistics = made + 5 * size;
  double* used = statistics + 2 * C;
  const double* mean = found;
  const double* var = found + size;
  std::memcpy(made + 3 * size, found, 2 * size * sizeof(double));
  pool_rows(mean, var, rows, C, nullptr, statistics, statistics + C);
  int bad = 0;
  if (rate) {  // micro batches: about the old mean, and they enter first
    for (int64_t j = 0; j < C; ++j) {
      const double apart = statistics[j] - old_mean[j];
      statistics[C + j] += apart * apart;
    }
    bad = memory.enter(statistics, statistics + C, C, true, rate[0]);
  }
  for (int64_t j = 0; j < C; ++j) {
    used[j] = constant ? old_mean[j] : statistics[j];
    used[C + j] = constant ? old_second[j] : statistics[C + j];
  }
  std::vector<double> scale(C), shift(C), first(D), inner(D);
  for (int64_t j = 0; j < C; ++j) {
    scale[j] = or_one(weight, j) / std::sqrt(used[C + j] + eps);
    shift[j] = or_zero(bias, j);
  }
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t d = 0; d < D; ++d) {
        const int64_t j = g * D + d, at = n * C + j;
        first[d] = scale[j] * (mean[at] - used[j]) + shift[j];
        inner[d] = scale[j] * scale[j] * var[at];
      }
      double middle, spread;
      pool_run(first.data(), inner.data(), D, middle, spread);
      const double r = 1 / std::sqrt(spread + eps);
      for (int64_t d = 0; d < D; ++d) {
        const int64_t j = g * D + d, at = n * C + j;
        const double all = r * own_weight.at(j, 1);
        made[at] = scale[j] * all;
        made[size + at] = (shift[j] - middle) * all + own_bias.at(j, 0);
        made[2 * size + at] = used[j];
      }
    }
  return rate ? bad : memory.enter(statistics, statistics + C, C, true, memory.weight);
}

// tensors: sums, made, weight, bias, group_weight, extra (2, N, C), and the gradients of weight,
// bias, group_weight and group_bias
int channel_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), L = given.size(), groups = given.size();
  const double eps = given.real();
  const bool constant = given.size(), of_group = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  const Table weight = given.table(), bias = given.table();
  const int64_t D = C / groups, size = rows * C;
  const GroupAffine own_weight{given.table(), D, of_group};
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table();
  const Table dgroup_weight = given.table(), dgroup_bias = given.table();
  const double* db = da + size;
  const double* mean = made + 3 * size;
  const double* var = mean + size;
  const double* used = made + 5 * size + 2 * C;
  std::vector<double> scale(C), shift(C), a1(C), first(D), inner(D);
  std::vector<double> by_scale(C, 0.0), by_shift(C, 0.0), by_own(C, 0.0), by_bias(C, 0.0);
  for (int64_t j = 0; j < C; ++j) {
    scale[j] = 1 / std::sqrt(used[C + j] + eps);
    a1[j] = scale[j] * or_one(weight, j);
    shift[j] = or_zero(bias, j);
  }
  double* dfirst = extra;  // until all samples are known
  double* dinner = extra + size;
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t d = 0; d < D; ++d) {
        const int64_t j = g * D + d, at = n * C + j;
        first[d] = a1[j] * (mean[at] - used[j]) + shift[j];
        inner[d] = a1[j] * a1[j] * var[at];
      }
      double middle, spread;
      pool_run(first.data(), inner.data(), D, middle, spread);
      const double r = 1 / std::sqrt(spread + eps);
      double large = 0, shifted = 0;
      for (int64_t d = 0; d < D; ++d) {
        const int64_t j = g * D + d, at = n * C + j;
        const double own = own_weight.at(j, 1);
        large += (da[at] * a1[j] + db[at] * (shift[j] - middle)) * own;
        shifted += db[at] * r * own;
      }
      const double by_inner = -0.5 * r * r * r * large / double(D);
      for (int64_t d = 0; d < D; ++d) {
        const int64_t j = g * D + d, at = n * C + j;
        const double own = own_weight.at(j, 1);
        dinner[at] = by_inner;
        dfirst[at] = 2 * by_inner * (first[d] - middle) - shifted / double(D);
        by_scale[j] += da[at] * r * own + 2 * a1[j] * var[at] * by_inner +
                       dfirst[at] * (mean[at] - used[j]);
        by_shift[j] += db[at] * r * own + dfirst[at];
        by_own[j] += (da[at] * a1[j] + db[at] * (shift[j] - middle)) * r;
        by_bias[j] += db[at];
      }
    }
  const double pooled = constant ? 0 : 1 / double(rows);
  for (int64_t j = 0; j < C; ++j) {
    if (dweight) dweight.set(j, by_scale[j] * scale[j]);
    if (dbias) dbias.set(j, by_shift[j]);
    if (dgroup_weight && !of_group) dgroup_weight.set(j, by_own[j]);
    if (dgroup_bias && !of_group) dgroup_bias.set(j, by_bias[j]);
    const double gamma = or_one(weight, j);
    const double dvar = -0.5 * scale[j] * scale[j] * scale[j] * gamma * by_scale[j] * pooled;
    const double dmiddle = -a1[j] * by_shift[j] * pooled;
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      const double apart = mean[at] - used[j];
      const double dm = a1[j] * dfirst[at] + 2 * dvar * apart + dmiddle;
      const double slope = 2 * (a1[j] * a1[j] * dinner[at] + dvar) / double(L);
      extra[at] = dm / double(L) - apart * slope;
      extra[size + at] = slope;
    }
  }
  for (int64_t g = 0; of_group && g < groups; ++g) {
    double own = 0, all = 0;
    for (int64_t j = g * D; j < (g + 1) * D; ++j) {
      own += by_own[j];
      all += by_bias[j];
    }
    if (dgroup_weight) dgroup_weight.set(g, own);
    if (dgroup_bias) dgroup_bias.set(g, all);
  }
  return 0;
}

// ------------------------------------------------------------------ mix: sn

struct Shares {  // softmax of two or three numbers
  double of[3];
  Shares(Table logits, int64_t parts) : of{0, 0, 0} {
    double top = logits[0], all = 0;
    for (int64_t i = 1; i < parts; ++i) top = std::max(top, logits[i]);
    for (int64_t i = 0; i < parts; ++i) all += of[i] = std::exp(logits[i] - top);
    for (double& share : of) share /= all;
  }
  double mixed(double own, double sample, double batch) const {
    return sample + of[0] * (own - sample) + of[2] * (batch - sample);
  }
};

// tensors: moments, made, weight, bias, mean_weight, var_weight, given mean and second, memory;
// made: the map (3, N, C), the moments (2, N, C), of the batch (2, C), of each sample (2, N)
int mix_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), size = rows * C;
  const double eps = given.real(), unbias = given.real();
  const int64_t parts = given.size();
  const bool fixed = given.size();
  const double* found = given.doubles();
  double* made = given.doubles();
  const Table weight = given.table(), bias = given.table();
  const Shares p(given.table(), parts), q(given.table(), parts);
  const Table old_mean = given.table(), old_second = given.table();
  const Memory memory(given);
  double* mean = made + 3 * size;
  double* var = mean + size;
  double* statistics = made + 5 * size;
  double* samples = statistics + 2 * C;
  for (int64_t i = 0; i < size; ++i) {
    mean[i] = found[i];
    var[i] = found[size + i] * unbias;
  }
  if (parts == 2) std::fill(statistics, statistics + 2 * C, 0.0);
  else if (!fixed) pool_rows(mean, var, rows, C, nullptr, statistics, statistics + C);
  for (int64_t j = 0; fixed && j < C; ++j) {
    statistics[j] = old_mean[j];
    statistics[C + j] = old_second[j];
  }
  for (int64_t n = 0; n < rows; ++n) {
    double &middle = samples[n], &spread = samples[rows + n];
    pool_run(mean + n * C, var + n * C, C, middle, spread);
    for (int64_t j = 0; j < C; ++j) {
      const int64_t at = n * C + j;
      const double mixed = q.mixed(var[at], spread, statistics[C + j]);
      made[at] = or_one(weight, j) / std::sqrt(mixed + eps);
      made[size + at] = or_zero(bias, j);
      made[2 * size + at] = p.mixed(mean[at], middle, statistics[j]);
    }
  }
  return memory.enter(statistics, statistics + C, C, true, memory.weight);
}

// tensors: sums, made, weight, mean_weight, var_weight, extra (2, N, C), and the gradients of
// weight, bias, mean_weight and var_weight
int mix_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), L = given.size(), size = rows * C;
  const double eps = given.real(), unbias = given.real();
  const int64_t parts = given.size();
  const bool fixed = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  const Table weight = given.table();
  const Shares p(given.table(), parts), q(given.table(), parts);
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table();
  const Table logits[2] = {given.table(), given.table()};
  const double* db = da + size;
  const double* mean = made + 3 * size;
  const double* var = mean + size;
  const double* statistics = made + 5 * size;
  const double* samples = statistics + 2 * C;
  std::vector<double> scales(C, 0.0), shifts(C, 0.0), of_mean(C, 0.0), of_var(C, 0.0);
  std::vector<double> sums(2 * rows, 0.0);
  double* u = extra;  // gradients of mean and var of each cell, until all sums are known
  double* w = extra + size;
  double own[2] = {0, 0}, batch[2] = {0, 0};
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) {
      const int64_t at = n * C + j;
      const double middle = samples[n], spread = samples[rows + n];
      const double r = 1 / std::sqrt(q.mixed(var[at], spread, statistics[C + j]) + eps);
      const double gamma = or_one(weight, j);
      scales[j] += da[at] * r;
      shifts[j] += db[at];
      u[at] = -gamma * r * db[at];
      w[at] = -0.5 * gamma * r * r * r * da[at];
      of_mean[j] += u[at];
      of_var[j] += w[at];
      sums[n] += u[at];
      sums[rows + n] += w[at];
      own[0] += u[at] * (mean[at] - middle);
      own[1] += w[at] * (var[at] - spread);
      batch[0] += u[at] * (statistics[j] - middle);
      batch[1] += w[at] * (statistics[C + j] - spread);
    }
  const double pooled = fixed ? 0 : 1 / double(rows);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) {
      const int64_t at = n * C + j;
      const double dbig_m = p.of[1] * sums[n] / double(C);
      const double dbig_v = q.of[1] * sums[rows + n] / double(C);
      const double dmiddle = p.of[2] * of_mean[j] * pooled, dspread = q.of[2] * of_var[j] * pooled;
      double dm = p.of[0] * u[at] + dbig_m + dmiddle;
      dm += 2 * (dbig_v * (mean[at] - samples[n]) + dspread * (mean[at] - statistics[j]));
      const double slope = 2 * (q.of[0] * w[at] + dbig_v + dspread) * unbias / double(L);
      const double apart = mean[at] - made[2 * size + at];
      extra[at] = dm / double(L) - apart * slope;
      extra[size + at] = slope;
    }
  for (int64_t j = 0; j < C; ++j) {
    if (dweight) dweight.set(j, scales[j]);
    if (dbias) dbias.set(j, shifts[j]);
  }
  const Shares* both[2] = {&p, &q};
  for (int i = 0; i < 2; ++i) {
    if (!logits[i]) continue;
    const double* of = both[i]->of;
    const double middle = of[0] * own[i] + of[2] * batch[i];
    logits[i].set(0, of[0] * (own[i] - middle));
    logits[i].set(1, -of[1] * middle);
    if (parts == 3) logits[i].set(2, of[2] * (batch[i] - middle));
  }
  return 0;
}

}  // namespace

Kernel kernel(const char* name) {
  static const struct {
    const char* name;
    Kernel kernel;
  } all[] = {
      {"moments", moments_kernel},
      {"map", map_kernel},
      {"sums", sums_kernel},
      {"input_gradient", input_gradient_kernel},
      {"pool_map", pool_map_kernel},
      {"pool_gradient", pool_gradient_kernel},
      {"fixed_map", fixed_map_kernel},
      {"fixed_gradient", fixed_gradient_kernel},
      {"gate_map", gate_map_kernel},
      {"gate_gradient", gate_gradient_kernel},
      {"score", score_kernel},
      {"channel_map", channel_map_kernel},
      {"channel_gradient", channel_gradient_kernel},
      {"mix_map", mix_map_kernel},
      {"mix_gradient", mix_gradient_kernel},
  };
  for (const auto& each : all)
    if (!std::strcmp(each.name, name)) return each.kernel;
  return nullptr;
}

}  // namespace normkit
