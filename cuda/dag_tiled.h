// dag_tiled.h -- both sweeps of one row, tiled over states, in rescaled probabilities (CPU).
//
// Mapping   Edges only go forward, so all that enters a tile of T states from earlier tiles is one
//           matrix product over all targets; only the T x T triangle inside the tile runs target
//           by target. Each edge is read and exponentiated once instead of once per target.
// Numerics  Numbers are mantissa * 2^exponent with one exponent per (target, tile). No scale is
//           shared by a whole row, so rows of any length stay in range. Every edge is multiplied by
//           2^-edge_shift, and every path has m - 1 edges, so only log_total has to undo that
//           factor. What underflow may take away is added back as `lift` (dag_graph.h); `is_exact`
//           bounds the sum of all lifts afterwards.
// Cost      The cone is n - m states wide: about m (n - m) n / 2 multiply-adds and n^2 / 2
//           exponentials.
#pragma once
#include <cmath>

#include "dag_pack.h"

namespace dag {

// The numbers of one direction, in the order in which it computes them: [num_tiles][m].
template <class Real>
struct Sweep {
  Lanes<Real>* mass;   // after emission: alpha, or P * beta; below 2^head in its tile
  Lanes<Real>* reach;  // before emission: beta; null for alpha, where nothing needs it
  int *mass_exp, *reach_exp, *lift_exp;

  void clear(int64_t at) const {
    store<Real>(mass[at].at, Real(0));
    if (reach) store<Real>(reach[at].at, Real(0));
  }
  // If this is alpha, the mass of all paths: that of the last target in the last state.
  Real total(const Walk& walk) const {
    return mass[int64_t(walk.num_tiles) * walk.m - 1].at[(walk.n - 1) % walk.tile];
  }
  int total_exp(const Walk& walk) const { return mass_exp[int64_t(walk.num_tiles) * walk.m - 1]; }
};

// The lift of what a state has emitted: lift * 2^(3 head), see dag_graph.h.
template <class Real>
Real lift_of_emitted(int n) {
  return 8 * Real(n) * power_of_two<Real>(Range<Real>::smallest + 2 * Simd<Real>::head);
}

// One direction of a row: its results, its working memory, and its position inside a tile.
template <class Real>
struct Way {
  Walk walk;
  Sweep<Real> out;
  std::vector<Lanes<Real>> turned, product;
  std::vector<const Lanes<Real>*> block;  // edges from each earlier tile to this one, and inside it
  std::vector<int> row_exp, product_exp;
  int i0, i1;                             // the targets whose cone meets the tile
  int before_exp;                         // mass exponent of the previous target in this tile

  void begin(const Walk& of_walk, const Sweep<Real>& of_out) {
    walk = of_walk, out = of_out;
    if (walk.reversed) turned.resize(walk.width());
    block.resize(walk.num_tiles);
    product.resize(walk.m);
    row_exp.assign(walk.m, kNone);
    product_exp.assign(walk.m, kNone);
  }

