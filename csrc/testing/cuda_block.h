// Blocks of CUDA threads on the CPU, one block after another and one thread at a time: a thread runs until it
// waits for others. The device's order says which thread runs next. If it is always the first (or last) one
// that can, a warp runs as far ahead of the others as barriers allow.
//
// What hardware leaves undefined is an error here: threads that wait at different barriers or return before
// one, lanes that disagree on a collective or are missing from its mask, and deadlock.
#pragma once

#include <cstring>
#include <string>

#include "testing/cuda_copies.h"
#include "testing/cuda_fibers.h"

struct uint3 {
  unsigned x, y, z;
};

namespace fastlin {
namespace emulated {

constexpr unsigned kLanes = 32, kMaxThreads = 1024, kNamedBarriers = 16;

enum class Op { kNothing, kBarrier, kNamedBarrier, kSyncWarp, kShuffle, kBallot, kEnd };

// What a thread waits for, and where in the source.
struct Wait {
  Op op = Op::kNothing;
  // Participating lanes, and the lane whose value it reads; of a named barrier its number and its threads.
  unsigned mask = 0, source = 0;
  std::uint64_t value = 0;  // sent, then received
  const char* file = "";
  int line = 0;
};

struct Thread : Fiber {
  uint3 index{};
  Wait wait;
};

// State that the fibers share. The sanitizers do not watch it, hence no containers.
struct Running {
  Thread threads[kMaxThreads];
  Thread* thread = nullptr;
  uint3 block_index{}, block_size{}, grid_size{};
  unsigned char* shared_memory = nullptr;
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
};
inline Running running;

// Called on a thread's fiber: waits, then returns the value that the thread receives.
FASTLIN_UNWATCHED inline std::uint64_t wait_for(const Wait& wait) {
  Thread* self = running.thread;
  self->wait = wait;
  leave(*self, false);
  return self->wait.value;
}

FASTLIN_UNWATCHED inline void thread_main() noexcept {
  arrive();
  running.body(running.arguments);
  running.thread->wait.op = Op::kEnd;
  leave(*running.thread, true);
  std::abort();
}

class Block {
 public:
  // Which ready thread runs next: the first (order 0), the last (1), or a random one (else: `order` is the
  // seed).
  Block(unsigned count, unsigned order, const BlockFibers& fibers)
      : count_(count), order_(order), random_(order) {
    begin();
    for (unsigned i = 0; i < count; ++i) {
      Thread& thread = running.threads[i];
      const uint3& size = running.block_size;
      thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
      thread.wait = {};
      start(thread, fibers.stacks.at(i), fibers.tsan_fibers[i], thread_main);
      ready_[i / kLanes] |= 1u << i % kLanes;
      alive_[i / kLanes] |= 1u << i % kLanes;
    }
  }

  // Runs the block; returns a description of its error, or an empty string.
  std::string run() {
    unsigned at = 0;
    while (problem_.empty() && pick(at)) {
      running.thread = &running.threads[at];
      ready_[at / kLanes] &= ~(1u << at % kLanes);
      resume(*running.thread);
      handle_wait(at);
    }
    running.thread = nullptr;
    if (problem_.empty() && ended_ < count_) problem_ = "deadlock: " + waiting();
    return problem_;
  }

 private:
  bool pick(unsigned& at) {
    const unsigned warps = (count_ + kLanes - 1) / kLanes;
    unsigned first = 0;
    if (order_ > 1) first = next_random() % (warps * kLanes);
    for (unsigned i = 0; i <= warps; ++i) {
      const unsigned warp = order_ == 1 ? (2 * warps - 1 - i) % warps : (first / kLanes + i) % warps;
      // The search ends with all lanes of the warp in which it started.
      const unsigned from = order_ > 1 && i == 0 ? ~0u << first % kLanes : ~0u;
      const unsigned lanes = ready_[warp] & from;
      if (lanes == 0) continue;
      at = warp * kLanes + (order_ == 1 ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes));
      return true;
    }
    return false;
  }

  void handle_wait(unsigned at) {
    const unsigned warp = at / kLanes, lane = 1u << at % kLanes;
    const Wait& wait = running.threads[at].wait;
    if (wait.op == Op::kEnd) {
      if (!end_copies(at)) problem_ = "a thread ended with copies that it had not waited for";
      ++ended_;
      alive_[warp] &= ~lane;
      // Waiting lanes do not need a lane that has returned.
      unsigned left = waiting_[warp];
      while (left != 0 && problem_.empty()) {
        const unsigned mask = running.threads[warp * kLanes + __builtin_ctz(left)].wait.mask;
        left &= ~mask;
        collect(warp, mask);
      }
    } else if (wait.op == Op::kBarrier) {
      if (++at_barrier_ == count_) pass_barrier();
    } else if (wait.op == Op::kNamedBarrier) {
      if (wait.mask >= kNamedBarriers || wait.source % kLanes != 0 || wait.source > count_) {
        problem_ = "a barrier of wrong number or threads: " + location(wait);
      } else if (++at_named_[wait.mask] == wait.source) {
        pass_named(wait.mask);
      }
    } else if ((wait.mask & lane) == 0) {
      problem_ = "a lane is not in the mask of its own collective: " + location(wait);
    } else {
      waiting_[warp] |= lane;
      collect(warp, wait.mask);
    }
  }

