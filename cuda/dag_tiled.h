// dag_tiled.h -- both sweeps of one row, tiled over states, in rescaled probabilities (CPU).
//
// Mapping   Edges go forward, so all that enters a tile of T states from earlier tiles is one
//           matrix product over all targets; only the T x T triangle inside the tile runs target
//           by target. Each edge is read and exponentiated once instead of once per target.
// Numerics  mantissa * 2^exponent per (target, tile): no scale is shared by a whole row, so the
//           range has no limit in length. Every edge carries 2^-edge_shift and every path has
//           m - 1 edges, so that factor meets the likelihood only. What underflow may take away
//           is added back as `lift` (dag_graph.h); `is_exact` bounds the sum of it afterwards.
// Cost      (n - m)-wide cone, about m (n - m) n / 2 multiply-adds and n^2 / 2 exponentials.
#pragma once
#include <cmath>
#include <vector>

#include "dag_simd.h"

namespace dag {

// One direction's numbers, in the order of its walk: [m][num_tiles], mantissas [m][width].
template <class Real>
struct Sweep {
  Real* mass;      // entered and emitted: alpha, or P * beta; below 2^head in its tile
  Real* reach;     // entered, not yet emitted: beta; null where nobody needs it
  int *mass_exp, *reach_exp, *lift_exp;

  void clear(int i, int t, int width) const {
    const int64_t at = int64_t(i) * width + t * Simd<Real>::T;
    store<Real>(mass + at, Vec<Real>{});
    if (reach) store<Real>(reach + at, Vec<Real>{});
  }
};

// lift * 2^(3 head), see dag_graph.h.
template <class Real>
Real lift_of_emitted(int n) {
  return 8 * Real(n) * power_of_two<Real>(Range<Real>::smallest + 2 * Simd<Real>::head);
}

struct EdgeScan {
  int shift;
  bool is_nan, is_huge;
};

// The largest edge of a row, and whether any is NaN or too large for exponents.
template <class Real>
EdgeScan scan_edges(const Graph<Real>& g) {
  constexpr int T = Simd<Real>::T;
  Vec<Real> peak_T = Vec<Real>{} - Real(INFINITY);
  typename Simd<Real>::Int nan_T{};
  Real peak = -Real(INFINITY);
  bool is_nan = false;
  for (int v = 0; v < g.n - 1; ++v) {
    const Real* row = g.transition + v * g.stride;
    int u = v + 1;
    for (; u + T <= g.n; u += T) {
      const Vec<Real> x = load(row + u);
      nan_T |= x != x;
      peak_T = x > peak_T ? x : peak_T;
    }
    for (; u < g.n; ++u) {
      is_nan |= row[u] != row[u];
      peak = row[u] > peak ? row[u] : peak;
    }
  }
  is_nan |= any<Real>(nan_T);
  peak = peak > largest<Real>(peak_T) ? peak : largest<Real>(peak_T);
  if (peak == -Real(INFINITY)) return {1, is_nan, false};
  const double limit = score_limit(g.m);
  if (!(peak < limit && peak > -limit)) return {1, is_nan, true};
  return {shift_of<Real>(peak), is_nan, false};
}

// E of a T x T block as it lies in memory, times 2^-shift; 0 where there is no edge v < u < n.
template <class Real>
void load_edges(const Graph<Real>& g, int shift, int tile_v, int tile_u, Real* block) {
  constexpr int T = Simd<Real>::T;
  const int u0 = tile_u * T, num = smaller(T, g.n - u0);
  if (tile_v < tile_u && num == T) {
    const Real* from = g.transition + int64_t(tile_v) * T * g.stride + u0;
    for (int r = 0; r < T; ++r) {
      store(block + r * T, exp_shifted<Real>(load(from + r * g.stride), shift));
    }
    return;
  }
  for (int r = 0; r < T; ++r) {  // the triangle, or the last tile
    const int v = tile_v * T + r;
    if (v >= g.n - 1) {
      store<Real>(block + r * T, Vec<Real>{});
    } else {
      const Vec<Real> score = load_some(g.transition + v * g.stride + u0, num);
      const Vec<Real> impossible = Vec<Real>{} - Real(INFINITY);
      const auto is_edge = lanes<Real>() > v - u0;
      store(block + r * T, exp_shifted<Real>(is_edge ? score : impossible, shift));
    }
  }
}

// The same block as the walk meets it: turned about its antidiagonal when walked backwards.
template <class Real>
void pack_edges(const Graph<Real>& g, const Walk& walk, int shift, int from, int to, Real* out) {
  if (!walk.reversed) return load_edges(g, shift, from, to, out);
  load_edges(g, shift, walk.memory_tile(to), walk.memory_tile(from), out);
  turn_about_antidiagonal(out);
}

// Emissions of one target in one tile, -inf outside the cone.
template <class Real>
Vec<Real> load_emission(const Graph<Real>& g, const Walk& walk, int i, int t) {
  constexpr int T = Simd<Real>::T;
  const int u0 = walk.memory_tile(t) * T, begin = t * T;
  const Real* from = g.emission + walk.target(i) * g.stride + u0;
  __builtin_prefetch(from + (walk.reversed ? -T : T));  // of the next tile, a row apart each
  Vec<Real> score = u0 + T <= g.n ? load(from) : load_some(from, g.n - u0);
  if (walk.reversed) score = turned_around<Real>(score);
  const int low = walk.first(i) - begin, high = walk.last(i) - begin;
  if (low <= 0 && high >= T - 1) return score;
  const auto is_in_cone = (lanes<Real>() >= low) & (lanes<Real>() <= high);
  return is_in_cone ? score : Vec<Real>{} - Real(INFINITY);
}

// Memory of one sweep that outlives no call; one per thread.
template <class Real>
struct Scratch {
  std::vector<Real> edges, product, emission, lift;
  std::vector<int> row_exp, product_exp, emission_exp;

