// Passes over activations of a norm with a depthwise convolution after it, 3 × 3 with zeros around.
// With z = a·(x − c) + b on the map and 0 beside it, k the kernel, and s the gates (or 1):
//
//     y[p] = activation(Σ_t k[t]·z[p + t] + s·bias + residual[p])
//     g[q] = Σ_t k[t]·dy[q − t]        dk[t] = Σ_q z[q]·dy[q − t]
//     dx = a·g + constant + slope·(x − c)
//
// z and g never lie in memory as a whole, and what is before a ReLU is told by its result. The sums
// of the norm need no g: with d[t] = Σ_p dy[p]·(x − c)[p + t] and D[t] = Σ_p dy[p] of those p for
// which p + t is on the map, Σ g·(x − c) = Σ_t k[t]·d[t], Σ g = Σ_t k[t]·D[t], dk = a·d + b·D.

#include <algorithm>
#include <vector>

#include "maps.h"
#include "window.h"

namespace normkit {

namespace {

// A number for each lane of a piece.
template <class A> struct Lanewise {
  static constexpr int W = Lanes<A>::width;
  alignas(64) A at[ABREAST] = {};
  void set(const Pieces& maps, int64_t j, A x) {
    if (maps.last) at[j] = x;
    else std::fill(at, at + W, x);
  }
  typename Lanes<A>::vector operator[](int64_t v) const { return load(at + v * W); }
};

template <class A> struct Taps {
  typename Lanes<A>::vector at[9];
};

// The kernels of all channels, as the numbers that are computed with.
template <class A> struct Kernels {
  using L = Lanes<A>;
  const int64_t C;
  const bool last;
  std::vector<A> taps;  // (9, C)
  Kernels(Table kernel, const Pieces& maps)
      : C(maps.C), last(maps.last), taps(9 * C + L::width) {
    for (int64_t j = 0; j < C; ++j)
      for (int64_t t = 0; t < 9; ++t) taps[t * C + j] = A(kernel[j * 9 + t]);
  }
  Taps<A> of(const Piece& own, int64_t v) const {
    Taps<A> made;
    for (int64_t t = 0; t < 9; ++t) {
      const A* at = taps.data() + t * C + own.channel;
      made.at[t] = last ? load(at + v * L::width) : L::all(*at);
    }
    return made;
  }
};

// The map of a piece.
template <class A> struct Own {
  Lanewise<A> a, b, c;
  void set(const Pieces& maps, const Piece& own, const Map& map) {
    for (int64_t j = 0; j < own.channels; ++j) {
      A scale, shift, center;
      map.at(own.n, own.channel + j, scale, shift, center);
      a.set(maps, j, scale);
      b.set(maps, j, shift);
      c.set(maps, j, center);
    }
  }
};

template <class T> struct Gradient {  // before the activation, of which y is the result, if any
  using V = typename Lanes<wide<T>>::vector;
  const T* dy;
  const T* y;
  V operator()(int64_t offset, int64_t lanes) const {
    const V g = load(dy + offset, lanes);
    return y ? load(y + offset, lanes) <= 0 ? V{} : g : g;
  }
};

// Whether a piece needs other numbers than the one before it.
inline bool changed(const Piece& own, const Piece& before, bool same) {
  return own.channel != before.channel || (!same && own.n != before.n);
}
constexpr Piece NONE_YET = {-1, -1, 0, 0, 0};

template <class T>
void convolve(const T* x, const T* r, T* y, const Pieces& maps, const Map& map, Table kernel,
              Table bias, Table gates, bool relu, int threads) {
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  const Kernels<A> kernels(kernel, maps);
  const int64_t values = maps.N * maps.C * maps.H * maps.W / maps.count();
  share(threads, maps.count(), values, [&](int64_t begin, int64_t end) {
    const Window<A> window(maps);
    Own<A> own;
    Lanewise<A> shift;
    Piece before = NONE_YET;
    maps.each(begin, end, [&](const Piece& piece) {
      if (changed(piece, before, map.same() && !gates)) {
        own.set(maps, piece, map);
        for (int64_t j = 0; bias && j < piece.channels; ++j) {
          const int64_t at = piece.channel + j;
          shift.set(maps, j, A(bias[at] * or_one(gates, piece.n * maps.C + at)));
        }
      }
      window.lay(piece, [&](int64_t at, int64_t lanes, int64_t v) {
        return own.a[v] * (load(x + at, lanes) - own.c[v]) + own.b[v];
      });
      for (int64_t v = 0; v < window.vectors_of(piece); ++v) {
        const Taps<A> k = kernels.of(piece, v);
        const V start = shift[v];
        window.each(piece, v, [=](const A* z, int64_t at, auto lanes, auto left, auto right) {
          V sum = window.around(z, k.at, start, left, right);
          if (r) sum += load(r + at, lanes);
          if (relu) sum = sum < 0 ? V{} : sum;
          store(y + at, sum, lanes);
        });
      }
      before = piece;
    });
  });
}

// Σ g over positions but the first of each row, over all, and over all but the last, in lanes
template <class A> struct Sides {
  using V = typename Lanes<A>::vector;
  V at[3]{};
  template <class B> void take(V g, B left, B right) {
    at[0] += where(left, g);
    at[1] += g;
    at[2] += where(right, g);
  }
};

// Of each row of the tables and channel Σ g·(x − c), Σ g and Σ dy; of each channel and tap dk
struct Found {
  double *da, *db, *dy, *dk;
  Found(double* at, int64_t size) : da(at), db(at + size), dy(at + 2 * size), dk(at + 3 * size) {}
};

template <class T>
void correlate(const Gradient<T>& grad, const T* x, T* kept, const Pieces& maps, const Map& map,
               Table kernel, int64_t parts, double* made, int64_t size, int threads) {
  using A = wide<T>;
  using L = Lanes<A>;
  using V = typename L::vector;
  const Kernels<A> kernels(kernel, maps);
  const int64_t lines = maps.N * maps.bands, items = parts * maps.blocks;
  share(threads, items, 2 * lines * maps.C * maps.H * maps.W / maps.bands / items,
        [&](int64_t begin, int64_t end) {
    const Window<A> window(maps);
    Own<A> own;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i / maps.blocks;
      const Found found(made + part * size, maps.rows * maps.C);
      alignas(64) double dk[9][ABREAST] = {};
      Piece piece = NONE_YET;
      for (int64_t line = lines * part / parts; line < lines * (part + 1) / parts; ++line) {
        const Piece before = piece;
        piece = maps.at(line / maps.bands, i % maps.blocks, line % maps.bands);
        if (changed(piece, before, map.same())) own.set(maps, piece, map);
        window.lay(piece, [&](int64_t at, int64_t lanes, int64_t v) {
          return load(x + at, lanes) - own.c[v];
        });
        for (int64_t v = 0; v < window.vectors_of(piece); ++v) {
          V d[9]{};
          Sides<A> all;
          const int64_t down = window.down, aside = window.aside;
          window.each(piece, v, [=, &d, &all](const A* z, int64_t at, auto lanes, auto l, auto r) {
            const V g = grad(at, lanes);
            if (kept) store(kept + at, g, lanes);
            const V sides[3] = {where(l, g), g, where(r, g)};
            nine([&](auto t) {
              d[t] += sides[t % 3] * load(z + (t / 3 - 1) * down + (t % 3 - 1) * aside);
            });
            all.take(g, l, r);
          });
          auto border = [&](int64_t row) {  // which some of the taps do not reach from
            const Piece line = {piece.n, piece.channel, piece.channels, row, 1};
            Sides<A> made;
            window.each(line, v, [&](const A*, int64_t at, auto lanes, auto l, auto r) {
              made.take(grad(at, lanes), l, r);
            });
            return made;
          };
          Sides<A> first, last;
          if (piece.first == 0) first = border(0);
          if (piece.first + piece.rows == maps.H) last = border(maps.H - 1);
          const Taps<A> k = kernels.of(piece, v);
          const V a = own.a[v], b = own.b[v];
          V da{}, db{};
          nine([&](auto t) {
            V there = all.at[t % 3];
            if (t < 3) there -= first.at[t % 3];
            if (t > 5) there -= last.at[t % 3];
            da += k.at[t] * d[t];
            db += k.at[t] * there;
            add(dk[t] + v * L::width, a * d[t] + b * there);
          });
          const int64_t at = (maps.rows > 1 ? piece.n * maps.C : 0) + piece.channel + v * L::width;
          if (!maps.last) {
            found.da[at] += total(da);
            found.db[at] += total(db);
            found.dy[at] += total(all.at[1]);
            continue;
          }
          for (int64_t l = 0; l < std::min<int64_t>(L::width, piece.channels - v * L::width); ++l) {
            found.da[at + l] += da[l];
            found.db[at + l] += db[l];
            found.dy[at + l] += all.at[1][l];
          }
        }
      }
      for (int64_t t = 0; t < 9; ++t)
        for (int64_t j = 0; j < (maps.last ? piece.channels : L::width); ++j)
          found.dk[t * maps.C + piece.channel + (maps.last ? j : 0)] += dk[t][j];
    }
  });
}

template <class T>
void input_gradient(const Gradient<T>& grad, const T* x, T* out, const Pieces& maps, const Map& map,
                    Table constant, Table slope, int64_t step, Table kernel, int threads) {
  using A = wide<T>;
  using V = typename Lanes<A>::vector;
  const Kernels<A> kernels(kernel, maps);
  const bool slopes = bool(slope);  // else x has no part in it, be it a number or not
  const int64_t values = 2 * maps.N * maps.C * maps.H * maps.W / maps.count();
  share(threads, maps.count(), values, [&](int64_t begin, int64_t end) {
    const Window<A> window(maps);
    Own<A> own;
    Lanewise<A> first, second;
    Piece before = NONE_YET;
    maps.each(begin, end, [&](const Piece& piece) {
      if (changed(piece, before, map.same() && !step)) {
        own.set(maps, piece, map);
        for (int64_t j = 0; j < piece.channels; ++j) {
          const int64_t at = piece.channel + j;
          const double c = map.center ? map.center[piece.n * map.center_step + at] : 0;
          const double k1 = or_zero(slope, piece.n * step + at);
          first.set(maps, j, A(or_zero(constant, piece.n * step + at) + k1 * (double(A(c)) - c)));
          second.set(maps, j, A(k1));
        }
      }
      window.lay(piece, [&](int64_t at, int64_t lanes, int64_t) { return grad(at, lanes); });
      for (int64_t v = 0; v < window.vectors_of(piece); ++v) {
        const Taps<A> k = kernels.of(piece, v);
        const V a = own.a[v], c = own.c[v], k0 = first[v], k1 = second[v];
        Taps<A> turned;
        for (int t = 0; t < 9; ++t) turned.at[t] = a * k.at[8 - t];
        window.each(piece, v, [=](const A* z, int64_t at, auto lanes, auto left, auto right) {
          V sum = window.around(z, turned.at, k0, left, right);
          if (slopes) sum += k1 * (load(x + at, lanes) - c);
          store(out + at, sum, lanes);
        });
      }
      before = piece;
    });
  });
}

}  // namespace

