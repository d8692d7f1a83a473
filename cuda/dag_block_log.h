// dag_block_log.h -- the likelihood of a row, in log space and double precision where needed.
//
// Mapping   One block of 256 threads per row. Together the threads bound the error of both sweeps;
//           where it is small, one thread writes the likelihood and the block is done. Otherwise
//           the block redoes alpha and beta target by target, one state per thread, without asking
//           the host. The redone sweeps replace the mantissas in memory, for the gradients.
// Numerics  As in dag_log.h, the largest term is found first, so no sum overflows or underflows.
// Cost      For an exact row, two sums of num_tiles * m terms each. Otherwise about m n^2 / 2
//           exponentials of doubles per sweep in one block: slow, but rarely needed.
#pragma once
#include "dag_block.h"

namespace dag {

constexpr double kImpossible = -INFINITY;

// log of the sum of e^term(k) over begin <= k < end, in two passes. NaN if a term is NaN; -inf if
// there are no terms, or all are -inf.
template <class Block, class Term>
DAG_FN double log_sum(Block& c, int begin, int end, Term term) {
  double peak = kImpossible, sum = 0;
  for (int k = begin; k < end; ++k) {
    const double x = term(k);
    if (x != x) return x;  // NaN, which the comparison below would miss
    peak = x > peak ? x : peak;
  }
  if (peak == kImpossible) return peak;
  for (int k = begin; k < end; ++k) sum += c.exp(term(k) - peak);
  return peak + c.log(sum);
}

// log alpha (own emission included) and log beta (not included): [m][n], -inf outside the cone.
template <class Real, class Block>
DAG_FN void sweep_in_log_space(Block& c, const Graph<Real>& g, double* alpha, double* beta) {
  const int64_t m = g.m, n = g.n;
  for (int i = 0; i < m; ++i) {
    for (int u = c.thread(); u < n; u += c.num_threads()) {
      double sum = kImpossible;
      if (i == 0 && u == 0) {
        sum = 0;
      } else if (i > 0 && u >= g.first(i) && u <= g.last(i)) {
        const double* before = alpha + (i - 1) * n;
        sum = log_sum(c, g.first(i - 1), smaller(u, g.last(i - 1) + 1),
                      [&](int v) { return before[v] + double(g.edge(v, u)); });
      }
      const bool is_read = u >= g.first(i) && u <= g.last(i);
      alpha[i * n + u] = is_read ? sum + double(g.emit(i, u)) : kImpossible;
    }
    c.sync();  // the next target reads this one
  }
  for (int i = m - 1; i >= 0; --i) {
    for (int v = c.thread(); v < n; v += c.num_threads()) {
      double sum = i == m - 1 && v == n - 1 ? 0 : kImpossible;
      if (i < m - 1 && v >= g.first(i) && v <= g.last(i)) {
        const double* after = beta + (i + 1) * n;
        sum = log_sum(c, larger(v + 1, g.first(i + 1)), g.last(i + 1) + 1, [&](int u) {
          return double(g.edge(v, u)) + double(g.emit(i + 1, u)) + after[u];
        });
      }
      beta[i * n + v] = sum;
    }
    c.sync();  // the previous target reads this one
  }
}

// Whether the sweeps give the likelihood to within rounding. Compares with the likelihood all that
// was added to either sweep, weighted with an upper bound of the other. All threads get the answer.
template <class Real, class Block>
DAG_FN bool is_exact(Block& c, const Walk& walk, const BlockSweep<Real>& alpha,
                     const BlockSweep<Real>& beta) {
  const int m = walk.m, nt = walk.num_tiles;
  const int total_exp = alpha.mass_exp[nt * int64_t(m) - 1];
  const Real total = alpha.mass[int64_t(m - 1) * walk.width() + walk.n - 1];
  if (total_exp == kNone || !(total > 0)) return false;
  // Fewer than four lifts are added to each of 32 states (dag_block_sweep.h); their reach in the
  // other direction is below 2^head in its units.
  const double most = scaled(4.0 * double(lift_of_emitted<Real>(walk.n)) * kTile,
                             Number<Real>::head);
  double added = 0;
  for (int64_t k = c.thread(); k < int64_t(nt) * m; k += c.num_threads()) {
    const int64_t back = int64_t(nt) * m - 1 - k;  // same target and tile, other direction
    const int a = alpha.lift_exp[k], to_end = beta.reach_exp[back];
    const int b = beta.lift_exp[back], from_start = alpha.reach_exp[k];
    if (a != kNone && to_end != kNone) added += scaled(most, a + to_end - total_exp);
    if (b != kNone && from_start != kNone) added += scaled(most, b + from_start - total_exp);
  }
  double* sums = c.template shared<double>();
  sums[c.thread()] = added;
  c.sync();  // 256 sums
  if (c.thread() < 16) {
    added = 0;
    for (int k = 0; k < kFinishThreads / 16; ++k) added += sums[c.thread() + 16 * k];
    sums[kFinishThreads + c.thread()] = added;
  }
  c.sync();  // 16 sums
  added = 0;
  for (int k = 0; k < 16; ++k) added += sums[kFinishThreads + k];
  return added < double(total) * Range<Real>::tolerance;
}

constexpr size_t kFinishBytes = (kFinishThreads + 16) * sizeof(double);

// The last step for row b: writes its log-likelihood, and to `info` how it was computed.
template <class Real, class Block>
DAG_FN void finish_row(Block& c, const Launch<Real>& all, int64_t b, Real* log_likelihood) {
  int status = kNoPath, shift = 0;
  double total = kImpossible;
  if (!all.has_good_counts(b)) {
    total = NAN;
  } else {
    const Real* of_sweeps = all.notes(b) + all.num_tiles();
    status = larger(int(of_sweeps[0]), int(of_sweeps[1]));
    const BlockSweep<Real> alpha = all.sweep(b, 0);
    const Walk walk = all.walk(b, false);
    if (status != kNoPath) shift = edge_shift(all, b).shift;
    if (status == kTiled && !is_exact(c, walk, alpha, all.sweep(b, 1))) status = kLogSpace;
    if (status == kTiled) {
      const Real mass = alpha.mass[int64_t(walk.m - 1) * walk.width() + walk.n - 1];
      const int64_t exponent = alpha.mass_exp[walk.num_tiles * int64_t(walk.m) - 1] +
                               int64_t(shift) * (walk.m - 1);
      total = c.log(double(mass)) + kLn2 * double(exponent);
    } else if (status == kLogSpace) {
      double* log_alpha = all.log_sweep(b, 0);
      sweep_in_log_space(c, all.graph(b), log_alpha, all.log_sweep(b, 1));
      total = log_alpha[int64_t(walk.m) * walk.n - 1];
      if (total == kImpossible) status = kNoPath;
    } else if (status == kNan) {
      total = NAN;
    }
  }
  if (c.thread() > 0) return;
  all.info[b * 2] = status;
  all.info[b * 2 + 1] = shift;
  log_likelihood[b] = Real(total);
}

}  // namespace dag
