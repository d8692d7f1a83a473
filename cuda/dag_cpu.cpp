// dag_cpu.cpp -- the dynamic programme on CPU threads, behind a plain C interface.
//
// All arrays are contiguous, (B, M, L) and (B, L, L); counts are int64 in 1..M and 1..L. A call
// returns a Result. Every number written is a function of the inputs alone: each row is computed
// by the same operations in the same order whatever the number of threads, and those parts of
// mantissa, exponent and info that a row does not use are cleared.
#include <algorithm>
#include <atomic>
#include <new>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "dag_gradient.h"
#include "dag_log.h"

namespace dag {

enum Result : int { kDone = 0, kOutOfMemory = 1, kBadCount = 2 };

// While an object of this class lives, its thread reads and writes subnormal numbers as 0: they
// cost a hundred times as much as normal numbers, and `lift` (dag_graph.h) makes up for the loss.
struct FlushSubnormals {
#if defined(__SSE2__)
  unsigned before = _mm_getcsr();
  FlushSubnormals() { _mm_setcsr(before | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(before); }
#endif
};

// The operating system provides new memory page by page. With small pages that takes as long as
// all the arithmetic.
inline void prefer_huge_pages(void* begin, int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = 1 << 21;
  const uintptr_t first = (uintptr_t(begin) + page - 1) & ~(page - 1);
  const uintptr_t end = (uintptr_t(begin) + num_bytes) & ~(page - 1);
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#else
  (void)begin, (void)num_bytes;
#endif
}

template <class Real>
struct Batch {
  const Real *emission, *transition;
  const int64_t *num_targets, *num_states;
  int64_t B, M, L;
  Real* mantissa;     // (B, 3, tiles, M, T): mass of alpha, mass of beta, reach of beta
  int32_t* exponent;  // (B, 6, tiles, M): mass, reach, lift of alpha; the same of beta
  int32_t* info;      // (B, 2): Status, edge shift

