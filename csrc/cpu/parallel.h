// Runs fixed blocks of work on torch's OpenMP threads. Any thread may run a block: callers keep sums per
// block and combine them in block order, so that results have the same bits for any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "kernels.h"

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#endif

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

// The remaining blocks of a thread's share, on its own cache line.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

// Calls f(block, thread) for each block, with thread < min(threads, blocks). A thread first runs its own
// share, then blocks that others have left. The share is the same in every call of this size, so that its
// data are still in the thread's caches: 0.51 ms against 0.59 ms without (n = 50, m = 11, B = 8192, two
// threads). The team always has as many threads as torch's: for a smaller team libgomp ends the surplus
// threads, and starts new ones for the next call.
template <class F>
void for_each_block(std::int64_t blocks, int threads, F f) {
  if (threads <= 1 || blocks <= 1) {
    for (std::int64_t block = 0; block < blocks; ++block) f(block, 0);
    return;
  }
  const std::int64_t team_size = std::min<std::int64_t>(threads, blocks);
  std::vector<Share> shares(static_cast<std::size_t>(team_size));
  for (std::int64_t i = 0; i < team_size; ++i) {
    shares[static_cast<std::size_t>(i)].next = blocks * i / team_size;
    shares[static_cast<std::size_t>(i)].end = blocks * (i + 1) / team_size;
  }
  const auto work = [&](int thread) {
    for (std::int64_t i = 0; i < team_size; ++i) {
      Share& share = shares[static_cast<std::size_t>((thread + i) % team_size)];
      for (;;) {
        const std::int64_t block = share.next.fetch_add(1, std::memory_order_relaxed);
        if (block >= share.end) break;
        f(block, thread);
      }
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
