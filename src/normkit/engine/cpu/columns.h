// Channels last: how many positions are gone through at a time.
#pragma once
#include <algorithm>

#include "tables.h"
#include "threads.h"

namespace normkit {

// positions whose sums are added up before they go into a double; they stay in a near cache
inline int64_t span_of(int64_t C) { return std::clamp<int64_t>(8192 / C, 8, 256) / 4 * 4; }

// in how many parts the positions of a row are cut, so that all threads have something to do
inline int64_t cuts(const Shape& s, int threads) {
  if (threads < 2 || s.rows >= 2 * threads || s.rows * s.C * s.L < 2 * GRAIN) return 1;
  return std::min<int64_t>(s.L, (2 * threads + s.rows - 1) / s.rows);
}

}  // namespace normkit
