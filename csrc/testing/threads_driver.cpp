// Blocks on threads, without a kernel. Built without OpenMP for ThreadSanitizer, and with it.
//
//   threads_driver blocks    each block runs once, exceptions reach the caller, callers at once   prints "ok
//   <calls>" threads_driver sharing   the decision to share, on machines that are free and busy prints "ok
//   <machines>"

#include <cstdio>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/plan.h"
#include "cpu/sharing.h"
#include "testing/modes.h"

namespace fastlin {
namespace {

using Time = Sharing::Time;
using std::chrono::microseconds;
using std::chrono::milliseconds;

bool each_block_runs_once(std::int64_t blocks, int threads) {
  std::vector<int> runs(static_cast<std::size_t>(blocks), 0);
  std::vector<std::int64_t> on_thread(static_cast<std::size_t>(threads), 0);
  for_each_block(blocks, threads, [&](std::int64_t block, int thread) {
    ++runs[static_cast<std::size_t>(block)];
    ++on_thread.at(static_cast<std::size_t>(thread));
  });
  bool good = true;
  for (const int count : runs) good = good && count == 1;
  for (std::int64_t thread = blocks; thread < threads; ++thread) {
    good = good && on_thread[static_cast<std::size_t>(thread)] == 0;
  }
  if (!good) std::printf("%lld blocks on %d threads\n", static_cast<long long>(blocks), threads);
  return good;
}

// A block that fails on the calling thread only, or on another one only.
bool exception_reaches_the_caller(bool on_caller) {
  try {
    for_each_block(64, 4, [&](std::int64_t, int thread) {
      if ((thread == 0) == on_caller) throw std::bad_alloc();
      std::this_thread::sleep_for(milliseconds(1));
    });
  } catch (const std::bad_alloc&) {
    return each_block_runs_once(64, 4);
  }
  std::printf("an exception on %s thread was lost\n", on_caller ? "the calling" : "another");
  return false;
}

// On a new thread, which has not lost by sharing yet.
bool on_new_thread(const std::function<bool()>& holds) {
  bool good = false;
  std::thread([&] { good = holds(); }).join();
  return good;
}

// Blocks of a call on drawn sequences, m = 11, with 16 lanes.
std::int64_t blocks_of(std::int64_t B, std::int64_t R) {
  Source source{};
  source.d = 10, source.n = 50, source.K = 1;
  Problem<float> P{};
  P.B = B, P.n = 50, P.m = 11, P.K = 1, P.R = R, P.H = 1, P.source = &source;
  float dW = 0;
  Results<float> out{};
  out.dW = &dW;
  return Plan<float>(P, out, 16).blocks;
}

// Work for 128 threads comes in 128 blocks, that of a small call in one.
bool as_many_blocks_as_work() {
  const bool good = blocks_of(1 << 15, 50) == 128 && blocks_of(1 << 18, 1) == 128 && blocks_of(64, 1) == 1;
  if (!good) std::puts("too few or too many blocks");
  return good;
}

int blocks() {
  if (!as_many_blocks_as_work()) return 1;
  int calls = 0;
  for (const std::int64_t count : {0, 1, 2, 3, 7, 64, 129}) {
    for (const int threads : {1, 2, 3, 8}) {
      if (!on_new_thread([&] { return each_block_runs_once(count, threads); })) return 1;
      ++calls;
    }
  }
  for (const bool on_caller : {true, false}) {
    if (!on_new_thread([&] { return exception_reaches_the_caller(on_caller); })) return 1;
    ++calls;
  }
  bool mine = true, other = true;
  std::thread caller([&] {
    for (int i = 0; i < 100; ++i) other = each_block_runs_once(20, 3) && other;
  });
  for (int i = 0; i < 100; ++i) mine = each_block_runs_once(20, 3) && mine;
  caller.join();
  if (!mine || !other) return 1;
  std::printf("ok %d\n", calls + 200);
  return 0;
}

struct Calls {
  Time time{0}, alone{0};
  int shared = 0, count = 0;

