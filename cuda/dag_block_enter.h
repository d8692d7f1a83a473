// dag_block_enter.h -- what enters a tile of states from all earlier tiles: a matrix product.
//
//   product[i][u] = sum over v before the tile of mass[i-1][v] * E[v][u]
//
// Mapping   Up to 128 targets (64 in double) x 32 states at once. Thread (tx, ty) holds 4 states of
//           the targets ty, ty + 32, ty + 64, ty + 96, so that all 8 warps have work whatever the
//           number of targets. Both factors pass through shared memory, 32 states v at a time;
//           while one pair of tiles is multiplied, the next is loaded into registers.
// Numerics  The product of a pair of tiles is scaled to the largest exponent that its target has in
//           any earlier tile. As the sums are scaled, not the masses, masses are copied as they
//           are. It takes two factors, since 2^-158 of the largest sum may still be a normal
//           number.
// Cost      For 4 states v of a pair of tiles, a thread does 4 + R wide reads of shared memory and
//           16 R multiply-adds, where R is the number of targets / 32, rounded up. Global reads
//           are whole rows of 32 states. Rows of shared memory are 36 numbers apart for wide
//           reads, and 33 where a lane owns a row, so that lanes access different banks.
#pragma once
#include "dag_block.h"

namespace dag {

// Targets per pass; half as many in double, to fit the 64 KiB of shared memory of small GPUs.
constexpr int kRows = 128;
template <class Real>
constexpr int kRowsOf = sizeof(Real) == 4 ? kRows : kRows / 2;
constexpr int kPadded = 36;  // row length of factors
constexpr int kStride = 33;  // row length where one lane walks along a row
constexpr int kWarps = kSweepThreads / kTile;

// Layout of the shared memory of a sweep.
template <class Real>
struct Shared {
  static constexpr int rows = kRowsOf<Real>;
  Real* edges;                          // [32][36]
  Real* from;                           // [rows][36] masses of the previous targets
  Real *product, *emission;             // [rows][33]
  Real* factor;                         // [2][rows] two factors that scale a pair's product
  Real* hand;                           // [slots][32] masses that a warp's last target passes on
  int32_t *hand_exp, *flags, *row_exp;  // [slots][32]; [2]: NaN found, huge found; [m]

  DAG_FN explicit Shared(Real* memory) {
    edges = memory;
    from = edges + kTile * kPadded;
    product = from + rows * kPadded;
    emission = product + rows * kStride;
    factor = emission + rows * kStride;
    hand = factor + 2 * rows;
    hand_exp = reinterpret_cast<int32_t*>(hand + 2 * rows);
    flags = hand_exp + 2 * rows;
    row_exp = flags + 2;
  }
  static constexpr size_t bytes(int64_t M) {
    const size_t reals = kTile * kPadded + rows * kPadded + 2 * rows * kStride + 4 * rows;
    return reals * sizeof(Real) + (2 * rows + 2 + M) * sizeof(int32_t);
  }
};
static_assert(Shared<float>::bytes(256) <= 64 << 10 && Shared<double>::bytes(256) <= 64 << 10,
              "256 targets fit the smallest GPUs");

// One thread's share of a pair of tiles on its way from global to shared memory.
template <class Real>
struct Pair {
  static constexpr int num_edges = kTile / kWarps, num_masses = kRowsOf<Real> / kWarps;
  Real edge[num_edges], mass[num_masses];
  int exp;
};

// Loads the scores of the edges from tile tv to tile t. Lanes follow memory, which runs backwards
// along v in the reversed direction.
template <class Real, class Block>
DAG_FN void load_edges(Block& c, const Graph<Real>& g, const Walk& walk, int tv, int t,
                       Pair<Real>* pair) {
  const int lane = c.thread() % kTile, warp = c.thread() / kTile, flip = walk.width() - 1;
#pragma unroll
  for (int k = 0; k < Pair<Real>::num_edges; ++k) {
    const int y = warp + kWarps * k;
    const int v = walk.reversed ? flip - (t * kTile + y) : tv * kTile + y;
    const int u = walk.reversed ? flip - (tv * kTile + lane) : t * kTile + lane;
    pair->edge[k] = v < u && u < g.n ? g.edge(v, u) : -Real(INFINITY);
  }
}

template <class Real, class Block>
DAG_FN void store_edges(Block& c, const Walk& walk, const Shared<Real>& sh, int shift,
                        const Pair<Real>& pair) {
  const int lane = c.thread() % kTile, warp = c.thread() / kTile;
#pragma unroll
  for (int k = 0; k < Pair<Real>::num_edges; ++k) {
    const int y = warp + kWarps * k;
    sh.edges[walk.reversed ? lane * kPadded + y : y * kPadded + lane] =
        exp_shifted(c, pair.edge[k], shift);
  }
}

// Loads the masses in tile tv of the targets that precede row .. row + num - 1.
template <class Real, class Block>
DAG_FN void load_masses(Block& c, const Walk& walk, const BlockSweep<Real>& sweep, int tv,
                        int row, int num, Pair<Real>* pair) {
  const int lane = c.thread() % kTile, warp = c.thread() / kTile;
#pragma unroll
  for (int k = 0; k < Pair<Real>::num_masses; ++k) {
    const int p = warp + kWarps * k, i = row + p - 1;
    pair->mass[k] = 0;
    if (p < num && i >= 0) {
      pair->mass[k] = sweep.mass[int64_t(i) * walk.width() + tv * kTile + lane];
    }
  }
  const int i = row + c.thread() - 1;
  pair->exp = c.thread() < num && i >= 0 ? sweep.mass_exp[int64_t(tv) * walk.m + i] : kNone;
}

template <class Real, class Block>
DAG_FN void store_masses(Block& c, const Shared<Real>& sh, int row, int num,
                         const Pair<Real>& pair) {
  const int lane = c.thread() % kTile, warp = c.thread() / kTile;
#pragma unroll
  for (int k = 0; k < Pair<Real>::num_masses; ++k) {
    const int p = warp + kWarps * k;
    if (p < num) sh.from[p * kPadded + lane] = pair.mass[k];
  }
  if (c.thread() >= num) return;
  const int e = pair.exp == kNone ? 0 : pair.exp - sh.row_exp[row + c.thread() - 1];
  const int first = in_range<Real>(e);
  sh.factor[c.thread()] = pair.exp == kNone ? Real(0) : two_to<Real>(first);
  sh.factor[sh.rows + c.thread()] = two_to<Real>(in_range<Real>(e - first));
}

// Adds a pair's product for R targets of this thread. Targets beyond the last are multiplied as
// well, but their sums are never used.
template <int R, class Real, class Block>
DAG_FN void multiply(Block& c, const Shared<Real>& sh, Real (*sum)[4]) {
  const int tx = c.thread() % 8, ty = c.thread() / 8;
  Real part[R][4] = {};
#pragma unroll 2
  for (int v = 0; v < kTile; v += 4) {
    Real edge[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) c.load4(edge[k], sh.edges + (v + k) * kPadded + tx * 4);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      Real mass[4];
      c.load4(mass, sh.from + (ty + kTile * r) * kPadded + v);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int q = 0; q < 4; ++q) part[r][q] += mass[k] * edge[k][q];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const Real first = sh.factor[ty + kTile * r], rest = sh.factor[sh.rows + ty + kTile * r];
    if (!(first > 0)) continue;  // no mass in that tile: what was read is undefined
#pragma unroll
    for (int q = 0; q < 4; ++q) sum[r][q] += part[r][q] * first * rest;
  }
}

