// dag_fibers.cpp -- the kernels of dag_cuda.cu, run block by block on a CPU by fiber_shim.h.
//
// For tests. The functions take the arguments of the CUDA library, with host pointers and, in place
// of the stream, a seed that shuffles blocks and threads (0 keeps them in order). They return 0, or
// 1 if threads of a block waited for others in vain.
#include <numeric>

#include "dag_block_gradient.h"
#include "dag_block_sweep.h"
#include "dag_block_viterbi.h"
#include "fiber_shim.h"

namespace dag {

using Context = FiberThread;

// Runs kernel(context, block) on all threads of all blocks of a launch.
template <class Kernel>
int launch(int64_t num_blocks, int num_threads, size_t shared_bytes, uint64_t seed,
           const Kernel& kernel) {
  std::vector<int64_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(seed);
  if (seed) std::shuffle(order.begin(), order.end(), random);
  FiberBlock threads(seed);
  for (const int64_t block : order) {
    const bool is_done = threads.run(num_threads, shared_bytes, [&](int thread) {
      Context c(&threads, thread, num_threads);
      kernel(c, block);
    });
    if (!is_done) return 1;
  }
  return 0;
}

template <class Real>
int log_likelihood(const Launch<Real>& all, Real* log_likelihood, uint64_t seed) {
  const int64_t nt = all.num_tiles();
  int failed = launch(all.B * nt, kScanThreads, kScanThreads * sizeof(Real), seed,
                      [&](Context& c, int64_t k) { scan_edges(c, all, k / nt, int(k % nt)); });
  failed |= launch(all.B * 2, kSweepThreads, Shared<Real>::bytes(all.M), seed,
                   [&](Context& c, int64_t k) { sweep_row(c, all, k / 2, int(k % 2)); });
  return failed | launch(all.B, kFinishThreads, kFinishBytes, seed,
                         [&](Context& c, int64_t b) { finish_row(c, all, b, log_likelihood); });
}

template <class Real>
int gradients(const Launch<Real>& all, const Real* weight, Real* grad_emission,
              Real* grad_transition, uint64_t seed) {
  const int64_t num = gradient_blocks(all.num_tiles());
  return launch(all.B * num, kGradientThreads, gradient_bytes<Real>(), seed,
                [&](Context& c, int64_t k) {
                  gradient_job(c, all, k / num, int(k % num), weight, grad_emission,
                               grad_transition);
                });
}

template <class Real>
int viterbi(const Launch<Real>& all, int64_t* path, Real* log_score, int32_t* came_from,
            uint64_t seed) {
  return launch(all.B, kViterbiThreads, viterbi_bytes(all.L), seed,
                [&](Context& c, int64_t b) {
                  best_path(c, all, b, path + b * all.M, log_score + b,
                            came_from + b * all.M * all.L);
                });
}

}  // namespace dag

#define DAG_INTERFACE(Real, name)                                                               \
  extern "C" int dag_fibers_log_likelihood_##name(                                              \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, Real* log_likelihood, uint64_t seed) {                  \
    return dag::log_likelihood<Real>({emission, transition, num_targets, num_states, B, M, L,   \
                                      mantissa, exponent, info},                                \
                                     log_likelihood, seed);                                     \
  }                                                                                             \
  extern "C" int dag_fibers_gradients_##name(                                                   \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, Real* mantissa,               \
      int32_t* exponent, int32_t* info, const Real* weight, Real* grad_emission,                \
      Real* grad_transition, uint64_t seed) {                                                   \
    return dag::gradients<Real>({emission, transition, num_targets, num_states, B, M, L,        \
                                 mantissa, exponent, info},                                     \
                                weight, grad_emission, grad_transition, seed);                  \
  }                                                                                             \
  extern "C" int dag_fibers_viterbi_##name(                                                     \
      const Real* emission, const Real* transition, const int64_t* num_targets,                 \
      const int64_t* num_states, int64_t B, int64_t M, int64_t L, int64_t* path,                \
      Real* log_score, int32_t* came_from, uint64_t seed) {                                     \
    return dag::viterbi<Real>({emission, transition, num_targets, num_states, B, M, L, nullptr, \
                               nullptr, nullptr},                                               \
                              path, log_score, came_from, seed);                                \
  }

DAG_INTERFACE(float, float32)
#ifndef DAG_ONLY_FLOAT32
DAG_INTERFACE(double, float64)
#endif
