// dag_gradient.h -- posteriors from the two sweeps of dag_tiled.h, one tile of states at a time.
//
//   d log Z / d log P[i][u] = alpha[i][u] * beta[i][u] / Z
//   d log Z / d log E[v][u] = E[v][u] / Z * sum over i of alpha[i][v] * P[i+1][u] beta[i+1][u]
//
// (Beta does not include its own emission, as in Appendix I.1; I.2 omits the emission and the sum.)
// The second line is one matrix product per pair of tiles. The exponents are folded into beta's
// factor; `is_exact` and `room` keep each of them small enough that nothing overflows.
#pragma once
#include <algorithm>

#include "dag_tiled.h"

namespace dag {

// Writes the columns of a tile of the emission's gradient, for all M targets; weight is dL/d log Z.
template <class Real>
void grad_emission_tile(const Graph<Real>& g, const Walk& walk, const Sweep<Real>& alpha,
                        const Sweep<Real>& beta, double weight, int M, int tile, Real* grad) {
  constexpr int T = Simd<Real>::T;
  const int m = tile < walk.num_tiles ? g.m : 0, num_states = smaller(T, int(g.stride) - tile * T);
  const int total_exp = alpha.total_exp(walk);
  const Real scale = Real(weight / alpha.total(walk));
  for (int i = 0; i < M; ++i) {
    Vec<Real> here;
    if (i < m) {  // outside the cone the sweeps have exact zeros
      const int64_t from_start = int64_t(tile) * m + i;
      const int64_t to_end = int64_t(walk.num_tiles - 1 - tile) * m + m - 1 - i;
      const int a = alpha.mass_exp[from_start], b = beta.reach_exp[to_end];
      if (a != kNone && b != kNone) {
        here = load(alpha.mass[from_start].at) * turned_around<Real>(load(beta.reach[to_end].at)) *
               scale * power_of_two<Real>(a + b - total_exp);
      }
    }
    store_some<Real>(grad + i * g.stride + tile * T, num_states, here);
  }
}

// Working memory of grad_transition_tile, one per thread. Nothing in it is kept between calls.
template <class Real>
struct Joint {
  std::vector<Lanes<Real>> edges, beta;
};

// Adds to sum[r] the sum over i of alpha[i][r0 + r] * beta[i], where each comes from one tile.
template <int R, class Real>
inline void join(const Lanes<Real>* alpha, const Lanes<Real>* beta, int r0, int i0, int i1,
                 Vec<Real> (&sum)[R]) {
  for (int i = i0; i <= i1; ++i) {
    const Vec<Real> b = load(beta[i].at);
    for (int r = 0; r < R; ++r) sum[r] += b * alpha[i].at[r0 + r];
  }
}

// Writes the rows of tile_v of the transition's gradient, from the first column to the last.
template <class Real>
void grad_transition_tile(const Graph<Real>& g, const Walk& walk, int shift,
                          const Sweep<Real>& alpha, const Sweep<Real>& beta, double weight,
                          int tile_v, Joint<Real>* s, Real* grad) {
  constexpr int T = Simd<Real>::T;
  const int m = g.m, n = g.n, nt = walk.num_tiles, span = n - m, v0 = tile_v * T;
  const int total_exp = alpha.total_exp(walk), last = last_tile(g, tile_v);
  const int64_t ours = int64_t(tile_v) * m;
  const Real scale = Real(weight / alpha.total(walk)), room = power_of_two<Real>(Range<Real>::room);
  const int num_rows = smaller(T, int(g.stride) - v0), end = smaller(n, (last + 1) * T);
  for (int r = 0; r < num_rows; ++r) {
    Real* row = grad + (v0 + r) * g.stride;
    std::fill(row, row + v0, Real(0));
    std::fill(row + end, row + g.stride, Real(0));
  }
  s->beta.resize(m);
  if (int(s->edges.size()) < (last - tile_v + 1) * T) s->edges.resize((last - tile_v + 1) * T);
  pack_rows(g, shift, tile_v, s->edges.data());
  for (int tile_u = tile_v; tile_u <= last; ++tile_u) {
    const int u0 = tile_u * T;
    const int64_t theirs = int64_t(nt - 1 - tile_u) * m + m - 2;
    // In these rows alpha[i] is nonzero only for i in [v0 - span, v0 + T); likewise beta[i+1] in
    // the columns.
    int i0 = larger(0, larger(v0, u0 - 1) - span), i1 = smaller(m - 2, v0 + T - 1);
    const auto unit_of = [&](int i) {
      const int a = alpha.mass_exp[ours + i], b = beta.mass_exp[theirs - i];
      const int e = a + b - total_exp - Range<Real>::room;
      return a == kNone || b == kNone ? Real(0) : power_of_two<Real>(e);
    };
    while (i0 <= i1 && unit_of(i0) == 0) ++i0;
    while (i0 <= i1 && unit_of(i1) == 0) --i1;
    for (int i = i0; i <= i1; ++i) {
      store<Real>(s->beta[i].at, turned_around<Real>(load(beta.mass[theirs - i].at)) * unit_of(i));
    }
    constexpr int R = kParts == 1 ? T : 8 / kParts;  // the sums of R rows fit the registers
    for (int r0 = 0; r0 < num_rows; r0 += R) {
      Vec<Real> sum[R];
      join<R>(alpha.mass + ours, s->beta.data(), r0, i0, i1, sum);
      for (int r = r0; r < smaller(r0 + R, num_rows); ++r) {
        // Edges that do not exist are 0 in the block.
        const Vec<Real> edge = load(s->edges[(tile_u - tile_v) * T + r].at) * room * scale;
        store_some<Real>(grad + (v0 + r) * g.stride + u0, smaller(T, n - u0), sum[r - r0] * edge);
      }
    }
  }
}

}  // namespace dag
