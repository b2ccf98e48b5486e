// Mix: y = γ·(x − M)/√(V + ε) + β, M and V mixtures of the statistics of each sample and channel,
// of each sample and of the batch, in shares that are softmaxes. Explained in families/mix.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "memory.h"
#include "pooling.h"

namespace normkit {

namespace {

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

}  // namespace

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
  // without a share of the batch nothing is carried between samples, not even what is no number
  auto pooled = [&](double sum) { return fixed || parts == 2 ? 0 : sum / double(rows); };
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) {
      const int64_t at = n * C + j;
      const double dbig_m = p.of[1] * sums[n] / double(C);
      const double dbig_v = q.of[1] * sums[rows + n] / double(C);
      const double dmiddle = pooled(p.of[2] * of_mean[j]), dspread = pooled(q.of[2] * of_var[j]);
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

}  // namespace normkit
