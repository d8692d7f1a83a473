// thread_shim.h -- runs one thread block as threads of the operating system, for a race detector.
//
// In the place of FiberBlock (fiber_shim.h). Under -fsanitize=thread every pair of accesses that
// no barrier orders is reported, whichever of them came first in this run.
#pragma once
#include <pthread.h>

#include <thread>

#include "fiber_shim.h"

namespace dag {

class ThreadBlock {
 public:
  explicit ThreadBlock(uint64_t) {}  // the system decides on the order

  template <class Body>
  bool run(int num_threads, size_t shared_bytes, const Body& body) {
    shared_.assign(shared_bytes / sizeof(double) + 1, NAN);
    exchange_.assign(num_threads * 2, 0);
    warps_.resize(num_threads / 32);
    pthread_barrier_init(&all_, nullptr, num_threads);
    for (auto& warp : warps_) pthread_barrier_init(&warp, nullptr, 32);
    std::vector<std::thread> threads;
    for (int k = 0; k < num_threads; ++k) threads.emplace_back([&body, k] { body(k); });
    for (auto& thread : threads) thread.join();
    for (auto& warp : warps_) pthread_barrier_destroy(&warp);
    pthread_barrier_destroy(&all_);
    return true;
  }

  void wait_for_all() { pthread_barrier_wait(&all_); }
  void wait_for_warp(int thread) { pthread_barrier_wait(&warps_[thread / 32]); }
  double* shared() { return shared_.data(); }
  uint64_t& slot(int thread, int parity) { return exchange_[thread * 2 + parity]; }

 private:
  pthread_barrier_t all_;
  std::vector<pthread_barrier_t> warps_;
  std::vector<double> shared_;
  std::vector<uint64_t> exchange_;
};

}  // namespace dag
