// Blocks of CUDA threads on the CPU, one block after another and one thread at a time: a thread runs until it
// waits for others. Which of those that may run goes on is the order of the device: with the first (or last)
// of them a warp runs as far ahead of the others as barriers let it.
//
// What hardware leaves undefined is an error here: threads at different barriers or gone before one, lanes
// that disagree on a collective or are not in its mask, and waiting for ever.
#pragma once

#include <cstring>
#include <string>

#include "testing/cuda_fibers.h"

struct uint3 {
  unsigned x, y, z;
};

namespace fastlin {
namespace emulated {

constexpr unsigned kLanes = 32, kMaxThreads = 1024;

enum class Op { kNothing, kBarrier, kSyncWarp, kShuffle, kBallot, kEnd };

// What a thread waits for, and where it says so in the source.
struct Wait {
  Op op = Op::kNothing;
  unsigned mask = 0, source = 0;  // lanes that take part, and the one whose value is wanted
  std::uint64_t value = 0;        // given, then got
  const char* file = "";
  int line = 0;
};

struct Thread : Fiber {
  uint3 index{};
  Wait wait;
};

// What the fibers see: they run unwatched in it, hence no containers.
struct Running {
  Thread threads[kMaxThreads];
  Thread* thread = nullptr;
  uint3 block_index{}, block_size{}, grid_size{};
  unsigned char* shared_memory = nullptr;
  void (*body)(const void*) = nullptr;
  const void* arguments = nullptr;
};
inline Running running;

// A thread's wait, from its fiber; returns the value that it gets.
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
  // `order` is 0 for the first thread that may run, 1 for the last one, else the seed of any.
  Block(unsigned count, unsigned order, const Crew& crew) : count_(count), order_(order), random_(order) {
    begin();
    for (unsigned i = 0; i < count; ++i) {
      Thread& thread = running.threads[i];
      const uint3& size = running.block_size;
      thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
      thread.wait = {};
      start(thread, crew.stacks.at(i), crew.races[i], thread_main);
      ready_[i / kLanes] |= 1u << i % kLanes;
      alive_[i / kLanes] |= 1u << i % kLanes;
    }
  }

  // Runs the block; returns what is wrong with it, or nothing.
  std::string run() {
    unsigned at = 0;
    while (problem_.empty() && pick(at)) {
      running.thread = &running.threads[at];
      ready_[at / kLanes] &= ~(1u << at % kLanes);
      resume(*running.thread);
      look_at(at);
    }
    running.thread = nullptr;
    if (problem_.empty() && ended_ < count_) problem_ = "threads wait for ever: " + waiting();
    return problem_;
  }

 private:
  bool pick(unsigned& at) {
    const unsigned warps = (count_ + kLanes - 1) / kLanes;
    unsigned first = 0;
    if (order_ > 1) first = next_random() % (warps * kLanes);
    for (unsigned i = 0; i <= warps; ++i) {
      const unsigned warp = order_ == 1 ? (2 * warps - 1 - i) % warps : (first / kLanes + i) % warps;
      // The warp that is started within is looked at again in the end, all of it.
      const unsigned from = order_ > 1 && i == 0 ? ~0u << first % kLanes : ~0u;
      const unsigned lanes = ready_[warp] & from;
      if (lanes == 0) continue;
      at = warp * kLanes + (order_ == 1 ? 31 - __builtin_clz(lanes) : __builtin_ctz(lanes));
      return true;
    }
    return false;
  }

  void look_at(unsigned at) {
    const unsigned warp = at / kLanes, lane = 1u << at % kLanes;
    const Wait& wait = running.threads[at].wait;
    if (wait.op == Op::kEnd) {
      ++ended_;
      alive_[warp] &= ~lane;
      // Lanes that are gone are not waited for.
      unsigned left = waiting_[warp];
      while (left != 0 && problem_.empty()) {
        const unsigned mask = running.threads[warp * kLanes + __builtin_ctz(left)].wait.mask;
        left &= ~mask;
        collect(warp, mask);
      }
    } else if (wait.op == Op::kBarrier) {
      if (++at_barrier_ == count_) pass_barrier();
    } else if ((wait.mask & lane) == 0) {
      problem_ = "a lane is not in the mask of its own collective: " + place(wait);
    } else {
      waiting_[warp] |= lane;
      collect(warp, wait.mask);
    }
  }

