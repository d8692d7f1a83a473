// dag_log.h -- the recursion in log space and double precision, for scores of any size.
//
// Used for rows whose sweeps in rescaled probabilities are not exact (is_exact in dag_tiled.h), and
// for the best path. It takes about three exponentials per (target, edge): slow, but rarely needed.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "dag_graph.h"

namespace dag {

constexpr double kImpossible = -std::numeric_limits<double>::infinity();

// log of the sum of e^term(k) over begin <= k < end, in two passes. NaN if a term is NaN; -inf if
// there are no terms, or all are -inf.
template <class Term>
double log_sum(int begin, int end, Term term) {
  double peak = kImpossible, sum = 0;
  for (int k = begin; k < end; ++k) {
    const double x = term(k);
    if (x != x) return x;  // NaN, which the comparison below would miss
    peak = x > peak ? x : peak;
  }
  if (peak == kImpossible) return peak;
  for (int k = begin; k < end; ++k) sum += std::exp(term(k) - peak);
  return peak + std::log(sum);
}

// log alpha (own emission included) and log beta (not included): [m][n], -inf outside the cone.
template <class Real>
struct LogSweeps {
  std::vector<double> alpha, beta;
  double total;

  explicit LogSweeps(const Graph<Real>& g)
      : alpha(size_t(g.m) * g.n, kImpossible), beta(size_t(g.m) * g.n, kImpossible) {
    const int m = g.m, n = g.n;
    alpha[0] = g.emit(0, 0);
    for (int i = 1; i < m; ++i) {
      const double* before = &alpha[size_t(i - 1) * n];
      for (int u = g.first(i); u <= g.last(i); ++u) {
        const int begin = g.first(i - 1), end = smaller(u, g.last(i - 1) + 1);
        alpha[size_t(i) * n + u] =
            double(g.emit(i, u)) +
            log_sum(begin, end, [&](int v) { return before[v] + double(g.edge(v, u)); });
      }
    }
    beta[size_t(m) * n - 1] = 0;
    for (int i = m - 2; i >= 0; --i) {
      const double* after = &beta[size_t(i + 1) * n];
      for (int v = g.first(i); v <= g.last(i); ++v) {
        const int begin = larger(v + 1, g.first(i + 1)), end = g.last(i + 1) + 1;
        beta[size_t(i) * n + v] = log_sum(begin, end, [&](int u) {
          return double(g.edge(v, u)) + double(g.emit(i + 1, u)) + after[u];
        });
      }
    }
    total = alpha[size_t(m) * n - 1];
  }
};

// Writes both gradients. They must be zero on entry, and stay zero for a row without a path.
template <class Real>
void log_gradients(const Graph<Real>& g, double weight, Real* grad_emission,
                   Real* grad_transition) {
  const LogSweeps<Real> sweeps(g);
  if (sweeps.total == kImpossible) return;
  const int m = g.m, n = g.n;
  for (int i = 0; i < m; ++i) {
    const double* alpha = &sweeps.alpha[size_t(i) * n];
    const double* beta = &sweeps.beta[size_t(i) * n];
    for (int u = g.first(i); u <= g.last(i); ++u) {
      grad_emission[i * g.stride + u] = Real(weight * std::exp(alpha[u] + beta[u] - sweeps.total));
    }
  }
  std::vector<double> sum(n);
  for (int v = 0; v < n - 1; ++v) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (int i = larger(0, v - (n - m)); i <= smaller(v, m - 2); ++i) {
      const double here = sweeps.alpha[size_t(i) * n + v] - sweeps.total;
      if (here == kImpossible) continue;
      for (int u = larger(v + 1, g.first(i + 1)); u <= g.last(i + 1); ++u) {
        sum[u] += std::exp(here + double(g.edge(v, u)) + double(g.emit(i + 1, u)) +
                           sweeps.beta[size_t(i + 1) * n + u]);
      }
    }
    for (int u = v + 1; u < n; ++u) grad_transition[v * g.stride + u] = Real(weight * sum[u]);
  }
}

// Log-score of the best path (max in place of sum), which is written to path[0 .. m-1]. Of equal
// paths, compared from the end, the one with the earlier state wins. Without a path the result is
// -inf, with a NaN among the scores read it is NaN; neither writes to `path`.
template <class Real>
double best_path(const Graph<Real>& g, int64_t* path) {
  if (!g.may_have_path()) return kImpossible;
  const int m = g.m, n = g.n;
  std::vector<double> best(n, kImpossible), next(n);
  std::vector<int32_t> came_from(size_t(m) * n);
  best[0] = g.emit(0, 0);
  bool is_nan = best[0] != best[0];
  for (int i = 1; i < m; ++i) {
    int32_t* from = &came_from[size_t(i) * n];
    std::fill(next.begin(), next.end(), kImpossible);
    for (int v = g.first(i - 1); v <= g.last(i - 1); ++v) {
      const double here = best[v];
      for (int u = larger(v + 1, g.first(i)); u <= g.last(i); ++u) {
        const double score = here + double(g.edge(v, u));
        is_nan |= score != score;
        from[u] = score > next[u] ? v : from[u];
        next[u] = score > next[u] ? score : next[u];
      }
    }
    for (int u = g.first(i); u <= g.last(i); ++u) {
      next[u] += double(g.emit(i, u));
      is_nan |= next[u] != next[u];
    }
    best.swap(next);
  }
  if (is_nan) return std::numeric_limits<double>::quiet_NaN();
  const double score = best[n - 1];
  if (score == kImpossible) return score;
  for (int i = m - 1, u = n - 1; i >= 0; u = came_from[size_t(i) * n + u], --i) path[i] = u;
  return score;
}

}  // namespace dag
