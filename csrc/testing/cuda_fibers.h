// Fibers for the emulation of CUDA. Each CUDA thread has its own stack; the host, which launched the kernel,
// switches between them. AddressSanitizer learns which stack is in use. ThreadSanitizer sees each fiber as a
// thread that only `order` synchronises.
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

// Host and fibers share the emulation's variables without synchronising: the sanitizers must not watch its
// functions.
#define FASTLIN_UNWATCHED __attribute__((noinline, no_sanitize("thread"), no_sanitize("address")))

namespace fastlin {
namespace emulated {

#ifdef __SANITIZE_THREAD__
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
#endif

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStackBytes = 512 * 1024;  // pages take memory when they are touched

// Stacks, each above a protected page: a stack overflow stops the program.
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
    // Abandoned fibers have left their frames poisoned.
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

FASTLIN_UNWATCHED inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = Stacks::kUsable;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
FASTLIN_UNWATCHED inline void exchange(Context& from, Context& to) { swapcontext(&from, &to); }

#else

// swapcontext makes two system calls; this takes 20 instructions.
using Context = void*;  // stack pointer; the callee-saved registers lie above it

__attribute__((naked, noinline, no_sanitize("thread"), no_sanitize("address"))) inline void exchange(
    Context& /*from*/, Context& /*to*/) {
  __asm__(
      "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
      "mov %rsp, (%rdi)\n mov (%rsi), %rsp\n"
      "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
}

FASTLIN_UNWATCHED inline void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  auto** top = reinterpret_cast<void**>(stack + Stacks::kUsable);
  *--top = nullptr;  // return address of `entry`, which never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context = top;
}

#endif

struct Fiber {
  Context context;
  unsigned char* stack = nullptr;
  void* tsan_fiber = nullptr;  // ThreadSanitizer's handle
};

// The host's context, to which fibers switch back.
struct Host {
  Context context;
  const void* stack = nullptr;
  std::size_t stack_bytes = 0;
  void* tsan_fiber = nullptr;
  char began = 0, ended = 0;  // ThreadSanitizer uses their addresses as clocks
};
inline Host host;

FASTLIN_UNWATCHED inline void switch_tsan_fiber([[maybe_unused]] void* tsan_fiber) {
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
}

// Everything the host has done happens before what the next fibers do.
FASTLIN_UNWATCHED inline void begin() {
#ifdef __SANITIZE_THREAD__
  host.tsan_fiber = __tsan_get_current_fiber();
  __tsan_release(&host.began);
#endif
}

FASTLIN_UNWATCHED inline void start(Fiber& fiber, unsigned char* stack, void* tsan_fiber, void (*entry)()) {
  fiber.stack = stack;
  fiber.tsan_fiber = tsan_fiber;
  prepare(fiber.context, stack, entry);
#ifdef __SANITIZE_THREAD__
  switch_tsan_fiber(tsan_fiber);
  __tsan_acquire(&host.began);
  switch_tsan_fiber(host.tsan_fiber);
#endif
}

// Switches from the host to a fiber, until that calls `leave`.
FASTLIN_UNWATCHED inline void resume(Fiber& fiber) {
  switch_tsan_fiber(fiber.tsan_fiber);
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, fiber.stack, Stacks::kUsable);
#endif
  exchange(host.context, fiber.context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

// A fiber calls this first, after every switch to it.
FASTLIN_UNWATCHED inline void arrive([[maybe_unused]] void* frames = nullptr) {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, &host.stack, &host.stack_bytes);
#endif
}

FASTLIN_UNWATCHED inline void leave(Fiber& fiber, [[maybe_unused]] bool is_done) {
  switch_tsan_fiber(host.tsan_fiber);
  void* frames = nullptr;
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_start_switch_fiber(is_done ? nullptr : &frames, host.stack, host.stack_bytes);
#endif
  exchange(fiber.context, host.context);
  arrive(frames);
}

// What these fibers did before a barrier happens before all that they do after it. The clock belongs to the
// first of them, which takes part each time, so it orders no other fibers.
FASTLIN_UNWATCHED inline void order([[maybe_unused]] const Fiber* const* fibers, [[maybe_unused]] int count) {
#ifdef __SANITIZE_THREAD__
  void* clock = fibers[0]->stack;
  for (int i = 0; i < count; ++i) {
    switch_tsan_fiber(fibers[i]->tsan_fiber);
    __tsan_release(clock);
  }
  for (int i = 0; i < count; ++i) {
    switch_tsan_fiber(fibers[i]->tsan_fiber);
    __tsan_acquire(clock);
  }
  switch_tsan_fiber(host.tsan_fiber);
#endif
}

// What these fibers did happens before what the host does next.
FASTLIN_UNWATCHED inline void join([[maybe_unused]] void* const* tsan_fibers,
                                   [[maybe_unused]] std::size_t count) {
#ifdef __SANITIZE_THREAD__
  for (std::size_t i = 0; i < count; ++i) {
    switch_tsan_fiber(tsan_fibers[i]);
    __tsan_release(&host.ended);
  }
  switch_tsan_fiber(host.tsan_fiber);
  __tsan_acquire(&host.ended);
#endif
}

// Stacks of the threads of a block, and ThreadSanitizer's handles of the threads.
class BlockFibers {
 public:
  explicit BlockFibers(std::size_t count) : stacks(count), tsan_fibers(count, nullptr) {
#ifdef __SANITIZE_THREAD__
    for (void*& tsan_fiber : tsan_fibers) tsan_fiber = __tsan_create_fiber(0);
#endif
  }
  BlockFibers(const BlockFibers&) = delete;
  ~BlockFibers() {
#ifdef __SANITIZE_THREAD__
    for (void* tsan_fiber : tsan_fibers) __tsan_destroy_fiber(tsan_fiber);
#endif
  }

  Stacks stacks;
  std::vector<void*> tsan_fibers;
};

}  // namespace emulated
}  // namespace fastlin
