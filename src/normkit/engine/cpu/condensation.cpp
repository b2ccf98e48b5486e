// The score of condensation: how alike the samples of a batch are,
// S = (‖Σ xₙ/‖xₙ‖‖² − n)/(n(n − 1)), the mean cosine of pairs.

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "tables.h"
#include "threads.h"

namespace normkit {

// score ← decay · score + (1 − decay) · factor · S of the first samples; tensors: x, moments, score
int score_kernel(const Call& call) {
  Arguments given{call, 1};
  const int64_t rows = given.size(), C = given.size(), L = given.size();
  const int64_t samples = given.size(), values = C * L;
  const double decay = given.real(), factor = given.real();
  const double* mean = given.doubles();
  const Table score = given.table();
  const double* var = mean + rows * C;
  double alike = 1;
  if (samples > 1) {
    std::vector<double> weights(samples), squares((values + BLOCK - 1) / BLOCK);
    for (int64_t n = 0; n < samples; ++n) {
      double square = 0;
      for (int64_t j = n * C; j < (n + 1) * C; ++j) square += var[j] + mean[j] * mean[j];
      weights[n] = square > 0 ? 1 / std::sqrt(square * double(L)) : 0;
    }
    by_type(call.type[0], [&](auto of) {
      using T = decltype(of);
      using A = wide<T>;
      const T* x = static_cast<T*>(call.at[0]);
      const int64_t blocks = int64_t(squares.size());
      share(call.threads, blocks, BLOCK * samples, [&](int64_t begin, int64_t end) {
        A* __restrict sum = lanes_of_thread.take<A>(BLOCK);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t k = std::min(BLOCK, values - i * BLOCK);
          std::fill(sum, sum + k, A(0));
          for (int64_t n = 0; n < samples; ++n) {
            const T* __restrict at = x + n * values + i * BLOCK;
            const A weight = A(weights[n]);
            for (int64_t d = 0; d < k; ++d) sum[d] += weight * up(at[d]);
          }
          double square = 0;
          for (int64_t d = 0; d < k; ++d) square += double(sum[d]) * sum[d];
          squares[i] = square;
        }
      });
    });
    double all = 0;
    for (double square : squares) all += square;
    const double n = double(samples);
    alike = (all - n) / (n * (n - 1));
  }
  const double old = score[0], mixed = decay * old + (1 - decay) * factor * alike;
  if (std::isfinite(mixed)) score.set(0, mixed);  // NaN would compare as not condensed for ever
  return 0;
}

}  // namespace normkit
