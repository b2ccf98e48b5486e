// A pass over activations: dx = a·g + constant + slope·(x − c), g that before the activation.

#include <algorithm>

#include "maps.h"
#include "threads.h"

namespace normkit {

namespace {

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
    const int64_t C = s.C, L = s.L;
    A* __restrict a = lanes_of_thread.take<A>(5 * C);
    A* __restrict b = a + C;
    A* __restrict c = b + C;
    A* __restrict k0 = c + C;
    A* __restrict k1 = k0 + C;
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / L, stop = same ? end : std::min(end, (row + 1) * L);
      map.lay(row, C, a, b, c);
      for (int64_t j = 0; j < C; ++j) rest(row, j, k0[j], k1[j]);
      for (; i < stop; ++i) {
        const T* __restrict grad = g + i * C;
        const T* __restrict from = x + i * C;
        const T* __restrict added = r + i * C;
        T* __restrict to = out + i * C;
        for (int64_t j = 0; j < C; ++j) {
          const A here = before<F>(up(grad[j]), up(from[j]), a[j], b[j], c[j],
                                   F == BOTH ? up(added[j]) : A(0));
          put(to + j, a[j] * here + (slopes ? k0[j] + k1[j] * (up(from[j]) - c[j]) : k0[j]));
        }
      }
    }
  });
}

}  // namespace

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
      input_gradient<follow.value>(at(0), at(1), or_else(at(2), at(1)), at(3), s, tables, constant,
                                   slope, step, call.threads);
    });
  });
  return 0;
}

}  // namespace normkit
