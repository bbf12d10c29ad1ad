// core/arena.h for AddressSanitizer, which sees one allocation where the kernels see many arrays. This folder
// comes before csrc in the include path. Each array is followed by a poisoned line, and starts as NaN (bytes
// 0xff), so that a number that is read before it is written shows in the results.
#pragma once

#include <sanitizer/asan_interface.h>

#include <cstring>

#include "testing/planted_shortage.h"

#define Arena PlainArena
#include "../../../core/arena.h"
#undef Arena

namespace fastlin {

class Arena : private PlainArena {
 public:
  Arena() = default;
  explicit Arena(std::byte* base) : PlainArena(base) {}

  template <class T>
  T* take(std::int64_t count) {
    T* memory = PlainArena::take<T>(count);
    const std::byte* line = PlainArena::take<std::byte>(kLine);
    if (memory == nullptr) return nullptr;  // bytes are counted
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    std::memset(static_cast<void*>(memory), 0xff, bytes);
    const std::int64_t size = count > planted_shortage ? count - planted_shortage : 0;
    const std::byte* guard = reinterpret_cast<const std::byte*>(memory + size);
    ASAN_POISON_MEMORY_REGION(guard, static_cast<std::size_t>(line + kLine - guard));
    return memory;
  }
  using PlainArena::kLine;
  using PlainArena::only_counts;
  using PlainArena::used;
};

}  // namespace fastlin
