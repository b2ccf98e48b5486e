// Mean and variance of several cells together.
#pragma once
#include <cstdint>

namespace normkit {

// The pool of all rows of (rows, C): means times a factor a channel, variances as they are
inline void pool_rows(const double* mean, const double* var, int64_t rows, int64_t C,
                      const double* factor, double* middle, double* spread) {
  for (int64_t j = 0; j < C; ++j) middle[j] = spread[j] = 0;
  for (int64_t n = 1; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) middle[j] += mean[n * C + j] - mean[j];
  for (int64_t j = 0; j < C; ++j) middle[j] = mean[j] + middle[j] / double(rows);
  for (int64_t n = 0; n < rows; ++n)
    for (int64_t j = 0; j < C; ++j) {
      const double apart = (mean[n * C + j] - middle[j]) * (factor ? factor[j] : 1);
      spread[j] += var[n * C + j] + apart * apart;
    }
  for (int64_t j = 0; j < C; ++j) {
    spread[j] /= double(rows);
    if (factor) middle[j] *= factor[j];
  }
}

// The pool of D numbers side by side
inline void pool_run(const double* mean, const double* var, int64_t D, double& middle,
                     double& spread) {
  double sum = 0, square = 0;
  for (int64_t j = 1; j < D; ++j) sum += mean[j] - mean[0];
  middle = mean[0] + sum / double(D);
  for (int64_t j = 0; j < D; ++j) square += var[j] + (mean[j] - middle) * (mean[j] - middle);
  spread = square / double(D);
}

}  // namespace normkit
