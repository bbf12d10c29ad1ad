// What a call of the boundary that is made from bytes is given: memory for its arrays, each of exactly its
// size.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "binding_checks.h"
#include "testing/attention_cases.h"

namespace fastlin {

constexpr double kWork = 2e4;                // multiply-adds of a call that is made
constexpr std::int64_t kElements = 1 << 17;  // of all arrays of a call that is made

// What became of the calls.
struct Counts {
  std::int64_t refused = 0, too_large = 0, ran = 0, compared = 0, stopped = 0;
};
inline Counts counts;
inline std::int64_t shortage = 0;  // elements that every array lacks

[[noreturn]] inline void found(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "found: %s\n", what.c_str());
  std::abort();
}

// Whether the arguments are taken; else the error must name one.
template <class Make>
bool is_taken(bool right, Make make) {
  try {
    make();
    return true;
  } catch (const std::invalid_argument& error) {
    if (right) found(std::string("a right call is refused: ") + error.what());
    if (std::string(error.what()).find(": got ") == std::string::npos) found(error.what());
    ++counts.refused;
    return false;
  }
}

// Memory for the arrays of a call, each of exactly its size: numbers for what is read, NaN for results.
class Room {
 public:
  explicit Room(std::uint64_t seed) : random_(seed) {}

  // Takes the place of an address, unless that is 0.
  template <class E>
  void give(const char* name, E*& pointer, std::int64_t count) {
    if (pointer == nullptr) return;
    using Element = std::remove_const_t<E>;
    auto* made = new Element[static_cast<std::size_t>(std::max<std::int64_t>(count - shortage, 0))];
    kept_.emplace_back(made, [](void* memory) { delete[] static_cast<Element*>(memory); });
    pointer = made;
    const double size = size_of(name);
    for (std::int64_t i = 0; i < count - shortage; ++i) {
      if constexpr (std::is_floating_point<Element>::value) {
        made[i] = std::is_const<E>::value ? static_cast<Element>(size * random_.unit())
                                          : std::numeric_limits<Element>::quiet_NaN();
      } else {
        made[i] = tasks > 0 ? random_.below(tasks) : -1;
      }
    }
    if (std::is_same<E, const std::int64_t>::value && wrong_task && count > shortage) {
      const_cast<Element*>(pointer)[random_.below(count - shortage)] =
          random_.coin() ? Element(-1) : Element(tasks);
    }
  }

  double parameters = 1;   // size of W
  std::int64_t tasks = 1;  // K
  bool wrong_task = false;

 private:
  double size_of(const std::string& name) const {
    return name == "W" ? parameters : name == "A" || name == "C" ? std::sqrt(parameters) : 1;
  }

  Random random_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> kept_;
};

// Whether a call with these arrays is small enough to be made; `for_each` is for_each_array of it.
template <class ForEach>
bool is_small(double multiply_adds, ForEach for_each) {
  double all = 0;
  for_each([&all](const char*, const auto* pointer, std::int64_t count, Use) {
    all += pointer == nullptr ? 0.0 : static_cast<double>(count);
  });
  const bool small = multiply_adds <= 20 * kWork && all <= kElements;
  if (!small) ++counts.too_large;
  return small;
}

}  // namespace fastlin
