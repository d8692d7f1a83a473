// dag_block.h -- what a thread block needs: its context, its arithmetic, the buffers of a batch.
//
// The kernels (dag_block_*.h) are templates over a context `c`, one per thread, so that nvcc
// compiles them for a GPU (dag_cuda.cu) and g++ for fibers in place of threads (dag_fibers.cpp):
//
//   int thread(), num_threads()          index of this thread, threads in the block
//   void sync()                          all threads of the block meet
//   void sync_warp()                     the 32 threads of a warp meet
//   T from_previous_lane(T x)            x of the previous lane of the warp; lane 0 gets its own
//   Real* shared<Real>()                 shared memory, uninitialised
//   float exp2(float), double exp2(double), exp(double), log(double)
//   void load4(Real* to, const Real* from)   four numbers, from an index divisible by four
//
// Numerics  Numbers are mantissa * 2^exponent, with an exponent per (target, tile of 32 states);
//           `lift` guards against silent underflow (dag_graph.h). A GPU keeps subnormal numbers
//           unless told otherwise (--use_fast_math is not used), so it loses less than dag_graph.h
//           allows for: only exp_shifted and `scaled` flush, to an exact zero, what is below
//           2^smallest of the unit.
#pragma once
#include <cmath>
#include <cstring>

#include "dag_graph.h"

namespace dag {

constexpr int kTile = 32;           // states per tile; also the lanes of a warp
constexpr int kSweepThreads = 256;  // threads per block of each kernel
constexpr int kScanThreads = 128;
constexpr int kFinishThreads = 256;
constexpr int kGradientThreads = 64;
constexpr int kViterbiThreads = 512;

template <class Real>
struct Number;
template <>
struct Number<float> {
  using Bits = int32_t;
  static constexpr int mantissa_bits = 23, bias = 127, head = 32;
  static constexpr float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;
};
template <>
struct Number<double> {
  using Bits = int64_t;
  static constexpr int mantissa_bits = 52, bias = 1023, head = 256;
  static constexpr double round = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
};

// 2^e for smallest <= e <= bias, the exponents of normal numbers.
template <class Real>
DAG_FN Real two_to(int e) {
  using N = Number<Real>;
  const auto bits = typename N::Bits(e + N::bias) << N::mantissa_bits;
  Real out;
  memcpy(&out, &bits, sizeof out);
  return out;
}

template <class Real>
DAG_FN int in_range(int e) {
  return smaller(larger(e, Range<Real>::smallest), Number<Real>::bias);
}

// x * 2^e, also where 2^e itself is not a normal number; right for all e within twice the range.
template <class Real>
DAG_FN Real scaled(Real x, int e) {
  const int first = in_range<Real>(e), rest = in_range<Real>(e - first);
  return x * two_to<Real>(first) * two_to<Real>(rest);
}

// The exponent e with 0.5 <= x / 2^e < 1, for a normal number x > 0.
template <class Real>
DAG_FN int exponent_of(Real x) {
  typename Number<Real>::Bits bits;
  memcpy(&bits, &x, sizeof bits);
  return int(bits >> Number<Real>::mantissa_bits) - Number<Real>::bias + 1;
}

// The shift for which e^x * 2^-shift is just below 2^head.
template <class Real>
DAG_FN int shift_of(Real x) {
  return int(floor(double(x) * kLog2e + 0.5)) + 1 - Number<Real>::head;
}

// e^x * 2^-shift for x < score_limit; 0 where that is below 2^smallest. The argument of exp2 is
// within +-0.5, so neither a large score nor the GPU's approximation costs digits.
template <class Real, class Block>
DAG_FN Real exp_shifted(Block& c, Real x, int shift) {
  using N = Number<Real>;
  x = x > Real(-1.5 * kLimit) ? x : Real(-1.5 * kLimit);
  const Real k = (x * Real(kLog2e) + N::round) - N::round;
  const Real rest = (x - k * N::ln2_high) - k * N::ln2_low;
  const int e = int(k) - shift;
  return e < Range<Real>::smallest ? Real(0) : c.exp2(rest * Real(kLog2e)) * two_to<Real>(e);
}

// The lifts of what has entered a state and of what it has emitted: those of dag_graph.h times
// 2^kSlack, as what a target passes on inside a tile may be that much larger than a mass, and the
// loss with it.
constexpr int kSlack = 16;
template <class Real>
DAG_FN Real lift_of_entered(int n) {
  return 8 * Real(n) * two_to<Real>(Range<Real>::smallest + Number<Real>::head + kSlack);
}
template <class Real>
DAG_FN Real lift_of_emitted(int n) {
  return 8 * Real(n) * two_to<Real>(Range<Real>::smallest + 2 * Number<Real>::head + kSlack);
}

// The numbers of one direction, in the order in which it computes them: mantissas [m][width] and
// exponents [num_tiles][m] (lanes are targets). Mantissas are undefined if their exponent is kNone.
template <class Real>
struct BlockSweep {
  Real *mass, *reach;  // as in Sweep (dag_tiled.h); reach is stored for beta only
  int32_t *mass_exp, *reach_exp, *lift_exp;
};

// A batch in memory: emission (B, M, L), transition (B, L, L), and buffers.
template <class Real>
struct Launch {
  const Real *emission, *transition;
  const int64_t *num_targets, *num_states;
  int64_t B, M, L;
  Real* mantissa;     // (B, 4, M, width): mass of alpha, mass of beta, reach of beta, notes
  int32_t* exponent;  // (B, 6, num_tiles, M): mass, reach, lift of alpha; the same of beta
  int32_t* info;      // (B, 2): Status, edge shift