  bool has_good_counts() const {
    for (int64_t b = 0; b < B; ++b) {
      if (num_targets[b] < 1 || num_targets[b] > M) return false;
      if (num_states[b] < 1 || num_states[b] > L) return false;
    }
    return true;
  }
  // Whether there are enough rows to give every thread whole rows, which then stay in its cache.
  bool has_many_rows(int num_threads) const { return B >= 4 * num_threads; }
  int64_t tiles() const { return (L + Simd<Real>::T - 1) / Simd<Real>::T; }
  Graph<Real> graph(int64_t b) const {
    return {emission + b * M * L, transition + b * L * L, L, int(num_targets[b]),
            int(num_states[b])};
  }
  Walk walk(int64_t b, bool reversed) const {
    const int T = Simd<Real>::T, n = int(num_states[b]);
    return {int(num_targets[b]), n, T, (n + T - 1) / T, reversed};
  }
  Sweep<Real> sweep(int64_t b, int direction) const {
    const int64_t num = M * tiles();
    // Memory of a tensor begins at a multiple of 64 bytes.
    auto* mass = reinterpret_cast<Lanes<Real>*>(mantissa) + (b * 3 + direction) * num;
    int32_t* e = exponent + (b * 6 + direction * 3) * num;
    return {mass, direction ? mass + num : nullptr, e, e + num, e + 2 * num};
  }
};

// Runs job(k, memory) for k in 0..num-1 on the threads, `together` at a time, each thread with a
// Memory of its own. No exception may leave a thread: instead, the result says if memory ran out.
template <class Memory = int, class Job>
int in_parallel(int64_t num, int num_threads, Job job, int64_t together = 1) {
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(num_threads)
  {
    FlushSubnormals flush;
    Memory memory{};
#pragma omp for schedule(dynamic, together)
    for (int64_t k = 0; k < num; ++k) {
      try {
        job(k, &memory);
      } catch (const std::bad_alloc&) {
        failed = kOutOfMemory;
      }
    }
  }
  return failed;
}

template <class Real, int D>
struct SweepMemory {
  Packed<Real> packed;
  Way<Real> ways[D];
};

// Sweeps D directions of row b, starting with `direction`, and fills all their buffers.
template <int D, class Real>
Status sweep_row(const Batch<Real>& batch, int64_t b, int direction,
                 SweepMemory<Real, D>* memory) {
  const Graph<Real> g = batch.graph(b);
  const EdgeScan scan = g.may_have_path() ? scan_edges(g) : EdgeScan{0, false, false};
  if (direction == 0) batch.info[b * 2 + 1] = scan.shift;
  for (int d = 0; d < D; ++d) {
    const Sweep<Real> sweep = batch.sweep(b, direction + d);
    std::fill_n(sweep.mass_exp, 3 * batch.M * batch.tiles(), kNone);  // and reach_exp, lift_exp
    memory->ways[d].begin(batch.walk(b, direction + d == 1), sweep);
  }
  const Status status =
      g.may_have_path() ? sweep_tiles(g, scan, &memory->packed, memory->ways) : kNoPath;
  for (const Way<Real>& way : memory->ways) {
    const int64_t written = status == kTiled ? int64_t(g.m) * way.walk.num_tiles : 0;
    for (int64_t at = written; at < batch.M * batch.tiles(); ++at) way.out.clear(at);
  }
  return status;
}

// The log-likelihood of row b, once both directions are done; writes its status to `info`.
template <class Real>
double finish_row(const Batch<Real>& batch, int64_t b, int32_t status) {
  const Graph<Real> g = batch.graph(b);
  const Walk walk = batch.walk(b, false);
  int32_t& row = batch.info[b * 2] = status;
  if (row == kTiled && !is_exact(walk, batch.sweep(b, 0), batch.sweep(b, 1))) row = kLogSpace;
  if (row == kTiled) {
    return log_total(walk, {batch.info[b * 2 + 1], false, false}, batch.sweep(b, 0));
  }
  if (row == kNan) return std::numeric_limits<double>::quiet_NaN();
  const double total = row == kLogSpace ? LogSweeps<Real>(g).total : kImpossible;
  if (total == kImpossible) row = kNoPath;
  return total;
}

template <class Real>
int log_likelihood(const Batch<Real>& batch, Real* log_likelihood, int num_threads) {
  if (!batch.has_good_counts()) return kBadCount;
  prefer_huge_pages(batch.mantissa, batch.B * 3 * batch.M * batch.tiles() * kVectorBytes);
  if (batch.has_many_rows(num_threads)) {
    using Memory = SweepMemory<Real, 2>;
    return in_parallel<Memory>(batch.B, num_threads, [&](int64_t b, Memory* memory) {
      log_likelihood[b] = Real(finish_row(batch, b, sweep_row<2>(batch, b, 0, memory)));
    });
  }
  using Memory = SweepMemory<Real, 1>;  // few rows: each job is one direction
  std::vector<int32_t> status(batch.B * 2, kNoPath);
  const int failed =
      in_parallel<Memory>(batch.B * 2, num_threads, [&](int64_t k, Memory* memory) {
        status[k] = sweep_row<1>(batch, k / 2, int(k % 2), memory);
      });
  return failed | in_parallel(batch.B, num_threads, [&](int64_t b, int*) {
    const int32_t worst = larger(status[b * 2], status[b * 2 + 1]);
    log_likelihood[b] = Real(finish_row(batch, b, worst));
  });
}

// Writes the gradients of a row that is not kTiled; they must be zero on entry.
template <class Real>
void other_gradients(const Graph<Real>& g, int32_t status, double weight, Real* grad_emission,
                     Real* grad_transition) {
  if (status == kLogSpace) log_gradients(g, weight, grad_emission, grad_transition);
  if (status != kNan) return;
  for (int i = 0; i < g.m; ++i) {
    for (int u = g.first(i); u <= g.last(i); ++u) grad_emission[i * g.stride + u] = Real(NAN);
  }
  for (int v = 0; v < g.n; ++v) {
    for (int u = v + 1; u < g.n; ++u) grad_transition[v * g.stride + u] = Real(NAN);
  }
}

template <class Real>
int gradients(const Batch<Real>& batch, const Real* weight, Real* grad_emission,
              Real* grad_transition, int num_threads) {
  if (!batch.has_good_counts()) return kBadCount;
  constexpr int T = Simd<Real>::T;
  const int64_t tiles = batch.tiles(), M = batch.M, L = batch.L;
  prefer_huge_pages(grad_transition, batch.B * L * L * sizeof(Real));
  using Memory = Joint<Real>;
  return in_parallel<Memory>(batch.B * tiles, num_threads, [&](int64_t k, Memory* memory) {
    const int64_t b = k / tiles, tile = k % tiles, v0 = tile * T, v1 = std::min(v0 + T, L);
    Real *of_emission = grad_emission + b * M * L, *of_transition = grad_transition + b * L * L;
    const Graph<Real> g = batch.graph(b);
    if (batch.info[b * 2] != kTiled) {
      if (tile > 0) return;
      std::fill_n(of_emission, M * L, Real(0));
      std::fill_n(of_transition, L * L, Real(0));
      return other_gradients(g, batch.info[b * 2], weight[b], of_emission, of_transition);
    }
    const Walk walk = batch.walk(b, false);
    const Sweep<Real> alpha = batch.sweep(b, 0), beta = batch.sweep(b, 1);
    grad_emission_tile(g, walk, alpha, beta, weight[b], int(M), int(tile), of_emission);
    if (tile < walk.num_tiles) {
      grad_transition_tile(g, walk, batch.info[b * 2 + 1], alpha, beta, weight[b], int(tile),
                           memory, of_transition);
    } else {
      std::fill(of_transition + v0 * L, of_transition + v1 * L, Real(0));
    }
  }, batch.has_many_rows(num_threads) ? tiles : 1);
}

template <class Real>
int viterbi(const Batch<Real>& batch, int64_t* path, Real* log_score, int num_threads) {
  if (!batch.has_good_counts()) return kBadCount;
  return in_parallel(batch.B, num_threads, [&](int64_t b, int*) {
    for (int64_t i = 0; i < batch.M; ++i) path[b * batch.M + i] = -1;
    log_score[b] = Real(best_path(batch.graph(b), path + b * batch.M));
  });
}

}  // namespace dag

#define DAG_INTERFACE(Real, name)                                                               \
  extern "C" int dag_log_likelihood_##name(                                                     \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, Real* log_likelihood, int num_threads) {                \
    return dag::log_likelihood<Real>({emission, transition, num_targets, num_states, B, M, L,   \
                                      mantissa, exponent, info},                                \
                                     log_likelihood, num_threads);                              \
  }                                                                                             \
  extern "C" int dag_gradients_##name(                                                          \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, const Real* weight, Real* grad_emission,                \
      Real* grad_transition, int num_threads) {                                                 \
    return dag::gradients<Real>({emission, transition, num_targets, num_states, B, M, L,        \
                                 mantissa, exponent, info},                                     \
                                weight, grad_emission, grad_transition, num_threads);           \
  }                                                                                             \
  extern "C" int dag_viterbi_##name(                                                            \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, int64_t* path,                \
      Real* log_score, int num_threads) {                                                       \
    return dag::viterbi<Real>({emission, transition, num_targets, num_states, B, M, L, nullptr, \
                               nullptr, nullptr},                                               \
                              path, log_score, num_threads);                                    \
  }

DAG_INTERFACE(float, float32)
DAG_INTERFACE(double, float64)
