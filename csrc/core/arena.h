// Aligned workspace. The same code lays it out twice: first to count its bytes, then in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "core/philox.h"

namespace fastlin {

class Arena {
 public:
  Arena() = default;
  FASTLIN_HD explicit Arena(std::byte* base) : base_(base) {}

  // Uninitialised memory for `count` elements, aligned to a cache line; null while bytes are counted.
  template <class T>
  FASTLIN_HD T* take(std::int64_t count) {
    T* memory = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + kLine - 1) / kLine * kLine;
    return memory;
  }
  FASTLIN_HD std::size_t used() const { return used_; }
  FASTLIN_HD bool only_counts() const { return base_ == nullptr; }

  static constexpr std::size_t kLine = 64;

 private:
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
};

struct FreeAligned {
  void operator()(std::byte* memory) const { ::operator delete[](memory, std::align_val_t(Arena::kLine)); }
};
using Memory = std::unique_ptr<std::byte[], FreeAligned>;

// Memory for `count` pieces of `each` bytes; throws std::bad_alloc on overflow.
inline Memory allocate(std::size_t each, std::size_t count = 1) {
  std::size_t bytes;
  if (__builtin_mul_overflow(each, count, &bytes)) throw std::bad_alloc();
  return Memory(static_cast<std::byte*>(::operator new[](bytes, std::align_val_t(Arena::kLine))));
}

}  // namespace fastlin
