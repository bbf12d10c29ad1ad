// core/arena.h for the address sanitizer, which sees one allocation where the kernels see many arrays. Stands
// before csrc in the include path: each array is followed by a line that must not be touched, and starts as
// NaN (bytes 0xff), so that a number that is read before it is written reaches the results.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstring>

#define Arena PlainArena
#include "../../../core/arena.h"
#undef Arena

namespace fastlin {

// Elements that the driver takes off the end of each array, to prove that an overrun is seen.
extern std::int64_t planted_shortage;

class Arena : private PlainArena {
 public:
  Arena() = default;
  explicit Arena(std::byte* base) : PlainArena(base) {}

  template <class T>
  T* take(std::int64_t count) {
    T* taken = PlainArena::take<T>(count);
    const std::byte* line = PlainArena::take<std::byte>(kLine);
    if (taken == nullptr) return nullptr;  // sizes are counted
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    std::memset(static_cast<void*>(taken), 0xff, bytes);
    const std::int64_t kept = count > planted_shortage ? count - planted_shortage : 0;
    const std::byte* guard = reinterpret_cast<const std::byte*>(taken + kept);
    ASAN_POISON_MEMORY_REGION(guard, static_cast<std::size_t>(line + kLine - guard));
    return taken;
  }
  using PlainArena::kLine;
  using PlainArena::only_counts;
  using PlainArena::used;
};

}  // namespace fastlin
