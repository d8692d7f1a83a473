// dag_block_gradient.h -- posteriors, that is both gradients of a batch, in one launch.
//
//   d log Z / d log P[i][u] = alpha[i][u] * beta[i][u] / Z
//   d log Z / d log E[v][u] = E[v][u] / Z * sum over i of alpha[i][v] * P[i+1][u] beta[i+1][u]
//
// Mapping   Block (row, tile_v, tile_u) of 64 threads computes a 32 x 32 tile of the transition's
//           gradient, a matrix product over targets; a thread has 4 x 4 entries. The tile then
//           passes through shared memory, so that a warp reads edges and writes gradients in whole
//           rows. Further blocks, one per tile, compute 32 columns of the emission's gradient, two
//           targets at a time. Every entry is written by exactly one thread, with zeros where no
//           path goes and in the padding.
// Numerics  As in dag_gradient.h, the exponents of both sweeps are folded into beta's factor, and
//           is_exact and `room` keep each of them small enough. For a row redone in log space, the
//           same blocks sum the gradients from its doubles.
// Cost      Reads 8 KiB per 32 targets for 32,768 multiply-adds, from L2; writes M L + L^2
//           numbers per row, whole rows of 32 at a time, and reads E once.
#pragma once
#include "dag_block_log.h"

namespace dag {

constexpr int kFactorRow = 36;  // 32 states, padded: for wide reads, and different banks for lanes

template <class Real>
constexpr size_t gradient_bytes() {
  return (3 * kTile * kFactorRow + kTile) * sizeof(Real);
}

// What all gradients of a row share.
template <class Real>
struct Posterior {
  Graph<Real> g;
  Walk walk;
  BlockSweep<Real> alpha, beta;
  int status, shift;
  double weight;

