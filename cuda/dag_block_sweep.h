// dag_block_sweep.h -- alpha or beta of one row by one thread block.
//
// Mapping   Block (row, direction) of 256 threads; the two directions of a row never wait for each
//           other. Tile by tile, all that enters from earlier tiles is a matrix product
//           (dag_block_enter.h); the triangle inside the tile is computed below, with one target
//           per lane. Column q of the triangle needs earlier columns only, so column by column it
//           takes 32 dependent steps; target by target it would take M (77). Each step passes one
//           number from a target to the next, that is, from a lane to the next, by a shuffle. Warp
//           g passes the numbers of its last target to warp g+1 through shared memory, one stage of
//           4 columns later. This makes a staircase of (warps + 7) stages with one barrier each,
//           instead of a barrier per column. With 4 columns per stage the staircase is short (10
//           stages for 77 targets); with 8 it would have 6 stages, each twice as long.
// Numerics  See dag_graph.h. What has entered is kept at 2^(2 head), so that masses of the previous
//           target come in at about 2^head. If one does not fit below 2^(head + kSlack), all that
//           has entered is scaled down and lifted again (`make_room`; in a flat graph of 77 targets
//           and 308 states, some lane of a warp does so at every fourth column). Each time the unit
//           grows by 2^kSlack or more, so the lifts of what enters add up to less than
//           1 / (1 - 2^-kSlack) of the last one, plus that of the product; with the lift of what is
//           emitted they are less than four, in units 2^lift_exp. Sums stay below
//           32 * 2^(2 head + kSlack), and what is emitted below 2^(3 head + kSlack + 5) = 2^117.
//           States that cannot emit (or are outside the cone) end with an exact zero.
// Cost      For 77 targets and 308 states: 44 pairs of tiles, 2.7 million multiply-adds in products
//           and 0.3 million in 10 triangles of at most 10 stages; edges are read once (185 KiB),
//           masses written once (77 KiB, beta's twice) and read again 4 times from L2.
#pragma once
#include "dag_block_enter.h"

namespace dag {

constexpr int kColumns = 4;                    // per stage
constexpr int kStages = kTile / kColumns;      // stages a warp needs for its triangle

// Finds the largest edge out of a tile, or NaN if one is NaN. Block (row, tile), a warp per state.
template <class Real, class Block>
DAG_FN void scan_edges(Block& c, const Launch<Real>& all, int64_t b, int tile) {
  if (!all.has_good_counts(b)) return;
  const Graph<Real> g = all.graph(b);
  const int lane = c.thread() % kTile, end = smaller((tile + 1) * kTile, g.n - 1);
  Real peak = -Real(INFINITY);
  for (int v = tile * kTile + c.thread() / kTile; v < end; v += c.num_threads() / kTile) {
    for (int u = (v + 1) / kTile * kTile + lane; u < g.n; u += kTile) {
      const Real x = u > v ? g.edge(v, u) : -Real(INFINITY);
      peak = x > peak || x != x ? x : peak;
    }
  }
  Real* peaks = c.template shared<Real>();
  peaks[c.thread()] = peak;
  c.sync();
  if (c.thread() > 0) return;
  for (int k = 1; k < c.num_threads(); ++k) {
    peak = peaks[k] > peak || peaks[k] != peaks[k] ? peaks[k] : peak;
  }
  all.notes(b)[tile] = peak;
}

constexpr int kOutOfReach = 1 << 29;  // unit of a target that cannot emit: what enters becomes 0

// One target inside a tile, in the registers of one thread.
template <class Real>
struct Target {
  Real reach[kTile];  // what has entered, in units 2^unit
  int unit, lift_unit, emission_exp;
  uint32_t may_emit;  // bit q: column q
  Real entered_lift, emitted_lift;