  // Calls that take `worked` alone, until so much time has passed; took(i) is the time of the i-th shared
  // one.
  void run(Sharing& sharing, Time until, Time worked, const std::function<Time(int)>& took) {
    for (; time < until; ++count, alone += worked) {
      if (sharing.pays()) {
        const Time shared_time = took(shared++);
        sharing.shared(shared_time, worked);
        time += shared_time;
      } else {
        sharing.ran_alone(worked);
        time += worked;
      }
    }
  }
  double slowdown() const { return static_cast<double>(time.count()) / static_cast<double>(alone.count()); }
};

// At most 1.05 times the time alone on a busy machine, however shared calls lose time: all of them a little,
// or some of them much.
bool costs_little_when_busy(Time worked, Time stall, int every) {
  Sharing sharing;
  Calls calls;
  calls.run(sharing, std::chrono::seconds(4), worked,
            [&](int i) { return i % every == 0 ? worked + stall : worked; });
  if (calls.slowdown() <= 1.05) return true;
  std::printf("work %lld ns, stall %lld ns in every %d: %.3f, %d of %d shared\n",
              static_cast<long long>(worked.count()), static_cast<long long>(stall.count()), every,
              calls.slowdown(), calls.shared, calls.count);
  return false;
}

// Shares all calls, also when the machine is busy for a moment now and then.
bool shares_when_free(Time worked) {
  Sharing sharing;
  Calls calls;
  Time next = milliseconds(100);
  calls.run(sharing, std::chrono::seconds(4), worked, [&](int) {
    const bool hiccup = calls.time > next;
    if (hiccup) next += milliseconds(100);
    return worked / 2 + (hiccup ? Time(milliseconds(8)) : Time(0));
  });
  if (calls.shared == calls.count) return true;
  std::printf("free: %d of %d shared\n", calls.shared, calls.count);
  return false;
}

// The first calls after a pause wake threads, and lose a little.
bool shares_after_a_pause(Time worked) {
  Sharing sharing;
  Calls calls;
  calls.run(sharing, milliseconds(50), worked,
            [&](int i) { return i == 0 ? worked + microseconds(50) : worked * 9 / 10; });
  if (calls.shared == calls.count) return true;
  std::printf("after a pause: %d of %d shared\n", calls.shared, calls.count);
  return false;
}

// Shares again soon after the machine is free again.
bool shares_again(Time worked) {
  Sharing sharing;
  Calls busy, free;
  busy.run(sharing, std::chrono::seconds(4), worked, [&](int) { return worked + milliseconds(12); });
  free.run(sharing, milliseconds(2000), worked, [&](int) { return worked / 2; });
  const double most = 2.0 / (0.5 + 2 * 1.5) + 0.01;  // at most 0.5 s alone, then twice as fast
  if (free.slowdown() <= most) return true;
  std::printf("free again: %.3f\n", free.slowdown());
  return false;
}

int sharing() {
  int machines = 0;
  for (const Time worked : {microseconds(30), microseconds(300), microseconds(3000)}) {
    for (const Time stall : {microseconds(10), microseconds(300), microseconds(4000), microseconds(12000)}) {
      for (const int every : {1, 20}) {
        if (stall < worked / 20 || stall < every * microseconds(10)) continue;  // no loss to speak of
        if (!costs_little_when_busy(worked, stall, every)) return 1;
        ++machines;
      }
    }
    if (!shares_when_free(worked) || !shares_after_a_pause(worked) || !shares_again(worked)) return 1;
    machines += 3;
  }
  std::printf("ok %d\n", machines);
  return 0;
}

}  // namespace
}  // namespace fastlin

int main(int count, char** arguments) {
  return fastlin::run_mode(count, arguments, {{"blocks", fastlin::blocks}, {"sharing", fastlin::sharing}});
}
