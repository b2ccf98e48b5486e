// Gate: y = γ·s·(x' − mean)/√(var + ε) + β, a batch norm of x' = x + center·m times the gate
// s = sigmoid(gate_weight·p + gate_bias), with m the mean of a sample and p that of what the gate
// looks at. Explained in families/gate.py.

#include <cmath>
#include <cstring>
#include <vector>

#include "memory.h"
#include "pooling.h"

namespace normkit {

namespace {

inline double sigmoid(double z) { return 1 / (1 + std::exp(-z)); }

enum Source { OF_BATCH, GIVEN, BY_SCORE };
enum LooksAt { AT_NOTHING, AT_NORMALIZED, AT_INPUT };

}  // namespace

// tensors: moments, made, center, gate_weight, gate_bias, weight, bias, given mean and second,
// score, gates (N, C) or None, memory; made: the map (3, N, C), the moments (2, N, C), statistics
// (4, C) of the batch and those used, and 1 or 0: whether the batch was used
int gate_map_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), size = rows * C;
  const double eps = given.real(), tau = given.real();
  const int64_t source = given.size(), looks_at = given.size();
  const double* found = given.doubles();
  double* made = given.doubles();
  const Table center = given.table(), gate_weight = given.table(), gate_bias = given.table();
  const Table weight = given.table(), bias = given.table();
  const Table old_mean = given.table(), old_second = given.table(), score = given.table();
  const Table gates = given.table();
  const Memory memory(given);
  double* statistics = made + 5 * size;
  double* used = statistics + 2 * C;
  std::memcpy(made + 3 * size, found, 2 * size * sizeof(double));
  std::vector<double> factor(C, 1.0);
  for (int64_t j = 0; center && j < C; ++j) factor[j] += center[j];
  pool_rows(found, found + size, rows, C, factor.data(), statistics, statistics + C);
  const bool condensed = source == OF_BATCH || (source == BY_SCORE && score[0] > tau);
  used[2 * C] = condensed;
  for (int64_t j = 0; j < C; ++j) {
    used[j] = condensed ? statistics[j] : old_mean[j];
    used[C + j] = condensed ? statistics[C + j] : old_second[j];
    const double scale = 1 / std::sqrt(used[C + j] + eps), gamma = or_one(weight, j);
    const double by = or_zero(gate_weight, j), start = gate_bias[j], w = factor[j] - 1;
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      const double m = found[at];
      const double p = looks_at == AT_NORMALIZED ? (m * factor[j] - used[j]) * scale : m;
      const double s = sigmoid(looks_at == AT_NOTHING ? start : by * p + start);
      made[at] = gamma * s * scale;
      made[size + at] = or_zero(bias, j);
      made[2 * size + at] = center ? used[j] - w * m : used[j];
      if (gates) gates.set(at, s);
    }
  }
  return memory.enter(statistics, statistics + C, C, condensed, memory.weight);
}

// tensors: sums, made, center, gate_weight, gate_bias, weight, gradients of the gates, extra (2, N,
// C), and the gradients of weight, bias, gate_weight, gate_bias and center
int gate_gradient_kernel(const Call& call) {
  Arguments given{call};
  const int64_t rows = given.size(), C = given.size(), L = given.size(), size = rows * C;
  const double eps = given.real();
  const int64_t source = given.size(), looks_at = given.size();
  const double* da = given.doubles();
  const double* made = given.doubles();
  const Table center = given.table(), gate_weight = given.table(), gate_bias = given.table();
  const Table weight = given.table(), dgates = given.table();
  double* extra = given.doubles();
  const Table dweight = given.table(), dbias = given.table(), dgate_weight = given.table();
  const Table dgate_bias = given.table(), dcenter = given.table();
  const double* db = da + size;
  const double* mean = made + 3 * size;
  const double* used = made + 5 * size + 2 * C;
  const double pooled = source == GIVEN ? 0 : used[2 * C] / double(rows);  // if the batch was used
  for (int64_t j = 0; j < C; ++j) {
    const double middle = used[j], scale = 1 / std::sqrt(used[C + j] + eps);
    const double w = or_zero(center, j), gamma = or_one(weight, j);
    const double by = looks_at == AT_NOTHING ? 0 : gate_weight[j], start = gate_bias[j];
    double by_weight = 0, by_bias = 0, by_middle = 0, by_z = 0, by_zp = 0, by_p = 0, by_pa = 0;
    double by_m = 0;
    auto gate = [&](int64_t at, double& p) {
      p = looks_at == AT_NORMALIZED ? (mean[at] * (1 + w) - middle) * scale : mean[at];
      return sigmoid(looks_at == AT_NOTHING ? start : by * p + start);
    };
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      double p;
      const double s = gate(at, p);
      const double dz = (da[at] * gamma * scale + or_zero(dgates, at)) * s * (1 - s);
      by_bias += db[at];
      by_weight += da[at] * s;
      by_middle += gamma * s * scale * db[at];
      by_z += dz;
      by_m += mean[at];
      by_zp += dz * p;
      if (looks_at == AT_NORMALIZED) {
        by_p += dz * by;
        by_pa += dz * by * (mean[at] * (1 + w) - middle);
      }
    }
    const double dscale = gamma * by_weight + by_pa;
    // given statistics carry nothing from one sample to another, not even what is no number, and a
    // gate that looks at nothing carries nothing to its own
    const bool given_ones = pooled == 0;
    const double dmiddle = given_ones ? 0 : (-by_middle - scale * by_p) * pooled;
    const double dvar = given_ones ? 0 : -0.5 * scale * scale * scale * dscale * pooled;
    // where the statistics are the batch's, the factors of m sum to zero: about the mean of m, for
    // otherwise it would cancel
    const double about = given_ones ? 0 : by_m * pooled;
    double by_center = 0;
    for (int64_t n = 0; n < rows; ++n) {
      const int64_t at = n * C + j;
      double p;
      const double s = gate(at, p), m = mean[at];
      const double dz = (da[at] * gamma * scale + or_zero(dgates, at)) * s * (1 - s);
      const double dp = looks_at == AT_NOTHING ? 0 : dz * by;
      const double apart = m * (1 + w) - middle;
      // gradient of m' = (1 + w)·m
      double inner = given_ones ? 0 : 2 * dvar * apart + dmiddle;
      if (looks_at == AT_NORMALIZED) inner += dp * scale;
      const double added = gamma * s * scale * db[at];  // of what is added to x
      double dm = (1 + w) * inner + w * added;
      if (looks_at == AT_INPUT) dm += dp;
      by_center += (m - about) * (inner + added);
      const double slope = 2 * dvar / double(L);
      extra[at] = dm / double(L) - (given_ones ? 0 : apart * slope);
      extra[size + at] = slope;
    }
    if (dweight) dweight.set(j, by_weight * scale);
    if (dbias) dbias.set(j, by_bias);
    if (dgate_weight) dgate_weight.set(j, by_zp);
    if (dgate_bias) dgate_bias.set(j, by_z);
    if (dcenter) dcenter.set(j, by_center);
  }
  return 0;
}

}  // namespace normkit
