// Fixed: y = γ·(x − mean)/√(var + ε) + β, with statistics that are given, as in eval mode.

#include <algorithm>
#include <cmath>

#include "tables.h"

namespace normkit {

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

}  // namespace normkit
