// Work in fixed blocks on torch's OpenMP threads. Which thread takes a block is left to chance; results are
// kept per block and combined in block order, so that they have the same bits for any number of threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

namespace fastlin {

// Whether a call has been asked to stop. The thread that made the call asks, every 20 ms; the others look.
class Stop {
 public:
  explicit Stop(Interrupt interrupt) : interrupt_(interrupt), asked_(std::chrono::steady_clock::now()) {}

  bool now(int thread) {
    if (thread == 0 && interrupt_.asked != nullptr) {
      const auto time = std::chrono::steady_clock::now();
      if (time - asked_ > std::chrono::milliseconds(20)) {
        asked_ = time;
        if (interrupt_.asked(interrupt_.state)) stopped_.store(true, std::memory_order_relaxed);
      }
    }
    return stopped_.load(std::memory_order_relaxed);
  }

 private:
  Interrupt interrupt_;
  std::chrono::steady_clock::time_point asked_;
  std::atomic<bool> stopped_{false};
};

// Calls f(block, thread) for each block, with thread < min(threads, blocks). The team always has the size
// that torch's has: libgomp ends the threads that a smaller team leaves over, and starts them anew for the
// next call.
template <class F>
void for_each_block(std::int64_t blocks, int threads, F f) {
  if (threads <= 1 || blocks <= 1) {
    for (std::int64_t block = 0; block < blocks; ++block) f(block, 0);
    return;
  }
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int thread) {
    for (;;) {
      const std::int64_t block = next.fetch_add(1, std::memory_order_relaxed);
      if (block >= blocks) break;
      f(block, thread);
    }
  };
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
  if (omp_get_thread_num() < blocks) work(omp_get_thread_num());
#else
  std::vector<std::thread> team;
  for (int thread = 1; thread < threads && thread < blocks; ++thread) team.emplace_back(work, thread);
  work(0);
  for (std::thread& member : team) member.join();
#endif
}

}  // namespace fastlin