// Loads the emission scores of the targets in tile t; -inf outside the cone, where nothing is read.
template <class Real, class Block>
DAG_FN void load_emission(Block& c, const Graph<Real>& g, const Walk& walk,
                          const Shared<Real>& sh, int t, int row, int num) {
  const int lane = c.thread() % kTile, warp = c.thread() / kTile;
  const int at = t * kTile + lane, u = walk.reversed ? walk.width() - 1 - at : at;
#pragma unroll
  for (int k = 0; k < Pair<Real>::num_masses; ++k) {
    const int p = warp + kWarps * k, i = row + p;
    if (p >= num) continue;
    const bool is_read = at >= walk.first(i) && at <= walk.last(i);
    sh.emission[p * kStride + lane] =
        is_read ? g.emit(walk.target(i), u) : -Real(INFINITY);
  }
}

// Puts into shared memory what the triangle of tile t needs: product, emissions, its own edges.
template <class Real, class Block>
DAG_FN void enter_tile(Block& c, const Graph<Real>& g, const Walk& walk,
                       const BlockSweep<Real>& sweep, const Shared<Real>& sh, int shift, int t,
                       int tile0, int row, int num) {
  constexpr int num_groups = kRowsOf<Real> / kTile;
  Pair<Real> pair;
  Real sum[num_groups][4] = {};
  load_edges(c, g, walk, tile0, t, &pair);
  if (tile0 < t) load_masses(c, walk, sweep, tile0, row, num, &pair);
  load_emission(c, g, walk, sh, t, row, num);
  for (int tv = tile0; tv < t; ++tv) {
    store_edges(c, walk, sh, shift, pair);
    store_masses(c, sh, row, num, pair);
    c.sync();  // the factors are there
    load_edges(c, g, walk, tv + 1, t, &pair);  // the last pair is the triangle's own
    if (tv + 1 < t) load_masses(c, walk, sweep, tv + 1, row, num, &pair);
    const int first_of_warp = c.thread() / kTile * 4;
    switch ((num - first_of_warp + kTile - 1) / kTile) {
      case 0: break;
      case 1: multiply<1>(c, sh, sum); break;
      case 2: multiply<2>(c, sh, sum); break;
      case 3: multiply<smaller(3, num_groups)>(c, sh, sum); break;
      default: multiply<num_groups>(c, sh, sum); break;
    }
    c.sync();  // this pair of tiles is no longer needed
  }
  store_edges(c, walk, sh, shift, pair);
  const int tx = c.thread() % 8, ty = c.thread() / 8;
#pragma unroll
  for (int r = 0; r < num_groups; ++r) {
#pragma unroll
    for (int q = 0; q < 4; ++q) sh.product[(ty + kTile * r) * kStride + tx * 4 + q] = sum[r][q];
  }
  c.sync();  // product, emission and edges are there
}

}  // namespace dag
