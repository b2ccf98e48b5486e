// Where a value meets its neighbours: maps in bands of rows that stay in a near cache, with the rows
// beside them, or zeros, around.
//
// In contiguous memory the lanes of a vector are positions of one channel, with channels last they
// are channels of one position; all else is the same. Rows lie one behind the other, without gaps
// between them: what stands left of a first column is the end of the row above, so what comes from
// the sides is masked, by column.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "lanes.h"
#include "tables.h"
#include "threads.h"

namespace normkit {

constexpr int64_t ABREAST = 64;  // channels of a band, where they run fastest

struct Piece {  // rows of a block of channels of a sample
  int64_t n, channel, channels, first, rows;
};

// N × C maps of H × W, cut into pieces
struct Pieces {
  int64_t N, C, H, W;
  bool last;
  int64_t rows;  // of tables: N or one for all
  int64_t abreast, blocks, bands;
  explicit Pieces(Arguments& given)
      : N(given.size()), C(given.size()), H(given.size()), W(given.size()), last(given.size()),
        rows(given.size()) {
    abreast = last ? std::min(C, W < 1024 ? ABREAST : 16) : 1;
    blocks = (C + abreast - 1) / abreast;
    const int64_t cells = last ? 512 : 2048;  // 128 and 8 kB of floats
    bands = (H + std::max<int64_t>(4, cells / W - 2) - 1) / std::max<int64_t>(4, cells / W - 2);
  }
  int64_t count() const { return N * blocks * bands; }
  Piece at(int64_t n, int64_t block, int64_t band) const {
    const int64_t channel = block * abreast, many = std::min(abreast, C - channel);
    if (bands == 1) return {n, channel, many, 0, H};
    const int64_t first = H * band / bands;
    return {n, channel, many, first, H * (band + 1) / bands - first};
  }
  // body(piece) for these, in the order of samples, blocks and bands
  template <class F> void each(int64_t begin, int64_t end, const F& body) const {
    int64_t n = begin / bands / blocks, block = begin / bands % blocks, band = begin % bands;
    for (int64_t i = begin; i < end; ++i) {
      body(at(n, block, band));
      if (++band < bands) continue;
      band = 0;
      if (++block < blocks) continue;
      block = 0;
      ++n;
    }
  }
};

// body(t) for the nine taps, t a constant
template <class F> [[gnu::always_inline]] inline void nine(const F& body) {
  [&]<int... t>(std::integer_sequence<int, t...>) {
    (body(std::integral_constant<int, t>()), ...);
  }(std::make_integer_sequence<int, 9>());
}

template <class V, class B> inline V where(B bits, V x) { return (V)((B)x & bits); }

template <class A> struct Window {
  using L = Lanes<A>;
  using V = typename L::vector;
  using Bits = decltype(V{} < V{});
  using Bit = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;
  static constexpr int MOST = ABREAST / L::width;  // vectors abreast
  const Pieces& maps;
  const int64_t vectors, aside, down;  // of a position; to the next position, and to the next row
  A* z;                                // where the rows of the piece begin
  Bit *left, *right;                   // 0 at the first, and at the last column; else all bits

  explicit Window(const Pieces& maps)
      : maps(maps), vectors((maps.abreast + L::width - 1) / L::width),
        aside(maps.last ? vectors * L::width : 1), down(maps.W * aside) {
    const int64_t W = maps.W, rows = (maps.H + maps.bands - 1) / maps.bands;
    const int64_t before = (down + aside + L::width - 1) / L::width * L::width;
    const int64_t after = (rows + 1) * down + aside + 2 * L::width;
    const int64_t columns = maps.last ? W : rows * W + L::width;
    z = lanes_of_thread.take<A>(before + after + 2 * columns) + before;
    left = reinterpret_cast<Bit*>(z + after);
    right = left + columns;
    std::fill(left, right + columns, Bit(-1));
    for (int64_t i = 0; i < columns; i += W) left[i] = 0;
    for (int64_t i = W - 1; i < columns; i += W) right[i] = 0;
  }

  int64_t vectors_of(const Piece& own) const {
    return maps.last ? (own.channels + L::width - 1) / L::width : 1;
  }

  // start + Σ_t k[t]·z[p + t]
  V around(const A* at, const V* k, V start, Bits l, Bits r) const {
    V before{}, after{};
    for (int row = 0; row < 3; ++row, k += 3) {
      const A* from = at + (row - 1) * down;
      before += k[0] * load(from - aside);
      start += k[1] * load(from);
      after += k[2] * load(from + aside);
    }
    return start + where(l, before) + where(r, after);
  }

  int64_t offset(const Piece& own, int64_t row) const {  // in memory
    if (maps.last) return (own.n * maps.H + row) * maps.W * maps.C + own.channel;
    return ((own.n * maps.C + own.channel) * maps.H + row) * maps.W;
  }

  // Lays down value(offset in memory, lanes, vector), of the rows and of those beside them.
  template <class F> void lay(const Piece& own, const F& value) const {
    const int64_t begin = std::max<int64_t>(own.first - 1, 0) - own.first;
    const int64_t end = std::min(own.first + own.rows + 1, maps.H) - own.first;
    const int64_t from = offset(own, own.first);
    clear(z - down - aside, z + begin * down);
    if (maps.last) {
      for (int64_t i = begin * maps.W; i < end * maps.W; ++i)
        for (int64_t j = 0, v = 0; j < own.channels; j += L::width, ++v)
          store(z + i * aside + j, value(from + i * maps.C + j, own.channels - j, v));
    } else {
      for (int64_t i = begin * maps.W; i < end * maps.W; i += L::width)
        store(z + i, value(from + i, end * maps.W - i, 0));
    }
    clear(z + end * down, z + (own.rows + 1) * down + aside + L::width);
  }

  static void clear(A* from, const A* to) {  // and some more
    for (; from < to; from += L::width) store(from, V{});
  }

  // body(place in the window, offset in memory, lanes, left, right) for each position; inline, so
  // that what it adds up stays in registers
  template <class F>
  [[gnu::always_inline]] void each(const Piece& own, int64_t v, const F& body) const {
    const std::integral_constant<int64_t, L::width> whole;
    const int64_t W = maps.W, rows = own.rows;
    const Bit *l = left, *r = right;
    const A* here = z + v * L::width;
    int64_t at = offset(own, own.first) + v * L::width;
    if (maps.last) {
      const int64_t C = maps.C, next = aside, rest = own.channels - v * L::width;
      auto each = [&](auto lanes) {
        for (int64_t i = 0; i < rows; ++i)
          for (int64_t j = 0; j < W; ++j, here += next, at += C)
            body(here, at, lanes, l[j] - Bits{}, r[j] - Bits{});
      };
      if (rest >= L::width) each(whole);
      else each(rest);
      return;
    }
    int64_t i = 0;
    auto take = [&](auto lanes) {
      Bits bits[2];
      std::memcpy(bits, l + i, sizeof *bits);
      std::memcpy(bits + 1, r + i, sizeof *bits);
      body(here + i, at + i, lanes, bits[0], bits[1]);
    };
    for (; i + L::width <= rows * W; i += L::width) take(whole);
    if (i < rows * W) take(rows * W - i);
  }
};

}  // namespace normkit