  DAG_FN int total_exp() const { return alpha.mass_exp[walk.num_tiles * int64_t(walk.m) - 1]; }
  DAG_FN double total() const {
    return alpha.mass[int64_t(walk.m - 1) * walk.width() + walk.n - 1];
  }
  // Where beta, computed backwards, keeps target i, tile t; state q of the tile is at 31 - q there.
  DAG_FN int64_t beta_exp_at(int i, int t) const {
    return int64_t(walk.num_tiles - 1 - t) * walk.m + walk.m - 1 - i;
  }
  DAG_FN int64_t beta_at(int i, int t) const {
    return int64_t(walk.m - 1 - i) * walk.width() + (walk.num_tiles - 1 - t) * kTile;
  }
  // 2^(alpha's exponent + beta's - Z's - room); an exact 0 where that is not a normal number.
  DAG_FN Real unit(int a, int b, int room) const {
    if (a == kNone || b == kNone) return 0;
    const int e = a + b - total_exp() - room;
    return e < Range<Real>::smallest ? Real(0) : scaled(Real(1), e);
  }
};

template <class Real>
DAG_FN Posterior<Real> posterior_of(const Launch<Real>& all, int64_t b, const Real* weight) {
  return {all.graph(b),    all.walk(b, false),  all.sweep(b, 0),  all.sweep(b, 1),
          all.info[b * 2], all.info[b * 2 + 1], double(weight[b])};
}

// Writes the columns of a tile of the emission's gradient, for all M targets.
template <class Real, class Block>
DAG_FN void grad_emission_tile(Block& c, const Launch<Real>& all, int64_t b,
                               const Posterior<Real>& row, int tile, Real* grad) {
  const int lane = c.thread() % kTile, u = tile * kTile + lane, n = row.g.n, m = row.g.m;
  const double *log_alpha = all.log_sweep(b, 0), *log_beta = all.log_sweep(b, 1);
  const double scale = row.status == kTiled ? row.weight / row.total() : 0;
  for (int i = c.thread() / kTile; i < all.M; i += c.num_threads() / kTile) {
    if (u >= all.L) return;
    Real out = 0;
    const bool is_in_cone = row.status != kNoPath && i < m && u < n && u >= row.g.first(i) &&
                            u <= row.g.last(i);
    if (is_in_cone && row.status == kTiled) {
      const Real f = row.unit(row.alpha.mass_exp[int64_t(tile) * m + i],
                              row.beta.reach_exp[row.beta_exp_at(i, tile)], 0);
      const Real ours = row.alpha.mass[int64_t(i) * row.walk.width() + u];
      const Real theirs = row.beta.reach[row.beta_at(i, tile) + kTile - 1 - lane];
      if (f > 0) out = ours * theirs * Real(scale) * f;
    } else if (is_in_cone && row.status == kLogSpace) {
      const int64_t at = int64_t(i) * n + u;
      out = Real(row.weight *
                 c.exp(log_alpha[at] + log_beta[at] - log_alpha[int64_t(m) * n - 1]));
    } else if (is_in_cone) {
      out = Real(NAN);
    }
    grad[int64_t(i) * all.L + u] = out;
  }
}

// Writes the sum over targets of alpha[i][v] * P beta[i+1][u] to `product` in shared memory. Thread
// (tx, ty) has the states v = 4 ty .. 4 ty + 3 and u = 4 tx .. 4 tx + 3.
template <class Real, class Block>
DAG_FN void join(Block& c, const Posterior<Real>& row, int tile_v, int tile_u, int i0, int i1,
                 Real* product) {
  constexpr int num = kTile / (kGradientThreads / kTile);
  const int lane = c.thread() % kTile, half = c.thread() / kTile, m = row.g.m;
  const int tx = c.thread() % 8, ty = c.thread() / 8;
  Real* ours = product + kTile * kFactorRow;
  Real* theirs = ours + kTile * kFactorRow;
  Real* unit = theirs + kTile * kFactorRow;
  Real sum[4][4] = {};
  for (int first = i0; first <= i1; first += kTile) {
    Real a[num], b[num];
#pragma unroll
    for (int k = 0; k < num; ++k) {  // what is read is undefined where an exponent is kNone
      const int i = smaller(first + half + 2 * k, i1);
      a[k] = row.alpha.mass[int64_t(i) * row.walk.width() + tile_v * kTile + lane];
      b[k] = row.beta.mass[row.beta_at(i + 1, tile_u) + kTile - 1 - lane];
    }
    if (half == 0) {
      const int i = first + lane;
      unit[lane] = i > i1 ? Real(0)
                          : row.unit(row.alpha.mass_exp[int64_t(tile_v) * m + i],
                                     row.beta.mass_exp[row.beta_exp_at(i + 1, tile_u)],
                                     Range<Real>::room);
    }
    c.sync();  // the units are there, and the previous factors are no longer needed
#pragma unroll
    for (int k = 0; k < num; ++k) {
      const Real f = unit[half + 2 * k];
      ours[(half + 2 * k) * kFactorRow + lane] = f > 0 ? a[k] : Real(0);
      theirs[(half + 2 * k) * kFactorRow + lane] = f > 0 ? b[k] * f : Real(0);
    }
    c.sync();  // 32 targets are there
#pragma unroll 4
    for (int k = 0; k < kTile; ++k) {
      Real v[4], u[4];
      c.load4(v, ours + k * kFactorRow + ty * 4);
      c.load4(u, theirs + k * kFactorRow + tx * 4);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int q = 0; q < 4; ++q) sum[r][q] += v[r] * u[q];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) {
#pragma unroll
    for (int q = 0; q < 4; ++q) product[(ty * 4 + r) * kFactorRow + tx * 4 + q] = sum[r][q];
  }
  c.sync();  // the product is there
}

// Entry (v, u) of the transition's gradient, for a row redone in log space.
template <class Real, class Block>
DAG_FN Real grad_in_log_space(Block& c, const Launch<Real>& all, int64_t b,
                              const Posterior<Real>& row, int v, int u) {
  const Graph<Real>& g = row.g;
  const double *alpha = all.log_sweep(b, 0), *beta = all.log_sweep(b, 1);
  const double total = alpha[int64_t(g.m) * g.n - 1];
  double sum = 0;
  for (int i = larger(0, v - (g.n - g.m)); i <= smaller(v, g.m - 2); ++i) {
    const double here = alpha[int64_t(i) * g.n + v] - total;
    if (here == kImpossible || u < g.first(i + 1) || u > g.last(i + 1)) continue;
    sum += c.exp(here + double(g.edge(v, u)) + double(g.emit(i + 1, u)) +
                 beta[int64_t(i + 1) * g.n + u]);
  }
  return Real(row.weight * sum);
}

// Writes tile (tile_v, tile_u) of the transition's gradient.
template <class Real, class Block>
DAG_FN void grad_transition_tile(Block& c, const Launch<Real>& all, int64_t b,
                                 const Posterior<Real>& row, int tile_v, int tile_u,
                                 Real* grad) {
  const int m = row.g.m, n = row.g.n, span = n - m, v0 = tile_v * kTile, u0 = tile_u * kTile;
  const int lane = c.thread() % kTile, u = u0 + lane;
  const bool has_edges = row.status != kNoPath && tile_v <= tile_u && v0 < n - 1 && u0 < n;
  Real* product = c.template shared<Real>();
  Real scale = 0;
  if (has_edges && row.status == kTiled) {
    // In these rows alpha[i] is nonzero only for i in [v0 - span, v0 + 32); likewise beta[i+1] in
    // the columns.
    const int i0 = larger(0, larger(v0, u0 - 1) - span);
    const int i1 = smaller(m - 2, v0 + kTile - 1);
    join(c, row, tile_v, tile_u, i0, i1, product);
    scale = Real(row.weight / row.total());
  }
  for (int r = c.thread() / kTile; r < kTile; r += kGradientThreads / kTile) {
    const int v = v0 + r;
    if (v >= all.L || u >= all.L) return;
    Real out = 0;
    if (has_edges && v < u && u < n) {
      if (row.status == kTiled) {
        const Real edge = exp_shifted(c, row.g.edge(v, u), row.shift);
        out = product[r * kFactorRow + lane] *
              (edge * two_to<Real>(Range<Real>::room) * scale);
      } else if (row.status == kLogSpace) {
        out = grad_in_log_space(c, all, b, row, v, u);
      } else {
        out = Real(NAN);
      }
    }
    grad[v * all.L + u] = out;
  }
}

DAG_FN int64_t gradient_blocks(int64_t num_tiles) { return num_tiles * (num_tiles + 1); }

// Block `job` of row b: a tile of the transition's gradient, or of the emission's.
template <class Real, class Block>
DAG_FN void gradient_job(Block& c, const Launch<Real>& all, int64_t b, int job,
                         const Real* weight, Real* grad_emission, Real* grad_transition) {
  const int nt = all.num_tiles();
  const Posterior<Real> row = posterior_of(all, b, weight);
  if (job < nt * nt) {
    grad_transition_tile(c, all, b, row, job / nt, job % nt, grad_transition + b * all.L * all.L);
  } else {
    grad_emission_tile(c, all, b, row, job - nt * nt, grad_emission + b * all.M * all.L);
  }
}

}  // namespace dag
