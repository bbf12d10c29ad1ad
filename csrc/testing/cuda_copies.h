// Asynchronous copies of the emulation. A copy is made when its thread waits for it, not before: a kernel
// that forgets to wait, or to synchronise after it, reads what was there earlier, and ThreadSanitizer sees
// the write where the thread waits. A thread that ends with copies that it has not waited for is an error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "testing/cuda_fibers.h"

namespace fastlin {
namespace emulated {

struct Copy {
  unsigned char* to;
  const unsigned char* from;
  unsigned bytes, group;
};

// Copies of a thread that wait, oldest first. Plain memory: the sanitizers do not watch it.
struct Copies {
  static constexpr unsigned kMost = 1024;
  Copy waiting[kMost];
  unsigned count = 0, group = 0;
};
inline std::unique_ptr<Copies[]> copies_of_threads{new Copies[1024]};

FASTLIN_UNWATCHED inline void copy_later(unsigned thread, void* to, const void* from, unsigned bytes) {
  Copies& own = copies_of_threads.get()[thread];
  const auto of = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  if (own.count == Copies::kMost || (bytes != 4 && bytes != 8 && bytes != 16) ||
      (of(to) | of(from)) % bytes != 0) {
    std::fprintf(stderr, "asynchronous copy: %u wait, of %u bytes from %p to %p\n", own.count, bytes, from,
                 to);
    std::abort();
  }
  own.waiting[own.count++] = {static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes,
                              own.group};
}

FASTLIN_UNWATCHED inline void commit_copies(unsigned thread) { ++copies_of_threads.get()[thread].group; }

// Watched by the sanitizers, as the copy that it stands for.
inline void make_copy(unsigned char* to, const unsigned char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; ++i) to[i] = from[i];
}

// Makes all copies but those of the last `groups` that were committed.
FASTLIN_UNWATCHED inline void wait_for_copies(unsigned thread, unsigned groups) {
  Copies& own = copies_of_threads.get()[thread];
  unsigned done = 0;
  while (done < own.count && own.waiting[done].group + groups < own.group) {
    const Copy& copy = own.waiting[done++];
    make_copy(copy.to, copy.from, copy.bytes);
  }
  for (unsigned i = done; i < own.count; ++i) own.waiting[i - done] = own.waiting[i];
  own.count -= done;
}

// At the end of a thread; returns whether it had waited for all copies.
FASTLIN_UNWATCHED inline bool end_copies(unsigned thread) {
  Copies& own = copies_of_threads.get()[thread];
  const bool waited = own.count == 0;
  own.count = own.group = 0;
  return waited;
}

}  // namespace emulated
}  // namespace fastlin
