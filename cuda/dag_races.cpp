// dag_races.cpp -- a random graph through all kernels, for a race detector: M L spread.
//
// Built with dag_fibers.cpp, -DDAG_OS_THREADS and -fsanitize=thread: a program of its own, since
// the detector must see it start.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" {
int dag_fibers_log_likelihood_float32(const float*, const float*, const int64_t*, const int64_t*,
                                      int64_t, int64_t, int64_t, float*, int32_t*, int32_t*,
                                      float*, uint64_t);
int dag_fibers_gradients_float32(const float*, const float*, const int64_t*, const int64_t*,
                                 int64_t, int64_t, int64_t, float*, int32_t*, int32_t*,
                                 const float*, float*, float*, uint64_t);
int dag_fibers_viterbi_float32(const float*, const float*, const int64_t*, const int64_t*,
                               int64_t, int64_t, int64_t, int64_t*, float*, int32_t*, uint64_t);
}

int main(int, char** arguments) {
  const int64_t M = std::atoi(arguments[1]), L = std::atoi(arguments[2]), tiles = (L + 31) / 32;
  std::mt19937 random(1);
  std::normal_distribution<float> score(-3, std::atof(arguments[3]));
  std::vector<float> emission(M * L), transition(L * L), mantissa(4 * M * tiles * 32);
  for (float& x : emission) x = score(random);
  for (float& x : transition) x = score(random);
  std::vector<int32_t> exponent(6 * M * tiles), info(2), came_from(M * L);
  std::vector<float> grad_emission(M * L), grad_transition(L * L);
  std::vector<int64_t> path(M);
  const float weight = 1;
  float log_likelihood, log_score;
  dag_fibers_log_likelihood_float32(emission.data(), transition.data(), &M, &L, 1, M, L,
                                    mantissa.data(), exponent.data(), info.data(),
                                    &log_likelihood, 0);
  dag_fibers_gradients_float32(emission.data(), transition.data(), &M, &L, 1, M, L,
                               mantissa.data(), exponent.data(), info.data(), &weight,
                               grad_emission.data(), grad_transition.data(), 0);
  dag_fibers_viterbi_float32(emission.data(), transition.data(), &M, &L, 1, M, L, path.data(),
                             &log_score, came_from.data(), 0);
  double targets = 0;  // every target is emitted once
  for (const float x : grad_emission) targets += x;
  std::printf("status %d, %.3f targets\n", info[0], targets);
}