  void fit(const Walk& walk) {
    const size_t m = walk.m, wide = size_t(walk.m) * walk.tile;
    edges.resize(size_t(walk.width()) * walk.tile);
    product.resize(wide);
    emission.resize(wide);
    lift.resize(wide);
    row_exp.assign(m, kNone);
    product_exp.resize(m);
    emission_exp.resize(m);
  }
};

// product[i] = sum over v before tile t of mass[i-1][v] E[v][tile t], in units 2^product_exp[i].
// Summed within an earlier tile first, in the units of that tile: then a scale costs one
// multiplication per tile, and nothing is rescaled in memory.
template <class Real>
void enter_from_earlier_tiles(const Walk& walk, const Sweep<Real>& out, int t, int tile0, int i0,
                              int i1, Scratch<Real>* s) {
  constexpr int T = Simd<Real>::T, R = 8;
  const int64_t width = walk.width();
  const Real* edges = s->edges.data() - int64_t(tile0) * T * T;
  for (int i = i0; i <= i1; i += R) {
    const int num = smaller(R, i1 - i + 1);
    const int v0 = larger(tile0 * T, walk.first(i - 1));
    const int v1 = smaller(t * T - 1, walk.last(i + num - 2));
    Vec<Real> sum[R] = {};
    for (int tv = v0 / T; tv * T <= v1; ++tv) {
      const int begin = larger(v0, tv * T), end = smaller(v1, tv * T + T - 1);
      const Real* mass = out.mass + (i - 1) * width;
      Vec<Real> of_tile[R] = {};
      if (num == R) {
        for (int v = begin; v <= end; ++v) {
          const Vec<Real> e = load(edges + int64_t(v) * T);
          for (int r = 0; r < R; ++r) of_tile[r] += e * mass[r * width + v];
        }
      } else {
        for (int r = 0; r < num; ++r) {
          for (int v = begin; v <= end; ++v) {
            of_tile[r] += load(edges + int64_t(v) * T) * mass[r * width + v];
          }
        }
      }
      for (int r = 0; r < num; ++r) {
        const int e = out.mass_exp[(i - 1 + r) * walk.num_tiles + tv];
        if (e != kNone) sum[r] += scaled<Real>(of_tile[r], e - s->row_exp[i - 1 + r]);
      }
    }
    for (int r = 0; r < num; ++r) {
      s->product_exp[i + r] = s->row_exp[i - 1 + r];
      store<Real>(&s->product[(i + r) * T], sum[r]);
    }
  }
}

// Emission probabilities of the tile, below 2^head in units 2^emission_exp[i], and the lift of
// what has been emitted, where a state may emit at all.
template <class Real>
void emit_in_tile(const Graph<Real>& g, const Walk& walk, int t, int i0, int i1,
                  Scratch<Real>* s, bool* is_nan, bool* is_huge) {
  constexpr int T = Simd<Real>::T;
  const Vec<Real> impossible = Vec<Real>{} - Real(INFINITY);
  const Vec<Real> lifted = Vec<Real>{} + lift_of_emitted<Real>(walk.n);
  const double limit = score_limit(g.m);
  Int<Real> nan_T{};
  for (int i = i0; i <= i1; ++i) {
    const Vec<Real> score = load_emission(g, walk, i, t);
    nan_T |= score != score;
    const Real peak = largest<Real>(score);
    if (peak == -Real(INFINITY)) {
      s->emission_exp[i] = kNone;
      continue;
    }
    if (!(peak < limit && peak > -limit)) {  // NaN too
      *is_huge = true;
      continue;
    }
    s->emission_exp[i] = shift_of<Real>(peak);
    store<Real>(&s->emission[i * T], exp_shifted<Real>(score, s->emission_exp[i]));
    store<Real>(&s->lift[i * T], score > impossible ? lifted : Vec<Real>{});
  }
  *is_nan |= any<Real>(nan_T);
}

// The triangle inside tile t, target by target.
template <class Real>
void walk_through_tile(const Walk& walk, const Sweep<Real>& out, int t, int i0, int i1,
                       Scratch<Real>* s) {
  using S = Simd<Real>;
  constexpr int T = S::T;
  const int nt = walk.num_tiles, width = walk.width();
  const int tile0_edges = int(s->edges.size()) - T * T;  // the triangle is kept at the end
  Vec<Real> edge[T];
  for (int q = 0; q < T; ++q) edge[q] = load(&s->edges[tile0_edges + q * T]);
  Vec<Real> before{};  // mass of target i - 1 in this tile
  int before_exp = kNone;
  for (int i = i0; i <= i1; ++i) {
    const int64_t at = int64_t(i) * nt + t;
    int unit = i == 0 ? 0 : larger(s->product_exp[i], before_exp);
    if (unit == kNone || s->emission_exp[i] == kNone) {
      before = Vec<Real>{};
      before_exp = kNone;
      out.clear(i, t, width);
      continue;
    }
    Vec<Real> reach{}, other{};
    const Vec<Real> lift = load(&s->lift[i * T]);
    if (i == 0) {
      reach[walk.start() - t * T] = 1;
    } else {
      if (s->product_exp[i] != kNone) {
        reach = scaled<Real>(load(&s->product[i * T]), s->product_exp[i] - unit);
      }
      if (before_exp != kNone) {
        const Vec<Real> from = scaled<Real>(before, before_exp - unit);
        for (int q = 0; q < T; q += 2) {
          reach += edge[q] * from[q];
          other += edge[q + 1] * from[q + 1];
        }
      }
      reach += other + lift * power_of_two<Real>(-S::head);
    }
    const int reach_shift = exponent_of(largest<Real>(reach)) - S::head;
    out.reach_exp[at] = unit + reach_shift;
    if (out.reach) {
      store<Real>(out.reach + int64_t(i) * width + t * T,
                  reach * power_of_two<Real>(-reach_shift));
    }
    before = reach * load(&s->emission[i * T]);
    if (i > 0) before += lift;
    const int shift = exponent_of(largest<Real>(before)) - S::head;
    before *= power_of_two<Real>(-shift);
    out.lift_exp[at] = i == 0 ? kNone : unit + s->emission_exp[i];
    before_exp = unit + s->emission_exp[i] + shift;
    out.mass_exp[at] = before_exp;
    store<Real>(out.mass + int64_t(i) * width + t * T, before);
    s->row_exp[i] = larger(s->row_exp[i], before_exp);
  }
}

// One direction of one row; exponents of `out` must be kNone before. All its mantissas are written
// if the result is kTiled, which says nothing yet about exactness, see is_exact.
template <class Real>
Status sweep_tiles(const Graph<Real>& g, const Walk& walk, const EdgeScan& scan,
                   const Sweep<Real>& out, Scratch<Real>* s) {
  constexpr int T = Simd<Real>::T;
  const int m = g.m, span = g.n - g.m, nt = walk.num_tiles;
  if (scan.is_nan) return kNan;
  if (scan.is_huge) return kLogSpace;
  s->fit(walk);
  bool is_nan = false, is_huge = false;
  for (int t = 0; t < nt; ++t) {
    int i0 = 0, i1 = m - 1;  // the targets whose cone meets the tile
    while (i0 < m && walk.last(i0) < t * T) ++i0;
    while (i1 >= i0 && walk.first(i1) > t * T + T - 1) --i1;
    for (int i = 0; i < m; ++i) {
      if (i < i0 || i > i1) out.clear(i, t, walk.width());
    }
    if (i0 > i1) continue;
    const int tile0 = larger(walk.start(), t * T - 1 - span) / T;  // edges skip at most span
    s->edges.resize(size_t(t - tile0 + 1) * T * T);
    for (int tv = tile0; tv <= t; ++tv) {
      pack_edges(g, walk, scan.shift, tv, t, &s->edges[size_t(tv - tile0) * T * T]);
    }
    emit_in_tile(g, walk, t, i0, i1, s, &is_nan, &is_huge);
    if (is_nan || is_huge) continue;  // keep looking: NaN outweighs huge
    if (i0 == 0) s->product_exp[0] = kNone;
    enter_from_earlier_tiles(walk, out, t, tile0, larger(i0, 1), i1, s);
    walk_through_tile(walk, out, t, i0, i1, s);
  }
  return is_nan ? kNan : is_huge ? kLogSpace : kTiled;
}

// Whether the two sweeps hold the likelihood to within rounding: all that was added to either,
// weighted with the most the other can make of it, against the likelihood itself.
template <class Real>
bool is_exact(const Walk& walk, const Sweep<Real>& alpha, const Sweep<Real>& beta) {
  const int m = walk.m, nt = walk.num_tiles;
  const int total_exp = alpha.mass_exp[m * nt - 1];
  const Real total = alpha.mass[int64_t(m - 1) * walk.width() + walk.n - 1];
  if (total_exp == kNone || !(total > 0)) return false;
  // Added per tile: twice to T states; what reaches one is below 2^head in its units.
  const double most = std::ldexp(2.0 * lift_of_emitted<Real>(walk.n) * walk.tile, Simd<Real>::head);
  double added = 0;
  for (int i = 0; i < m; ++i) {
    for (int t = 0; t < nt; ++t) {
      const int a = i * nt + t, b = (m - 1 - i) * nt + nt - 1 - t;
      if (alpha.lift_exp[a] != kNone && beta.reach_exp[b] != kNone) {
        added += std::ldexp(most, alpha.lift_exp[a] + beta.reach_exp[b] - total_exp);
      }
      if (beta.lift_exp[b] != kNone && alpha.reach_exp[a] != kNone) {
        added += std::ldexp(most, beta.lift_exp[b] + alpha.reach_exp[a] - total_exp);
      }
    }
  }
  return added < double(total) * Range<Real>::tolerance;
}

template <class Real>
double log_total(const Walk& walk, const EdgeScan& scan, const Sweep<Real>& alpha) {
  const int m = walk.m;
  const int64_t exponent = int64_t(alpha.mass_exp[m * walk.num_tiles - 1]) +
                           int64_t(scan.shift) * (m - 1);
  return std::log(double(alpha.mass[int64_t(m - 1) * walk.width() + walk.n - 1])) +
         kLn2 * double(exponent);
}

}  // namespace dag