// tensors: x, residual, y, scale, shift, center, kernel (C, 9), bias, gates
int depthwise_map_kernel(const Call& call) {
  Arguments given{call, 3};
  const Pieces maps(given);
  const Map tables(given);
  const bool relu = given.size();
  const Table kernel = given.table(), bias = given.table(), gates = given.table();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    convolve<T>(at(0), at(1), at(2), maps, tables, kernel, bias, gates, relu, call.threads);
  });
  return 0;
}

// tensors: dy, x, y or None, g or None (before the activation), scale, shift, center, sums (2, rows,
// C), kernel, bias, gates, and the gradients of kernel, bias and gates
int depthwise_sums_kernel(const Call& call) {
  Arguments given{call, 4};
  const Pieces maps(given);
  const Map tables(given);
  given.size();  // the activation: y is there or not
  const int64_t C = maps.C, size = maps.rows * C;
  double* out = given.doubles();
  const Table kernel = given.table(), bias = given.table(), gates = given.table();
  const Table dkernel = given.table(), dbias = given.table(), dgates = given.table();
  // a channel's taps are summed over samples: these are cut only where channels are too few
  const int64_t wanted = call.threads < 2 || maps.blocks >= 2 * call.threads
                             ? 1 : (2 * call.threads + maps.blocks - 1) / maps.blocks;
  const int64_t parts = std::min(wanted, maps.N * maps.bands), each = 3 * size + 9 * C;
  double* made = parts_of_call.take<double>(parts * each);
  std::fill(made, made + parts * each, 0.0);
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    using A = wide<T>;
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    correlate<T>({at(0), at(2)}, at(1), at(3), maps, tables, kernel, parts, made, each,
                 call.threads);
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t i = 0; i < each; ++i) made[i] += made[part * each + i];
    // the center in full is another number than the one that was subtracted
    for (int64_t i = 0; tables.center && i < size; ++i) {
      const double c = tables.center[i / C * tables.center_step + i % C];
      if (const double rest = double(A(c)) - c; rest != 0) made[i] += rest * made[size + i];
    }
  });
  std::copy(made, made + 2 * size, out);
  const Found found(made, size);
  for (int64_t j = 0; j < C; ++j) {
    for (int64_t t = 0; t < 9; ++t) dkernel.set(j * 9 + t, found.dk[t * C + j]);
    double by_bias = 0;
    for (int64_t i = j; i < size; i += C) {
      by_bias += or_one(gates, i) * found.dy[i];
      if (dgates) dgates.set(i, bias[j] * found.dy[i]);
    }
    if (dbias) dbias.set(j, by_bias);
  }
  return 0;
}

// tensors: dy, x, y or None, dx, scale, shift, center, constant, slope, kernel
int depthwise_input_gradient_kernel(const Call& call) {
  Arguments given{call, 4};
  const Pieces maps(given);
  const Map tables(given);
  given.size();  // the activation
  const int64_t step = given.size();
  const Table constant = given.table(), slope = given.table(), kernel = given.table();
  by_type(call.type[0], [&](auto of) {
    using T = decltype(of);
    auto at = [&](int i) { return static_cast<T*>(call.at[i]); };
    input_gradient<T>({at(0), at(2)}, at(1), at(3), maps, tables, constant, slope, step, kernel,
                      call.threads);
  });
  return 0;
}

}  // namespace normkit
