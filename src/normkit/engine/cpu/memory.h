// Running statistics.
#pragma once
#include <cmath>

#include "tables.h"

namespace normkit {

struct Memory {
  Table mean, second, batches, nonfinite;
  double weight, correction;
  explicit Memory(Arguments& given)
      : mean(given.table()), second(given.table()), batches(given.table()),
        nonfinite(given.table()), weight(given.real()), correction(given.real()) {}

  // All of them, or none if one is not finite; whether it was.
  int enter(const double* new_mean, const double* new_second, int64_t size, bool wanted,
            double rate) const {
    if (!batches) return 0;
    auto fits = [](Table table, double x) {
      return table.type == FLOAT ? std::isfinite(float(x)) : std::isfinite(x);
    };
    bool finite = true;
    for (int64_t i = 0; i < size; ++i)
      finite &= fits(mean, new_mean[i]) && fits(second, new_second[i] * correction);
    if (!finite) {
      nonfinite.set(0, nonfinite[0] + 1);
      return 1;
    }
    batches.set(0, batches[0] + 1);
    for (int64_t i = 0; wanted && i < size; ++i) {
      mean.set(i, mean[i] + rate * (new_mean[i] - mean[i]));
      second.set(i, second[i] + rate * (new_second[i] * correction - second[i]));
    }
    return 0;
  }
};

}  // namespace normkit
