// Runs fixed blocks of work on torch's OpenMP threads. Any thread may run a block: callers keep sums per
// block and combine them in block order, so that results have the same bits for any number of threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels.h"

namespace fastlin {

// Whether a call must stop. The thread that made the call polls the interrupt every 20 ms; the others read
// the flag.
class Stop {
 public:
  explicit Stop(Interrupt interrupt) : interrupt_(interrupt), polled_(std::chrono::steady_clock::now()) {}

  bool requested(int thread) {
    if (thread == 0 && interrupt_.should_stop != nullptr) {
      const auto time = std::chrono::steady_clock::now();
      if (time - polled_ > std::chrono::milliseconds(20)) {
        polled_ = time;
        if (interrupt_.should_stop(interrupt_.state)) stopped_.store(true, std::memory_order_relaxed);
      }
    }
    return stopped_.load(std::memory_order_relaxed);
  }

 private:
  Interrupt interrupt_;
  std::chrono::steady_clock::time_point polled_;
  std::atomic<bool> stopped_{false};
};

// Calls run(context, block, thread) for each block, with thread < min(threads, blocks), and rethrows the
// first exception of a block on the calling thread; the blocks after it may be left out.
void run_blocks(std::int64_t blocks, int threads, void (*run)(void* context, std::int64_t block, int thread),
                void* context);

// The same for f(block, thread).
template <class F>
void for_each_block(std::int64_t blocks, int threads, F f) {
  if (threads <= 1 || blocks <= 1) {
    for (std::int64_t block = 0; block < blocks; ++block) f(block, 0);
    return;
  }
  const auto run = [](void* context, std::int64_t block, int thread) {
    (*static_cast<F*>(context))(block, thread);
  };
  run_blocks(blocks, threads, run, &f);
}

}  // namespace fastlin