  void begin_tile(int t) {
    constexpr int T = Simd<Real>::T;
    i0 = 0, i1 = walk.m - 1, before_exp = kNone;
    while (i0 < walk.m && walk.last(i0) < t * T) ++i0;
    while (i1 >= i0 && walk.first(i1) > t * T + T - 1) --i1;
    for (int i = 0; i < walk.m; ++i) {
      if (i < i0 || i > i1) out.clear(int64_t(t) * walk.m + i);
    }
  }
};

// Finds the blocks of edges that lead to tile t; in the reversed direction they are transposed
// about their antidiagonals.
template <class Real>
void find_blocks(const Packed<Real>& packed, int tile0, int t, Way<Real>* way) {
  constexpr int T = Simd<Real>::T;
  const Walk& walk = way->walk;
  for (int tv = tile0; tv <= t; ++tv) {
    if (!walk.reversed) {
      way->block[tv] = packed.block(tv, t);
    } else {
      Lanes<Real>* turned = &way->turned[tv * T];
      turn_about_antidiagonal(packed.block(walk.memory_tile(t), walk.memory_tile(tv)), turned);
      way->block[tv] = turned;
    }
  }
}

// For R targets, product[i] = sum over v before tile t of mass[i-1][v] E[v][tile t], in units
// 2^product_exp[i]. Each earlier tile is summed in its own units first, so that its scale costs one
// multiplication per target, and nothing is rescaled in memory.
template <int R, class Real>
void enter_targets(int t, int tile0, int i, Way<Real>* way) {
  using S = Simd<Real>;
  constexpr int T = S::T, least = Range<Real>::smallest;
  const Walk& walk = way->walk;
  const int first = larger(tile0, walk.first(i - 1) / T);
  const int last = smaller(t - 1, walk.last(i + R - 2) / T);
  const int* unit = &way->row_exp[i - 1];
  Vec<Real> sum[R] = {};
  for (int tv = first; tv <= last; ++tv) {
    const Lanes<Real>* edge = way->block[tv];
    const int64_t at = int64_t(tv) * walk.m + i - 1;
    const Lanes<Real>* mass = way->out.mass + at;
    const int* exp = way->out.mass_exp + at;
    Vec<Real> of_tile[R] = {};
    for (int q = 0; q < T; ++q) {
      const Vec<Real> e = load(edge[q].at);
      for (int r = 0; r < R; ++r) of_tile[r] += e * mass[r].at[q];
    }
    BitsOf<Real> bits[R];
    bool is_tiny = false;  // whether a scale is below the normal numbers, yet not of an exact zero
    for (int r = 0; r < R; ++r) {
      const int e = exp[r] - unit[r];
      is_tiny |= (e < least) & (e >= 2 * least);
      bits[r] = e < least ? 0 : BitsOf<Real>(e + S::bias) << S::mantissa_bits;
    }
    Real scale[R];
    std::memcpy(scale, bits, sizeof scale);
    for (int r = 0; r < R; ++r) sum[r] += of_tile[r] * scale[r];
    if (!is_tiny) continue;
    for (int r = 0; r < R; ++r) {
      if (scale[r] == 0) sum[r] += scaled<Real>(of_tile[r], exp[r] - unit[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    way->product_exp[i + r] = unit[r];
    store<Real>(way->product[i + r].at, sum[r]);
  }
}

// The same for targets i0..i1, R at a time; the last R may include targets that were done before.
template <int R = kParts == 1 ? 8 : 12 / kParts, class Real>
void enter_from_earlier_tiles(int t, int tile0, int i0, int i1, Way<Real>* way) {
  if (i1 - i0 + 1 >= R) {
    for (int i = i0; i <= i1; i += R) enter_targets<R>(t, tile0, smaller(i, i1 - R + 1), way);
  } else if constexpr (R > 1) {
    enter_from_earlier_tiles<R / 2>(t, tile0, i0, i1, way);
  }
}

// Computes target i in tile t, from what enters from earlier tiles and, through the triangle, from
// tile t itself.
template <class Real>
inline __attribute__((always_inline)) void walk_through_tile(const Packed<Real>& packed,
                                                             Way<Real>* way, int t, int i) {
  using S = Simd<Real>;
  constexpr int T = S::T;
  const Walk& walk = way->walk;
  const Sweep<Real>& out = way->out;
  const int64_t at = int64_t(t) * walk.m + i;
  const int target = walk.target(i), tile = walk.memory_tile(t), before_exp = way->before_exp;
  const int64_t emission_at = int64_t(tile) * walk.m + target;
  const int emission_exp = packed.emission_exp[emission_at];
  const int product_exp = way->product_exp[i];
  const int unit = i == 0 ? 0 : larger(product_exp, before_exp);
  if (unit == kNone || emission_exp == kNone) {
    way->before_exp = kNone;
    out.clear(at);
    return;
  }
  Vec<Real> emission = load(packed.emission[emission_at].at);
  if (walk.reversed) emission = turned_around<Real>(emission);
  const Vec<Real> lift = select<Real>(0 < emission, lift_of_emitted<Real>(walk.n), 0);
  Vec<Real> reach;
  if (i == 0) {
    reach = select<Real>(lanes<Real>() != walk.start() - t * T, 0, 1);
  } else {
    reach = lift * power_of_two<Real>(-S::head);
    if (product_exp != kNone) {
      reach += scaled<Real>(load(way->product[i].at), product_exp - unit);
    }
    if (before_exp != kNone) {
      const Lanes<Real>* edge = way->block[t];
      const Real* mass = out.mass[at - 1].at;  // just written, still on its way to memory
      Vec<Real> sum[4] = {};
      for (int q = 0; q < T; ++q) sum[q % 4] += load(edge[q].at) * mass[q];
      reach += scaled<Real>((sum[0] + sum[1]) + (sum[2] + sum[3]), before_exp - unit);
    }
  }
  const int reach_shift = exponent_of_largest<Real>(reach) - S::head;
  out.reach_exp[at] = unit + reach_shift;
  if (out.reach) store<Real>(out.reach[at].at, reach * power_of_two<Real>(-reach_shift));
  Vec<Real> mass = reach * emission;
  if (i > 0) mass += lift;
  const int shift = exponent_of_largest<Real>(mass) - S::head;
  store<Real>(out.mass[at].at, mass * power_of_two<Real>(-shift));
  out.lift_exp[at] = i == 0 ? kNone : unit + emission_exp;
  out.mass_exp[at] = way->before_exp = unit + emission_exp + shift;
  way->row_exp[i] = larger(way->row_exp[i], way->before_exp);
}

// Sweeps one or both directions of a row. Both run in step, as neither fills the processor's
// pipelines by itself. The exponents of their sweeps must be kNone on entry. If the result is
// kTiled, all mantissas are written; whether they are exact is for is_exact to tell.
template <int D, class Real>
Status sweep_tiles(const Graph<Real>& g, const EdgeScan& scan, Packed<Real>* packed,
                   Way<Real> (&ways)[D]) {
  constexpr int T = Simd<Real>::T;
  const int num_tiles = ways[0].walk.num_tiles, span = g.n - g.m;
  packed->pack_emissions(g, num_tiles);
  if (scan.is_nan || packed->is_nan) return kNan;
  if (scan.is_huge || packed->is_huge) return kLogSpace;
  packed->pack_edges(g, scan.shift);
  for (int t = 0; t < num_tiles; ++t) {
    int most = 0;
    for (Way<Real>& way : ways) {
      way.begin_tile(t);
      most = larger(most, way.i1 - way.i0 + 1);
      if (way.i0 > way.i1) continue;
      const int tile0 = larger(way.walk.start(), t * T - 1 - span) / T;
      find_blocks(*packed, tile0, t, &way);
      enter_from_earlier_tiles(t, tile0, larger(way.i0, 1), way.i1, &way);
    }
    for (int k = 0; k < most; ++k) {
      for (Way<Real>& way : ways) {
        if (way.i0 + k <= way.i1) walk_through_tile(*packed, &way, t, way.i0 + k);
      }
    }
  }
  return kTiled;
}

// Whether the two sweeps give the likelihood to within rounding. Compares with the likelihood all
// that was added to either sweep, weighted with an upper bound of the other direction.
template <class Real>
bool is_exact(const Walk& walk, const Sweep<Real>& alpha, const Sweep<Real>& beta) {
  const int m = walk.m, nt = walk.num_tiles;
  const int total_exp = alpha.total_exp(walk);
  const Real total = alpha.total(walk);
  if (total_exp == kNone || !(total > 0)) return false;
  // A lift is added twice to each of the T states of a tile; their reach in the other direction is
  // below 2^head in its units.
  const double most = std::ldexp(2.0 * lift_of_emitted<Real>(walk.n) * walk.tile, Simd<Real>::head);
  // Weights are cut at 2^1000: that is more than any likelihood tolerates, and cannot overflow.
  const auto power = [&](int e) { return power_of_two<double>(smaller(e - total_exp, 1000)); };
  double sum = 0;
  for (int t = 0; t < nt; ++t) {
    for (int i = 0; i < m; ++i) {
      const int a = t * m + i, b = (nt - 1 - t) * m + m - 1 - i;
      if (alpha.lift_exp[a] != kNone && beta.reach_exp[b] != kNone) {
        sum += power(alpha.lift_exp[a] + beta.reach_exp[b]);
      }
      if (beta.lift_exp[b] != kNone && alpha.reach_exp[a] != kNone) {
        sum += power(beta.lift_exp[b] + alpha.reach_exp[a]);
      }
    }
  }
  return most * sum < double(total) * Range<Real>::tolerance;
}

template <class Real>
double log_total(const Walk& walk, const EdgeScan& scan, const Sweep<Real>& alpha) {
  const int64_t exponent = alpha.total_exp(walk) + int64_t(scan.shift) * (walk.m - 1);
  return std::log(double(alpha.total(walk))) + kLn2 * double(exponent);
}

}  // namespace dag