  void pass_barrier() {
    const Fiber* all[kMaxThreads];
    for (unsigned i = 0; i < count_; ++i) {
      if (!same_location(running.threads[i].wait, running.threads[0].wait)) {
        problem_ = "threads wait at different barriers: " + waiting();
        return;
      }
      all[i] = &running.threads[i];
    }
    order(all, static_cast<int>(count_));
    at_barrier_ = 0;
    for (unsigned warp = 0; warp * kLanes < count_; ++warp) ready_[warp] = alive_[warp];
  }

  // As hardware: threads may wait for a named barrier at different places in the source.
  void pass_named(unsigned number) {
    const Fiber* all[kMaxThreads];
    int members = 0;
    for (unsigned i = 0; i < count_; ++i) {
      Wait& wait = running.threads[i].wait;
      if (wait.op != Op::kNamedBarrier || wait.mask != number) continue;
      wait.op = Op::kNothing;
      all[members++] = &running.threads[i];
      ready_[i / kLanes] |= 1u << i % kLanes;
    }
    order(all, members);
    at_named_[number] = 0;
  }

  // Resumes the lanes of a mask once all of them wait. Only __syncwarp orders their memory accesses.
  void collect(unsigned warp, unsigned mask) {
    const unsigned lanes = mask & alive_[warp];
    if ((lanes & ~waiting_[warp]) != 0) return;
    Thread* threads = running.threads + warp * kLanes;
    const Wait& first = threads[__builtin_ctz(lanes)].wait;
    std::uint64_t values[kLanes];
    std::memset(values, 0xff, sizeof values);  // garbage for lanes that do not take part
    const Fiber* group[kLanes];
    int members = 0;
    std::uint64_t votes = 0;
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
      const Wait& wait = threads[lane].wait;
      if (wait.mask != mask || wait.op != first.op || !same_location(wait, first)) {
        problem_ = "lanes of a warp disagree on a collective: " + waiting();
        return;
      }
      values[lane] = wait.value;
      votes |= static_cast<std::uint64_t>(wait.value != 0) << lane;
      group[members++] = &threads[lane];
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      Wait& wait = threads[__builtin_ctz(left)].wait;
      wait.value = first.op == Op::kBallot ? votes : values[wait.source % kLanes];
    }
    if (first.op == Op::kSyncWarp) order(group, members);
    waiting_[warp] &= ~lanes;
    ready_[warp] |= lanes;
  }

  static bool same_location(const Wait& a, const Wait& b) {
    return a.line == b.line && std::strcmp(a.file, b.file) == 0;
  }
  static std::string location(const Wait& wait) {
    const char* slash = std::strrchr(wait.file, '/');
    return std::string(slash == nullptr ? wait.file : slash + 1) + ":" + std::to_string(wait.line);
  }

  // Counts the threads at each place in the source.
  std::string waiting() const {
    std::string text = ended_ == 0 ? "" : std::to_string(ended_) + " have returned";
    bool counted[kMaxThreads] = {};
    for (unsigned i = 0; i < count_; ++i) {
      const Wait& wait = running.threads[i].wait;
      if (counted[i] || wait.op == Op::kEnd || wait.op == Op::kNothing) continue;
      int same = 0;
      for (unsigned j = i; j < count_; ++j) {
        const Wait& other = running.threads[j].wait;
        if (other.op != wait.op || other.mask != wait.mask || !same_location(other, wait)) continue;
        counted[j] = true;
        ++same;
      }
      text += (text.empty() ? "" : ", ") + std::to_string(same) + " at " + location(wait);
    }
    return text;
  }

  unsigned next_random() {  // upper half of an LCG
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>(random_ >> 33);
  }

  unsigned count_, order_, ended_ = 0, at_barrier_ = 0, at_named_[kNamedBarriers] = {};
  std::uint64_t random_;
  unsigned ready_[kMaxThreads / kLanes] = {}, alive_[kMaxThreads / kLanes] = {};
  unsigned waiting_[kMaxThreads / kLanes] = {};  // for other lanes of the warp
  std::string problem_;
};

}  // namespace emulated
}  // namespace fastlin