  void pass_barrier() {
    const Fiber* all[kMaxThreads];
    for (unsigned i = 0; i < count_; ++i) {
      if (!same_place(running.threads[i].wait, running.threads[0].wait)) {
        problem_ = "threads wait at different barriers: " + waiting();
        return;
      }
      all[i] = &running.threads[i];
    }
    order(all, static_cast<int>(count_));
    at_barrier_ = 0;
    for (unsigned warp = 0; warp * kLanes < count_; ++warp) ready_[warp] = alive_[warp];
  }

  // Lets the lanes of a mask go on if all of them are there. Only __syncwarp orders what they did.
  void collect(unsigned warp, unsigned mask) {
    const unsigned lanes = mask & alive_[warp];
    if ((lanes & ~waiting_[warp]) != 0) return;
    Thread* threads = running.threads + warp * kLanes;
    const Wait& first = threads[__builtin_ctz(lanes)].wait;
    std::uint64_t given[kLanes];
    std::memset(given, 0xff, sizeof given);  // lanes that are not there give nothing of use
    const Fiber* group[kLanes];
    int members = 0;
    std::uint64_t votes = 0;
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      const unsigned lane = static_cast<unsigned>(__builtin_ctz(left));
      const Wait& wait = threads[lane].wait;
      if (wait.mask != mask || wait.op != first.op || !same_place(wait, first)) {
        problem_ = "lanes of a warp disagree on a collective: " + waiting();
        return;
      }
      given[lane] = wait.value;
      votes |= static_cast<std::uint64_t>(wait.value != 0) << lane;
      group[members++] = &threads[lane];
    }
    for (unsigned left = lanes; left != 0; left &= left - 1) {
      Wait& wait = threads[__builtin_ctz(left)].wait;
      wait.value = first.op == Op::kBallot ? votes : given[wait.source % kLanes];
    }
    if (first.op == Op::kSyncWarp) order(group, members);
    waiting_[warp] &= ~lanes;
    ready_[warp] |= lanes;
  }

  static bool same_place(const Wait& a, const Wait& b) {
    return a.line == b.line && std::strcmp(a.file, b.file) == 0;
  }
  static std::string place(const Wait& wait) {
    const char* slash = std::strrchr(wait.file, '/');
    return std::string(slash == nullptr ? wait.file : slash + 1) + ":" + std::to_string(wait.line);
  }

  // How many threads are where.
  std::string waiting() const {
    std::string text = ended_ == 0 ? "" : std::to_string(ended_) + " have ended";
    bool told[kMaxThreads] = {};
    for (unsigned i = 0; i < count_; ++i) {
      const Wait& wait = running.threads[i].wait;
      if (told[i] || wait.op == Op::kEnd || wait.op == Op::kNothing) continue;
      int same = 0;
      for (unsigned j = i; j < count_; ++j) {
        const Wait& other = running.threads[j].wait;
        if (other.op != wait.op || other.mask != wait.mask || !same_place(other, wait)) continue;
        told[j] = true;
        ++same;
      }
      text += (text.empty() ? "" : ", ") + std::to_string(same) + " at " + place(wait);
    }
    return text;
  }

  unsigned next_random() {  // an LCG's upper half
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<unsigned>(random_ >> 33);
  }

  unsigned count_, order_, ended_ = 0, at_barrier_ = 0;
  std::uint64_t random_;
  unsigned ready_[kMaxThreads / kLanes] = {}, alive_[kMaxThreads / kLanes] = {};
  unsigned waiting_[kMaxThreads / kLanes] = {};  // for other lanes of the warp
  std::string problem_;
};

}  // namespace emulated
}  // namespace fastlin
