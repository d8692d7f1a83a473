// dag_block_viterbi.h -- the best path of one row by one thread block.
//
// Mapping   One block of 512 threads per row, one state per thread. Target by target, each state
//           goes through its possible predecessors in order, so neighbouring lanes read
//           neighbouring edges. One thread follows the path back, by nature a chain of M reads.
// Numerics  Sums are in double precision. As in dag_log.h, of equal paths, compared from the end,
//           the one with the earlier state wins. A NaN among the scores read gives NaN and no path.
// Cost      Reads the cone's edges once per target, from L2. Shared memory holds two rows of L
//           doubles, which limits L (14,000 states in 227 KiB).
#pragma once
#include "dag_block_log.h"

namespace dag {

inline size_t viterbi_bytes(int64_t L) { return (2 * L + 1) * sizeof(double); }

template <class Real, class Block>
DAG_FN void best_path(Block& c, const Launch<Real>& all, int64_t b, int64_t* path,
                      Real* log_score, int32_t* came_from) {
  for (int64_t i = c.thread(); i < all.M; i += c.num_threads()) path[i] = -1;
  const bool is_good = all.has_good_counts(b);
  if (!is_good || !all.graph(b).may_have_path()) {
    if (c.thread() == 0) *log_score = is_good ? Real(kImpossible) : Real(NAN);
    return;
  }
  const Graph<Real> g = all.graph(b);
  double* best = c.template shared<double>();
  double* next = best + all.L;
  int* is_nan = reinterpret_cast<int*>(next + all.L);
  if (c.thread() == 0) {
    *is_nan = 0;
    best[0] = g.emit(0, 0);
  }
  for (int i = 1; i < g.m; ++i) {
    c.sync();  // the previous target is there, and what it read may be overwritten
    bool saw_nan = false;
    for (int u = g.first(i) + c.thread(); u <= g.last(i); u += c.num_threads()) {
      double most = kImpossible;
      int from = -1;
      for (int v = g.first(i - 1); v <= smaller(u - 1, g.last(i - 1)); ++v) {
        const double score = best[v] + double(g.edge(v, u));
        saw_nan |= score != score;
        from = score > most ? v : from;
        most = score > most ? score : most;
      }
      most += double(g.emit(i, u));
      saw_nan |= most != most;
      next[u] = most;
      came_from[i * all.L + u] = from;
    }
    if (saw_nan) *is_nan = 1;  // several threads may write this same value
    double* const swapped = best;
    best = next;
    next = swapped;
  }
  if (c.thread() > 0) return;  // thread 0 wrote the last target's only state itself
  const double score = best[g.n - 1];
  const bool found_nan = *is_nan || score != score;
  *log_score = found_nan ? Real(NAN) : Real(score);
  if (found_nan || score == kImpossible) return;
  for (int i = g.m - 1, u = g.n - 1; i >= 0; u = i > 0 ? came_from[i * all.L + u] : 0, --i) {
    path[i] = u;
  }
}

}  // namespace dag
