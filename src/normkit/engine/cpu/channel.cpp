// Channel: a batch norm with γ and β, then a group norm of its output, from the moments of each
// sample: the group norm sees means a₁(m − mean) + β and variances a₁²v. Explained in
// families/channel.py.

#include <cmath>
#include <cstring>
#include <vector>

#include "memory.h"
#include "pooling.h"

namespace normkit {

namespace {

struct GroupAffine {  // one number a group, one a channel, or none
  Table table;
  int64_t D;
  bool of_group;
  double at(int64_t j, double other) const {
    return table ? table[of_group ? j / D : j] : other;
  }
};

}  // namespace

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
  // constants carry nothing from one sample to another, not even what is no number
  auto pooled = [&](double sum) { return constant ? 0 : sum / double(rows); };
  for (int64_t j = 0; j < C; ++j) {
    if (dweight) dweight.set(j, by_scale[j] * scale[j]);
    if (dbias) dbias.set(j, by_shift[j]);
    if (dgroup_weight && !of_group) dgroup_weight.set(j, by_own[j]);
    if (dgroup_bias && !of_group) dgroup_bias.set(j, by_bias[j]);
    const double gamma = or_one(weight, j);
    const double dvar = pooled(-0.5 * scale[j] * scale[j] * scale[j] * gamma * by_scale[j]);
    const double dmiddle = pooled(-a1[j] * by_shift[j]);
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

}  // namespace normkit
