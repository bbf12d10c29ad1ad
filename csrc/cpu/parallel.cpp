#include "cpu/parallel.h"

#include <time.h>

#include <algorithm>
#include <exception>
#include <vector>

#include "cpu/sharing.h"

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#endif

namespace fastlin {
namespace {

using Clock = std::chrono::steady_clock;
using Time = Sharing::Time;

// For how long this thread has had a core.
Time core_time() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + Time(time.tv_nsec);
}

// The remaining blocks of a thread's share, on its own cache line.
struct alignas(64) Share {
  std::atomic<std::int64_t> next{0};
  std::int64_t end = 0;
};

// The blocks of a shared call. A thread first runs its own share, then blocks that others have left. The
// share is the same in every call of this size, so that its data are still in the thread's caches: 0.51 ms
// against 0.59 ms without (n = 50, m = 11, B = 8192, two threads).
class Job {
 public:
  Job(std::int64_t blocks, int threads, void (*run)(void*, std::int64_t, int), void* context)
      : run_(run),
        context_(context),
        shares_(static_cast<std::size_t>(std::min<std::int64_t>(threads, blocks))) {
    const auto team = static_cast<std::int64_t>(shares_.size());
    for (std::int64_t i = 0; i < team; ++i) {
      shares_[static_cast<std::size_t>(i)].next = blocks * i / team;
      shares_[static_cast<std::size_t>(i)].end = blocks * (i + 1) / team;
    }
  }

  void work(int thread) {
    const std::size_t team = shares_.size();
    if (static_cast<std::size_t>(thread) >= team) return;
    const Time start = core_time();
    for (std::size_t i = 0; i < team; ++i) {
      Share& share = shares_[(static_cast<std::size_t>(thread) + i) % team];
      while (!failed_.load(std::memory_order_relaxed)) {
        const std::int64_t block = share.next.fetch_add(1, std::memory_order_relaxed);
        if (block >= share.end) break;
        run(block, thread);
      }
    }
    worked_ += (core_time() - start).count();
  }

  // Core time of all blocks.
  Time worked() const { return Time(worked_.load()); }

  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  // An exception must not leave a thread of the team: it would end the process.
  void run(std::int64_t block, int thread) {
    try {
      run_(context_, block, thread);
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  void (*run_)(void*, std::int64_t, int);
  void* context_;
  std::vector<Share> shares_;
  std::atomic<Time::rep> worked_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

#ifdef _OPENMP

// Whether this thread shares its calls.
thread_local Sharing sharing;

// The team always has as many threads as torch's: for a smaller team libgomp ends the surplus threads, and
// starts new ones for the next call.
void run_on_team(Job& job, int threads) {
#pragma omp parallel num_threads(threads)
  job.work(omp_get_thread_num());
}

#else

// For the sanitizers, which do not know libgomp: every call is shared.
struct {
  bool pays() const { return true; }
  void ran_alone(Time) {}
  void shared(Time, Time) {}
} sharing;

void run_on_team(Job& job, int threads) {
  std::vector<std::thread> team;
  for (int thread = 1; thread < threads; ++thread) team.emplace_back([&job, thread] { job.work(thread); });
  job.work(0);
  for (std::thread& member : team) member.join();
}

#endif

}  // namespace

void run_blocks(std::int64_t blocks, int threads, void (*run)(void*, std::int64_t, int), void* context) {
  const Clock::time_point start = Clock::now();
  if (!sharing.pays()) {
    for (std::int64_t block = 0; block < blocks; ++block) run(context, block, 0);
    sharing.ran_alone(Clock::now() - start);
    return;
  }
  Job job(blocks, threads, run, context);
  run_on_team(job, threads);
  sharing.shared(Clock::now() - start, job.worked());
  job.rethrow();
}

}  // namespace fastlin
