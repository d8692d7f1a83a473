// fiber_shim.h -- runs one thread block on a CPU, with fibers as its threads, for tests.
//
// A fiber runs until it reaches a barrier or ends; then the next one runs. Their order is shuffled
// anew for each round (seed 0 keeps it). So what two threads do between two barriers happens sooner
// or later in either order, as it may on a GPU; only true simultaneity is missing. Shared memory
// starts as NaN. Threads that wait for others that have already ended are reported.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace dag {

class FiberBlock {
 public:
  explicit FiberBlock(uint64_t seed) : seed_(seed), random_(seed) {}

  // Runs body(thread) for all threads; false if some waited for others that never came.
  template <class Body>
  bool run(int num_threads, size_t shared_bytes, const Body& body) {
    call_ = [](const void* function, int thread) { (*static_cast<const Body*>(function))(thread); };
    body_ = &body;
    shared_.assign(shared_bytes / sizeof(double) + 1, NAN);
    // Shared memory holds floats, doubles and integers; all bits set is NaN in both float types.
    std::memset(shared_.data(), 0xff, shared_.size() * sizeof(double));
    exchange_.assign(num_threads * 2, 0);
    state_.assign(num_threads, kReady);
    if (int(fibers_.size()) < num_threads) fibers_.resize(num_threads);
    order_.resize(num_threads);
    for (int k = 0; k < num_threads; ++k) {
      order_[k] = k;
      start(k);
    }
    for (;;) {
      if (seed_) std::shuffle(order_.begin(), order_.end(), random_);
      bool has_run = false;
      for (const int k : order_) {
        if (state_[k] != kReady) continue;
        has_run = true;
        current_ = k;
        swapcontext(&main_, &fibers_[k].context);
        release_warp(k / 32, num_threads);
      }
      if (has_run) continue;
      if (all_are(kDone, 0, num_threads)) return true;
      if (!all_are(kAtBarrier, 0, num_threads)) return false;
      std::fill(state_.begin(), state_.end(), kReady);
    }
  }

  void wait_for_all() { wait(kAtBarrier); }
  void wait_for_warp(int) { wait(kAtWarpBarrier); }
  double* shared() { return shared_.data(); }
  uint64_t& slot(int thread, int parity) { return exchange_[thread * 2 + parity]; }

 private:
  enum State { kReady, kAtBarrier, kAtWarpBarrier, kDone };

  struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(64 << 10);
  };

  void wait(State where) {
    state_[current_] = where;
    swapcontext(&fibers_[current_].context, &main_);
  }

  static void enter(unsigned high, unsigned low) {
    auto* block = reinterpret_cast<FiberBlock*>(uintptr_t(high) << 32 | low);
    const int thread = block->current_;
    block->call_(block->body_, thread);
    block->wait(kDone);
  }

  void start(int k) {
    Fiber& fiber = fibers_[k];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(enter), 2, unsigned(self >> 32),
                unsigned(self));
  }

  bool all_are(State state, int begin, int end) const {
    return std::all_of(state_.begin() + begin, state_.begin() + end,
                       [=](State s) { return s == state; });
  }

  void release_warp(int warp, int num_threads) {
    const int begin = warp * 32, end = std::min(begin + 32, num_threads);
    if (!all_are(kAtWarpBarrier, begin, end)) return;
    std::fill(state_.begin() + begin, state_.begin() + end, kReady);
  }

  uint64_t seed_;
  std::mt19937_64 random_;
  ucontext_t main_;
  std::vector<Fiber> fibers_;
  std::vector<State> state_;
  std::vector<int> order_;
  std::vector<double> shared_;
  std::vector<uint64_t> exchange_;
  void (*call_)(const void*, int) = nullptr;
  const void* body_ = nullptr;
  int current_ = 0;
};

// The context of one thread of a block on a CPU, as described in dag_block.h.
class FiberThread {
 public:
  FiberThread(FiberBlock* block, int thread, int num_threads)
      : block_(block), thread_(thread), num_threads_(num_threads) {}

  int thread() const { return thread_; }
  int num_threads() const { return num_threads_; }
  void sync() { block_->wait_for_all(); }
  void sync_warp() { block_->wait_for_warp(thread_); }
  template <class T>
  T from_previous_lane(T x) {
    parity_ ^= 1;  // the slots of the previous exchange may not have been read yet
    std::memcpy(&block_->slot(thread_, parity_), &x, sizeof x);
    sync_warp();
    std::memcpy(&x, &block_->slot(thread_ - (thread_ % 32 > 0), parity_), sizeof x);
    return x;
  }
  template <class Real>
  Real* shared() {
    return reinterpret_cast<Real*>(block_->shared());
  }
  double exp2(double x) const { return std::exp2(x); }
  float exp2(float x) const {
#ifdef DAG_ROUGH_EXP2  // an error as large as a GPU's may be, of either sign
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return std::exp2(x) * (bits % 2 ? 1 + 0x1p-22f : 1 - 0x1p-22f);
#else
    return std::exp2(x);
#endif
  }
  double exp(double x) const { return std::exp(x); }
  double log(double x) const { return std::log(x); }
  template <class Real>
  void load4(Real* to, const Real* from) const {
    std::memcpy(to, from, 4 * sizeof(Real));
  }

 private:
  FiberBlock* block_;
  int thread_, num_threads_, parity_ = 0;
};

}  // namespace dag