  DAG_FN bool is_live() const { return unit != kNone && emission_exp != kNone; }
  DAG_FN bool may(int q) const { return may_emit >> q & 1; }
};

// Prepares a target for tile t: the exponent of its emissions, and what enters from earlier tiles.
template <class Real>
DAG_FN void meet_tile(const Walk& walk, const Shared<Real>& sh, int t, int i, int p,
                      bool is_in_tile, bool has_product, Target<Real>* out) {
  const Real* score = sh.emission + p * kStride;
  Target<Real>& own = *out;
  own.unit = kOutOfReach;
  own.lift_unit = own.emission_exp = kNone;
  own.may_emit = 0;
  own.entered_lift = i > 0 ? lift_of_entered<Real>(walk.n) : Real(0);
  own.emitted_lift = i > 0 ? lift_of_emitted<Real>(walk.n) : Real(0);
#pragma unroll
  for (int q = 0; q < kTile; ++q) own.reach[q] = 0;
  if (!is_in_tile) return;
  Real peak = -Real(INFINITY);
  bool is_nan = false;
#pragma unroll
  for (int q = 0; q < kTile; ++q) {
    const Real x = score[q];
    is_nan |= x != x;
    peak = x > peak ? x : peak;
    own.may_emit |= uint32_t(x > -Real(INFINITY)) << q;
  }
  if (is_nan) sh.flags[0] = 1;  // several threads may write this same value
  if (peak == -Real(INFINITY)) return;
  const double limit = score_limit(walk.m);
  const bool is_huge = !(peak < limit && peak > -limit);
  if (is_huge) sh.flags[1] = 1;
  if (is_nan || is_huge) return;  // the results of this row will not be used
  own.emission_exp = shift_of(peak);
  own.unit = kNone;
  if (i == 0) {
    own.unit = 0;
    const int start = walk.start() - t * kTile;
#pragma unroll
    for (int q = 0; q < kTile; ++q) own.reach[q] = q == start ? Real(1) : Real(0);
    return;
  }
  const int product_exp = has_product ? sh.row_exp[i - 1] : kNone;
  if (product_exp == kNone) return;
  Real most = 0;
#pragma unroll
  for (int q = 0; q < kTile; ++q) {
    const Real lifted = sh.product[p * kStride + q] + own.entered_lift;
    own.reach[q] = own.may(q) ? lifted : Real(0);
    most = own.reach[q] > most ? own.reach[q] : most;
  }
  const int shift = exponent_of(most) - 2 * Number<Real>::head;
  own.unit = product_exp + shift;
  own.lift_unit = larger(product_exp, own.unit);
#pragma unroll
  for (int q = 0; q < kTile; ++q) {  // the lift of what will enter inside the tile
    own.reach[q] = scaled(own.reach[q], -shift) + own.entered_lift;
  }
}

// Rescales what has entered to a larger unit: 32 multiply-adds, unless the factor is out of range.
template <class Real>
DAG_FN void make_room(Target<Real>* own, int unit) {
  const int e = own->unit - unit, first = in_range<Real>(e), rest = e - first;
  if (rest != 0 && own->unit != kNone) {
#pragma unroll
    for (int q = 0; q < kTile; ++q) own->reach[q] *= two_to<Real>(in_range<Real>(rest));
  }
#pragma unroll
  for (int q = 0; q < kTile; ++q) {
    own->reach[q] = own->reach[q] * two_to<Real>(first) + own->entered_lift;
  }
  own->unit = unit;
  own->lift_unit = larger(own->lift_unit, unit);
}

// Columns First .. First+3 for one warp: each target emits, passes its mass on to the next target,
// and receives that of the previous one.
template <int First, class Real, class Block>
DAG_FN void walk_columns(Block& c, const Shared<Real>& sh, int p, int group, bool is_first_group,
                         Target<Real>* out) {
  Target<Real>& own = *out;
  const int lane = c.thread() % kTile;
  constexpr int slots = 2 * kRowsOf<Real> / kTile;  // for what warps pass on
  const int before = group % slots * kTile, after = (group + 1) % slots * kTile;
  Real* score = sh.emission + p * kStride;
#pragma unroll
  for (int q = First; q < First + kColumns; ++q) {
    Real emitted = 0;
    if (own.emission_exp != kNone) {
      emitted = exp_shifted(c, score[q], own.emission_exp);
      score[q] = emitted;  // for leave_tile
    }
    const Real lift = own.is_live() && own.may(q) ? own.emitted_lift : Real(0);
    const Real mass = own.reach[q] * emitted + lift;
    const int mass_exp = own.is_live() ? own.unit + own.emission_exp : 0;
    Real entering = c.from_previous_lane(mass);
    int entering_exp = c.from_previous_lane(mass_exp);
    if (lane == kTile - 1) {
      sh.hand[after + q] = mass;
      sh.hand_exp[after + q] = mass_exp;
    }
    if (lane == 0) {
      entering = is_first_group ? Real(0) : sh.hand[before + q];
      entering_exp = is_first_group ? 0 : sh.hand_exp[before + q];
    }
    Real from = scaled(entering, entering_exp - own.unit);
    if (from >= two_to<Real>(Number<Real>::head + kSlack)) {
      make_room(&own, entering_exp + exponent_of(entering) - Number<Real>::head);
      from = scaled(entering, entering_exp - own.unit);
    }
#pragma unroll
    for (int r = (q + 1) / 4 * 4; r < kTile; r += 4) {  // edges to r <= q are 0
      Real edge[4];
      c.load4(edge, sh.edges + q * kPadded + r);
#pragma unroll
      for (int s = 0; s < 4; ++s) own.reach[r + s] += from * edge[s];
    }
  }
}

// The staircase for `num` targets: warp g computes 4 columns in each of the stages g .. g+7.
template <class Real, class Block>
DAG_FN void walk_triangle(Block& c, const Shared<Real>& sh, int first_row, int num,
                          Target<Real>* own) {
  const int p = c.thread(), warp = p / kTile, num_warps = (num + kTile - 1) / kTile;
  const int group = first_row / kTile + warp;
  const bool is_first = group == 0;
  for (int stage = 0; stage < num_warps + kStages - 1; ++stage) {
    if (warp < num_warps) {
      switch (stage - warp) {  // `reach` stays in registers only if the compiler knows the columns
        case 0: walk_columns<0>(c, sh, p, group, is_first, own); break;
        case 1: walk_columns<4>(c, sh, p, group, is_first, own); break;
        case 2: walk_columns<8>(c, sh, p, group, is_first, own); break;
        case 3: walk_columns<12>(c, sh, p, group, is_first, own); break;
        case 4: walk_columns<16>(c, sh, p, group, is_first, own); break;
        case 5: walk_columns<20>(c, sh, p, group, is_first, own); break;
        case 6: walk_columns<24>(c, sh, p, group, is_first, own); break;
        case 7: walk_columns<28>(c, sh, p, group, is_first, own); break;
        default: break;
      }
    }
    c.sync();  // what was handed over is there
  }
}

// Emits, scales everything below 2^head, and writes it. Up to here a lane is a target; for the
// writes, it is a state.
template <class Real, class Block>
DAG_FN void leave_tile(Block& c, const Walk& walk, const BlockSweep<Real>& out,
                       const Shared<Real>& sh, int t, int i0, int num, Target<Real>* reach) {
  constexpr int head = Number<Real>::head;
  Target<Real>& own = *reach;
  const int p = c.thread(), lane = p % kTile, i = i0 + p;
  if (p - lane >= num) return;  // a whole warp without targets
  Real* emission = sh.emission + p * kStride;
  Real* product = sh.product + p * kStride;
  int mass_exp = kNone, reach_exp = kNone;
  if (own.is_live()) {
    Real most = 0, most_mass = 0;
#pragma unroll
    for (int q = 0; q < kTile; ++q) {
      own.reach[q] = own.may(q) ? own.reach[q] : Real(0);
      most = own.reach[q] > most ? own.reach[q] : most;
    }
    const int shift = exponent_of(most) - head;
    reach_exp = own.unit + shift;
#pragma unroll
    for (int q = 0; q < kTile; ++q) {
      product[q] = scaled(own.reach[q], -shift);
      own.reach[q] = own.reach[q] * emission[q] +
                      (own.may(q) ? own.emitted_lift : Real(0));  // now the mass
      most_mass = own.reach[q] > most_mass ? own.reach[q] : most_mass;
    }
    const int mass_shift = exponent_of(most_mass) - head;
    mass_exp = own.unit + own.emission_exp + mass_shift;
#pragma unroll
    for (int q = 0; q < kTile; ++q) emission[q] = scaled(own.reach[q], -mass_shift);
  }
  if (p < num) {
    const int64_t at = int64_t(t) * walk.m + i;
    out.mass_exp[at] = mass_exp;
    out.reach_exp[at] = reach_exp;
    out.lift_exp[at] = mass_exp == kNone || i == 0 ? kNone : own.lift_unit + own.emission_exp;
    sh.row_exp[i] = larger(sh.row_exp[i], mass_exp);
  }
  c.sync_warp();  // the rows of the warp are in shared memory
  for (int k = p - lane; k < smaller(p - lane + kTile, num); ++k) {
    const int64_t at = int64_t(i0 + k) * walk.width() + t * kTile + lane;
    out.mass[at] = sh.emission[k * kStride + lane];
    if (walk.reversed) out.reach[at] = sh.product[k * kStride + lane];
  }
}

// Sweeps one direction of one row, and leaves its status in the notes. is_exact later tells whether
// the sweep is exact.
template <class Real, class Block>
DAG_FN void sweep_row(Block& c, const Launch<Real>& all, int64_t b, int direction) {
  if (!all.has_good_counts(b)) return;
  const Graph<Real> g = all.graph(b);
  const Walk walk = all.walk(b, direction == 1);
  const EdgeShift edges = edge_shift(all, b);
  Real* status = all.notes(b) + all.num_tiles() + direction;
  if (!g.may_have_path() || edges.status != kTiled) {
    if (c.thread() == 0) *status = Real(g.may_have_path() ? edges.status : kNoPath);
    return;
  }
  const BlockSweep<Real> out = all.sweep(b, direction);
  const Shared<Real> sh(c.template shared<Real>());
  for (int i = c.thread(); i < g.m; i += c.num_threads()) sh.row_exp[i] = kNone;
  if (c.thread() < 2) sh.flags[c.thread()] = 0;
  const int span = g.n - g.m;
  for (int t = 0; t < walk.num_tiles; ++t) {
    // The targets whose cone meets the tile, and the first tile that has edges to it.
    const int begin = t * kTile - walk.start(), end = begin + kTile - 1;
    const int i0 = begin <= 0 ? 0 : larger(1, begin - span);
    const int i1 = end >= g.n - 1 ? g.m - 1 : smaller(g.m - 2, end);
    const int tile0 = larger(walk.start(), t * kTile - 1 - span) / kTile;
    for (int i = c.thread(); i < g.m; i += c.num_threads()) {
      if (i >= i0 && i <= i1) continue;
      out.mass_exp[t * int64_t(g.m) + i] = kNone;
      out.reach_exp[t * int64_t(g.m) + i] = kNone;
      out.lift_exp[t * int64_t(g.m) + i] = kNone;
    }
    for (int row = i0; row <= i1; row += sh.rows) {
      const int num = smaller(sh.rows, i1 - row + 1);
      enter_tile(c, g, walk, out, sh, edges.shift, t, tile0, row, num);
      Target<Real> own;
      if (c.thread() < sh.rows) {
        meet_tile(walk, sh, t, row + c.thread(), c.thread(), c.thread() < num, tile0 < t,
                  &own);
      }
      walk_triangle(c, sh, row - i0, num, &own);
      leave_tile(c, walk, out, sh, t, row, num, &own);
      c.sync();  // masses are written and shared memory is free
    }
  }
  if (c.thread() == 0) *status = Real(sh.flags[0] ? kNan : sh.flags[1] ? kLogSpace : kTiled);
}

}  // namespace dag
