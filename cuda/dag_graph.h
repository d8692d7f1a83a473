// dag_graph.h -- what all kernels of the dynamic programme share. Needs no torch or CUDA headers.
//
//   alpha[i][u] = P[i][u] * sum over v < u of alpha[i-1][v] * E[v][u]      (Appendix I.1)
//   beta[i][v]  = sum over u > v of E[v][u] * P[i+1][u] * beta[i+1][u]     (own emission left out)
//
// A path starts in state 0, ends in state n-1 and visits m states, so only the states first(i) ..
// last(i) can emit target i (the cone). Beta is the alpha of the graph read backwards: `reversed`
// reverses the order of targets and of states, padding included, so that tile t of one direction is
// tile num_tiles-1-t of the other.
//
// Numbers are mantissa * 2^exponent with one integer exponent per (target, tile of states).
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define DAG_FN __host__ __device__ __forceinline__
#else
#define DAG_FN inline
#endif

namespace dag {

constexpr int kNone = -(1 << 30);      // exponent of an exact zero
constexpr double kLimit = 16384.0;     // rows with larger scores go to log space; see exp_shifted
constexpr double kLog2e = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

enum Status : int32_t { kTiled = 0, kLogSpace = 1, kNoPath = 2, kNan = 3 };

// A limit on scores, in nats: the sum of m scores within it is sure to fit an int as an exponent.
DAG_FN constexpr double score_limit(int m) { return m <= 4096 ? kLimit : kLimit * 4096 / m; }
static_assert(score_limit(4096) * 4096 * kLog2e < 1 << 29, "the exponent for 4096 targets must fit");
static_assert(score_limit(1 << 20) * (1 << 20) * kLog2e < 1 << 29, "the exponent for a million targets must fit");

DAG_FN constexpr int larger(int a, int b) { return a > b ? a : b; }
DAG_FN constexpr int smaller(int a, int b) { return a < b ? a : b; }

// One row of the batch, with m targets and n states, as it is laid out in memory.
template <class Real>
struct Graph {
  const Real* emission;    // [i * stride + u]
  const Real* transition;  // [v * stride + u], read at v < u < n only
  int64_t stride;          // L
  int m, n;

  DAG_FN Real emit(int i, int u) const { return emission[i * stride + u]; }
  DAG_FN Real edge(int v, int u) const { return transition[v * stride + u]; }
  DAG_FN bool may_have_path() const { return m <= n && (m > 1 || n == 1); }
  DAG_FN int first(int i) const { return i == m - 1 ? n - 1 : i; }
  DAG_FN int last(int i) const { return i == 0 ? 0 : n - m + i; }
};

// The same row cut into tiles and traversed in one direction.
struct Walk {
  int m, n, tile, num_tiles;
  bool reversed;

  DAG_FN int width() const { return num_tiles * tile; }
  DAG_FN int target(int i) const { return reversed ? m - 1 - i : i; }
  DAG_FN int memory_tile(int t) const { return reversed ? num_tiles - 1 - t : t; }
  DAG_FN int start() const { return reversed ? width() - n : 0; }
  DAG_FN int first(int i) const {
    if (!reversed) return i == m - 1 ? n - 1 : i;
    return i == m - 1 ? width() - 1 : width() - n + i;
  }
  DAG_FN int last(int i) const {
    if (!reversed) return i == 0 ? 0 : n - m + i;
    return i == 0 ? start() : width() - m + i;
  }
};

// Masses (entries of alpha or P * beta), edges and emissions are kept below 2^head in their units.
// Numbers flushed to zero lose at most 3 * 2^(head + smallest) when mass enters a state from one
// predecessor (its mass, its edge, their product), and at most n * 2^(2 head + smallest) when the
// state emits. The sweeps add more than all of that: lift = 8 n 2^(smallest - head), multiplied by
// 2^(2 head) for what has entered a state and by 2^(3 head) for what it has emitted. So the values
// they hold are never below the truth, and the sum of all that was added, weighted with the values
// of the other direction, bounds the error from above.
//
// The gradient of an edge is (sum over targets of alpha * beta) * E / Z. The sum may be as large as
// Z / E, and is_exact allows an E so small that Z / E exceeds 2^1023 in double. Therefore the
// sums are divided by 2^room, and the edges multiplied by it.
template <class Real>
struct Range;
template <>
struct Range<float> {
  static constexpr int smallest = -126;        // 2^smallest is the smallest normal number
  static constexpr double tolerance = 1.5e-8;  // relative to the likelihood; 2^-26
  static constexpr int room = 0;
};
template <>
struct Range<double> {
  static constexpr int smallest = -1022;
  static constexpr double tolerance = 1.4e-17;  // 2^-56
  static constexpr int room = 256;
};
}  // namespace dag
