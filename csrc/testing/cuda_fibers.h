// Fibers for the emulation of CUDA: each CUDA thread has a stack of its own, and the thread that launched the
// kernel, here the host, switches between them. AddressSanitizer is told which stack is in use;
// ThreadSanitizer takes each fiber for a thread that nothing orders but what `order` says.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__) && !defined(FASTLIN_UCONTEXT)
#define FASTLIN_UCONTEXT
#endif
#ifdef FASTLIN_UCONTEXT
#include <ucontext.h>
#endif

// Host and fibers share the variables of the emulation without synchronising: its functions are not watched.
#define FASTLIN_UNWATCHED __attribute__((noinline, no_sanitize("thread"), no_sanitize("address")))

namespace fastlin {
namespace emulated {

#ifdef __SANITIZE_THREAD__
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStackBytes = 512 * 1024;  // only what is touched takes memory

// Stacks, each above a page that must not be touched: one that overflows stops the program.
class Stacks {
 public:
  explicit Stacks(std::size_t count) : bytes_(count * kStackBytes) {
    void* mapped =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = static_cast<unsigned char*>(mapped);
    bool failed = mapped == MAP_FAILED;
    for (std::size_t i = 0; i < count && !failed; ++i) {
      failed = mprotect(base_ + i * kStackBytes, kPage, PROT_NONE) != 0;
    }
    if (!failed) return;
    std::fputs("emulated CUDA: no memory for the stacks of a block\n", stderr);
    std::abort();
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() {
#ifdef __SANITIZE_ADDRESS__
    // Fibers that were given up left their frames' marks.
    __asan_unpoison_memory_region(base_, bytes_);
#endif
    munmap(base_, bytes_);
  }

  unsigned char* at(std::size_t i) const { return base_ + i * kStackBytes + kPage; }
  static constexpr std::size_t kUsable = kStackBytes - kPage;

 private:
  std::size_t bytes_;
  unsigned char* base_;
};

#ifdef FASTLIN_UCONTEXT

using Context = ucontext_t;

inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = Stacks::kUsable;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
FASTLIN_UNWATCHED inline void exchange(Context& from, Context& to) { swapcontext(&from, &to); }

#else

// swapcontext makes two system calls; this one takes 20 instructions.
using Context = void*;  // the stack pointer, above the registers that a call keeps

__attribute__((naked, noinline, no_sanitize("thread"), no_sanitize("address"))) inline void exchange(
    Context& /*from*/, Context& /*to*/) {
  __asm__(
      "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov (%rsi), %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + Stacks::kUsable);
  *--top = nullptr;  // where `entry` would return to, which it does not
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}

#endif

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  void* race = nullptr;  // what ThreadSanitizer knows it by
};

// The host, as the fibers find their way back to it.
struct Host {
  Context context;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  void* race = nullptr;
  char began = 0, ended = 0;  // whose addresses are ThreadSanitizer's clocks
};
inline Host host;

FASTLIN_UNWATCHED inline void watch_as([[maybe_unused]] void* race) {
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(race, __tsan_switch_to_fiber_no_sync);
#endif
}

// What the host did until now comes before what the fibers do that are started next.
FASTLIN_UNWATCHED inline void begin() {
#ifdef __SANITIZE_THREAD__
  host.race = __tsan_get_current_fiber();
  __tsan_release(&host.began);
#endif
}

FASTLIN_UNWATCHED inline void start(Fiber& fiber, unsigned char* stack, void* race, void (*entry)()) {
  fiber.stack = stack;
  fiber.race = race;
  prepare(fiber.context, stack, entry);
#ifdef __SANITIZE_THREAD__
  watch_as(race);
  __tsan_acquire(&host.began);
  watch_as(host.race);
#endif
}

// From the host to a fiber, until that one calls `leave`.
FASTLIN_UNWATCHED inline void resume(Fiber& fiber) {
  watch_as(fiber.race);
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, fiber.stack, Stacks::kUsable);
#endif
  exchange(host.context, fiber.context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

// The first thing that a fiber does.
FASTLIN_UNWATCHED inline void arrive([[maybe_unused]] void* frames = nullptr) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, &host.stack, &host.stack_bytes);
#endif
}

FASTLIN_UNWATCHED inline void leave(Fiber& fiber, [[maybe_unused]] bool for_good) {
  watch_as(host.race);
  void* frames = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(for_good ? nullptr : &frames, host.stack, host.stack_bytes);
#endif
  exchange(fiber.context, host.context);
  arrive(frames);
}

// What the fibers of a barrier did before it comes before all that they do after it. The clock is kept with
// the first of them, which takes part each time: so no other fibers are ordered by it.
FASTLIN_UNWATCHED inline void order([[maybe_unused]] const Fiber* const* fibers, [[maybe_unused]] int count) {
#ifdef __SANITIZE_THREAD__
  void* clock = fibers[0]->stack;
  for (int i = 0; i < count; ++i) {
    watch_as(fibers[i]->race);
    __tsan_release(clock);
  }
  for (int i = 0; i < count; ++i) {
    watch_as(fibers[i]->race);
    __tsan_acquire(clock);
  }
  watch_as(host.race);
#endif
}

// What these fibers did comes before what the host does next.
FASTLIN_UNWATCHED inline void join([[maybe_unused]] void* const* races, [[maybe_unused]] std::size_t count) {
#ifdef __SANITIZE_THREAD__
  for (std::size_t i = 0; i < count; ++i) {
    watch_as(races[i]);
    __tsan_release(&host.ended);
  }
  watch_as(host.race);
  __tsan_acquire(&host.ended);
#endif
}

// Stacks of a block's threads, and what ThreadSanitizer knows the threads by.
class Crew {
 public:
  explicit Crew(std::size_t count) : stacks(count), races(count, nullptr) {
#ifdef __SANITIZE_THREAD__
    for (void*& race : races) race = __tsan_create_fiber(0);
#endif
  }
  Crew(const Crew&) = delete;
  ~Crew() {
#ifdef __SANITIZE_THREAD__
    for (void* race : races) __tsan_destroy_fiber(race);
#endif
  }

  Stacks stacks;
  std::vector<void*> races;
};

}  // namespace emulated
}  // namespace fastlin
