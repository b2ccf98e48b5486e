// A pass over activations: y = activation(a·(x − c) + b + residual).

#include <algorithm>

#include "maps.h"
#include "threads.h"

namespace normkit {

namespace {

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
    const int64_t C = s.C, L = s.L;
    A* __restrict a = lanes_of_thread.take<A>(3 * C);
    A* __restrict b = a + C;
    A* __restrict c = b + C;
    for (int64_t i = begin; i < end;) {
      const int64_t row = i / L, stop = map.same() ? end : std::min(end, (row + 1) * L);
      map.lay(row, C, a, b, c);
      for (; i < stop; ++i) {
        const T* __restrict from = x + i * C;
        const T* __restrict rest = r + i * C;
        T* __restrict to = y + i * C;
        for (int64_t j = 0; j < C; ++j)
          put(to + j, finished<F>(a[j] * (up(from[j]) - c[j]) + b[j], adds ? up(rest[j]) : A(0)));
      }
    }
  });
}

}  // namespace

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
      map<follow.value>(at(0), or_else(at(1), at(0)), at(2), s, tables, call.threads);
    });
  });
  return 0;
}

}  // namespace normkit
