// A pass over activations: mean and variance of each cell.

#include <algorithm>

#include "columns.h"
#include "lanes.h"

namespace normkit {

namespace {

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
  first = total(s + s2);
  second = total(q + q2);
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

}  // namespace

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

}  // namespace normkit
