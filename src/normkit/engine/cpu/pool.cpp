// Pool: y = γ·(x − mean)/√(var + ε) + β, with mean and variance of groups of channels, of the batch
// or of each sample; of a batch renormalization y = γ·((x − mean)·r/√(var + ε) + d) + β. Gradients
// are explained in families/pool.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "memory.h"
#include "pooling.h"

namespace normkit {

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

}  // namespace normkit