  DAG_FN int num_tiles() const { return int((L + kTile - 1) / kTile); }
  DAG_FN int64_t plane() const { return M * num_tiles() * kTile; }
  DAG_FN bool has_good_counts(int64_t b) const {
    return num_targets[b] >= 1 && num_targets[b] <= M && num_states[b] >= 1 &&
           num_states[b] <= L;
  }
  DAG_FN Graph<Real> graph(int64_t b) const {
    return {emission + b * M * L, transition + b * L * L, L, int(num_targets[b]),
            int(num_states[b])};
  }
  DAG_FN Walk walk(int64_t b, bool reversed) const {
    const int n = int(num_states[b]);
    return {int(num_targets[b]), n, kTile, (n + kTile - 1) / kTile, reversed};
  }
  DAG_FN BlockSweep<Real> sweep(int64_t b, int direction) const {
    const int64_t num = M * num_tiles();
    int32_t* e = exponent + (b * 6 + direction * 3) * num;
    Real* first = mantissa + b * 4 * plane();
    return {first + direction * plane(), first + 2 * plane(), e, e + num, e + 2 * num};
  }
  // Notes on row b: the largest edge out of each tile, then the status of each sweep.
  DAG_FN Real* notes(int64_t b) const { return mantissa + (b * 4 + 3) * plane(); }
  // Sweeps in log space have no mantissas: their alpha and beta, [m][n] each, take that memory.
  DAG_FN double* log_sweep(int64_t b, int direction) const {
    return reinterpret_cast<double*>(mantissa + b * 4 * plane()) + direction * plane();
  }
};

// The counterpart of EdgeScan (dag_pack.h): the shift of all edges of a row, and a status worse
// than kTiled if an edge is NaN or the largest is too large. All threads read the same few notes.
struct EdgeShift {
  int shift;
  Status status;
};

template <class Real>
DAG_FN EdgeShift edge_shift(const Launch<Real>& all, int64_t b) {
  const Graph<Real> g = all.graph(b);
  const Real* notes = all.notes(b);
  Real peak = -Real(INFINITY);
  bool is_nan = false;
#pragma unroll 8
  for (int t = 0; t < (g.n + kTile - 1) / kTile; ++t) {  // no early exit, so that reads overlap
    const Real x = notes[t];
    is_nan |= x != x;
    peak = x > peak ? x : peak;
  }
  if (is_nan) return {1, kNan};
  if (peak == -Real(INFINITY)) return {1, kTiled};
  const double limit = score_limit(g.m);
  if (!(peak < limit && peak > -limit)) return {1, kLogSpace};
  return {shift_of(peak), kTiled};
}

}  // namespace dag
