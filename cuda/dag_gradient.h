// dag_gradient.h -- posteriors from the two sweeps of dag_tiled.h, one tile of states at a time.
//
//   d log Z / d log P[i][u] = alpha[i][u] * beta[i][u] / Z
//   d log Z / d log E[v][u] = E[v][u] / Z * sum over i of alpha[i][v] * P[i+1][u] beta[i+1][u]
//
// (beta without its own emission, as in Appendix I.1; I.2 leaves the emission and the sum out.)
// The second line is one matrix product per pair of tiles. The exponents are folded into beta's
// operand; `is_exact` keeps each of them small enough that nothing overflows.
#pragma once
#include "dag_tiled.h"

namespace dag {

// Column block `tile` of the emission's gradient, all num_rows targets; weight is dL/d log Z.
template <class Real>
void grad_emission_tile(const Graph<Real>& g, const Walk& walk, const Sweep<Real>& alpha,
                        const Sweep<Real>& beta, double weight, int tile, Real* grad) {
  constexpr int T = Simd<Real>::T;
  const int m = g.m, nt = walk.num_tiles, width = walk.width(), u0 = tile * T;
  const int total_exp = alpha.mass_exp[m * nt - 1], num = smaller(T, g.n - u0);
  const double scale = weight / alpha.mass[int64_t(m - 1) * width + g.n - 1];
  for (int i = 0; i < m; ++i) {
    const int a = i * nt + tile, b = (m - 1 - i) * nt + nt - 1 - tile;
    if (alpha.mass_exp[a] == kNone || beta.reach_exp[b] == kNone) continue;
    const Real f = power_of_two<Real>(alpha.mass_exp[a] + beta.reach_exp[b] - total_exp);
    const Vec<Real> ours = load(alpha.mass + int64_t(i) * width + u0);
    const Real* theirs = beta.reach + int64_t(m - 1 - i) * width + (nt - 1 - tile) * T;
    const Vec<Real> posterior = ours * turned_around<Real>(load(theirs)) * Real(scale) * f;
    Real* out = grad + i * g.stride + u0;
    if (num == T) {
      store(out, posterior);
    } else {
      for (int q = 0; q < num; ++q) out[q] = posterior[q];
    }
  }
}

// sum over i of alpha[i][v0 + r] * P beta[i+1][u tile] for R states v; half a block at a time.
template <class Real, int R>
void join(const Walk& walk, const Sweep<Real>& alpha, const Sweep<Real>& beta, const Real* unit,
          int v0, int tile_u, int i0, int i1, Vec<Real>* sum) {
  constexpr int T = Simd<Real>::T;
  const int64_t width = walk.width();
  const Real* ours = alpha.mass + v0;
  const Real* theirs = beta.mass + (walk.num_tiles - 1 - tile_u) * T;
  for (int r = 0; r < R; ++r) sum[r] = Vec<Real>{};
  for (int i = i0; i <= i1; ++i) {
    const Vec<Real> b = turned_around<Real>(load(theirs + (walk.m - 2 - i) * width)) * unit[i];
    for (int r = 0; r < R; ++r) sum[r] += b * ours[i * width + r];
  }
}

// Rows tile_v of the transition's gradient, which must be zero before.
template <class Real>
void grad_transition_tile(const Graph<Real>& g, const Walk& walk, const EdgeScan& scan,
                          const Sweep<Real>& alpha, const Sweep<Real>& beta, double weight,
                          int tile_v, std::vector<Real>* unit, Real* grad) {
  constexpr int T = Simd<Real>::T, R = T;
  const int m = g.m, n = g.n, nt = walk.num_tiles, span = n - m, v0 = tile_v * T;
  const int total_exp = alpha.mass_exp[m * nt - 1];
  const Real total = alpha.mass[int64_t(m - 1) * walk.width() + n - 1];
  const Real scale = Real(weight / total);
  Real block[T * T];
  unit->resize(m);
  for (int tile_u = tile_v; tile_u < nt && tile_u * T <= v0 + T + span; ++tile_u) {
    const int u0 = tile_u * T, num = smaller(T, n - u0);
    // alpha[i] lives in the rows for i in [v0 - span, v0 + T), beta[i+1] in the columns likewise.
    const int i0 = larger(0, larger(v0, u0 - 1) - span);
    const int i1 = smaller(m - 2, v0 + T - 1);
    bool is_empty = true;
    for (int i = i0; i <= i1; ++i) {
      const int a = alpha.mass_exp[i * nt + tile_v];
      const int b = beta.mass_exp[(m - 2 - i) * nt + nt - 1 - tile_u];
      (*unit)[i] = a == kNone || b == kNone ? Real(0) : power_of_two<Real>(a + b - total_exp);
      is_empty &= (*unit)[i] == 0;
    }
    if (is_empty) continue;
    load_edges(g, scan.shift, tile_v, tile_u, block);
    for (int half = 0; half < T; half += R) {
      Vec<Real> sum[R];
      join<Real, R>(walk, alpha, beta, unit->data(), v0 + half, tile_u, i0, i1, sum);
      for (int r = 0; r < R && v0 + half + r < n - 1; ++r) {
        const int v = v0 + half + r;
        const Vec<Real> edge = load(block + (half + r) * T) * scale;
        Real* out = grad + v * g.stride + u0;
        if (num == T) {  // edges that do not exist are 0 in the block
          store<Real>(out, sum[r] * edge);
        } else {
          const Vec<Real> posterior = sum[r] * edge;
          for (int q = 0; q < num; ++q) out[q] = posterior[q];
        }
      }
    }
  }
}

}  // namespace dag
