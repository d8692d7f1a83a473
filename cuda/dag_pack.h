// dag_pack.h -- packs the scores of a row as probabilities in the order the sweeps read them (CPU).
//
// Mapping   Edges become T x T blocks, and emissions one vector per (target, tile). Each score is
//           exponentiated once for both directions, and read row by row, as memory is prefetched.
// Numerics  All edges are multiplied by 2^-edge_shift; the emissions of a target in a tile have an
//           exponent of their own. A possible emission below the smallest normal number is raised
//           to it, by less than an eighth of the lift its state gets (dag_graph.h); only impossible
//           emissions are 0.
#pragma once
#include <algorithm>
#include <vector>

#include "dag_simd.h"

namespace dag {

struct EdgeScan {
  int shift;
  bool is_nan, is_huge;
};

// The shift that the largest edge of a row calls for, and whether an edge is NaN or the largest one
// is beyond score_limit.
template <class Real>
EdgeScan scan_edges(const Graph<Real>& g) {
  constexpr int T = Simd<Real>::T;
  Vec<Real> peak_T = -Real(INFINITY);
  Int<Real> nan_T;
  Real peak = -Real(INFINITY);
  bool is_nan = false;
  for (int v = 0; v < g.n - 1; ++v) {
    const Real* row = g.transition + v * g.stride;
    int u = v + 1;
    for (; u + T <= g.n; u += T) {
      const Vec<Real> x = load(row + u);
      nan_T |= x != x;
      peak_T = select<Real>(peak_T < x, x, peak_T);
    }
    for (; u < g.n; ++u) {
      is_nan |= row[u] != row[u];
      peak = row[u] > peak ? row[u] : peak;
    }
  }
  is_nan |= any(nan_T);
  peak = std::max(peak, largest(peak_T));
  if (peak == -Real(INFINITY)) return {1, is_nan, false};
  const double limit = score_limit(g.m);
  if (!(peak < limit && peak > -limit)) return {1, is_nan, true};
  return {shift_of<Real>(peak), is_nan, false};
}

// The last tile that an edge from tile_v can lead to: a path skips at most n - m states at once.
template <class Real>
int last_tile(const Graph<Real>& g, int tile_v) {
  constexpr int T = Simd<Real>::T;
  return smaller((g.n - 1) / T, tile_v + 1 + (g.n - g.m) / T);
}

// Writes E * 2^-shift for the rows of tile_v, as one T x T block for each tile from tile_v to
// last_tile; 0 where there is no edge v < u < n.
template <class Real>
void pack_rows(const Graph<Real>& g, int shift, int tile_v, Lanes<Real>* blocks) {
  constexpr int T = Simd<Real>::T;
  const int last = last_tile(g, tile_v), num_whole = g.n / T;
  const Vec<Real> impossible = -Real(INFINITY);
  for (int r = 0; r < T; ++r) {
    const int v = tile_v * T + r;
    const Real* from = g.transition + v * g.stride;
    Lanes<Real>* to = blocks + r;
    for (int tu = tile_v; tu <= last; ++tu, to += T) {
      __builtin_prefetch(from + tu * T + 4 * g.stride);
      Vec<Real> score = impossible;
      if (tu > tile_v && tu < num_whole) {
        score = load(from + tu * T);
      } else if (v < g.n - 1) {  // the triangle, or the last tile
        const auto is_edge = v - tu * T < lanes<Real>();
        score = load_some(from + tu * T, smaller(T, g.n - tu * T));
        score = select<Real>(is_edge, score, impossible);
      }
      store(to->at, exp_shifted<Real>(score, shift));
    }
  }
}

// The packed scores of a row, which both directions read; each thread has one of these.
template <class Real>
struct Packed {
  std::vector<Lanes<Real>> edges;
  std::vector<int64_t> begin;           // where each tile's blocks begin in `edges`
  std::vector<Lanes<Real>> emission;    // [num_tiles][m], below 2^head, 0 outside the cone
  std::vector<int> emission_exp;        // [num_tiles][m]
  bool is_nan, is_huge;                 // whether an emission is NaN, or too large

  void pack_edges(const Graph<Real>& g, int shift) {
    constexpr int T = Simd<Real>::T;
    begin.assign(1, 0);
    for (int tile = 0; tile * T < g.n; ++tile) {
      begin.push_back(begin.back() + (last_tile(g, tile) - tile + 1) * T);
    }
    if (int64_t(edges.size()) < begin.back()) edges.resize(begin.back());
    for (int tile = 0; tile * T < g.n; ++tile) pack_rows(g, shift, tile, &edges[begin[tile]]);
  }
  const Lanes<Real>* block(int tile_v, int tile_u) const {
    return &edges[begin[tile_v] + (tile_u - tile_v) * Simd<Real>::T];
  }

  void pack_emissions(const Graph<Real>& g, int num_tiles) {
    constexpr int T = Simd<Real>::T;
    const Vec<Real> impossible = -Real(INFINITY);
    const Vec<Real> least = power_of_two<Real>(Range<Real>::smallest);
    const double limit = score_limit(g.m);
    const size_t size = size_t(g.m) * num_tiles;
    if (emission.size() < size) emission.resize(size);
    emission_exp.assign(size, kNone);
    Int<Real> nan_T;
    is_huge = false;
    for (int i = 0; i < g.m; ++i) {
      const Real* from = g.emission + i * g.stride;
      const int low = g.first(i), high = g.last(i);
      for (int t = low / T; t <= high / T; ++t) {
        Vec<Real> score = load_some(from + t * T, smaller(T, g.n - t * T));
        if (low > t * T || high < t * T + T - 1) {
          const Int<Real> q = lanes<Real>() + t * T;
          score = select<Real>((low - 1 < q) & (q < high + 1), score, impossible);
        }
        nan_T |= score != score;
        const Real peak = largest(score);
        if (peak == -Real(INFINITY)) continue;
        if (!(peak < limit && peak > -limit)) {  // true for NaN, too
          is_huge = true;
          continue;
        }
        const int shift = shift_of<Real>(peak);
        const Vec<Real> p = exp_shifted<Real>(score, shift);
        const Vec<Real> possible = select<Real>(least < p, p, least);
        const size_t at = size_t(t) * g.m + i;
        store<Real>(emission[at].at, select<Real>(impossible < score, possible, Real(0)));
        emission_exp[at] = shift;
      }
    }
    is_nan = any(nan_T);
  }
};

}  // namespace dag
