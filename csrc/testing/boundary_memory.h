// Memory for the calls that boundary_fuzzer.cpp makes: each array has exactly its size.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "binding_checks.h"
#include "testing/attention_cases.h"

namespace fastlin {

constexpr double kWork = 2e4;                // multiply-adds of a right call
constexpr std::int64_t kElements = 1 << 17;  // of all arrays of a call that runs

// How many calls had each outcome.
struct Counts {
  std::int64_t refused = 0, too_large = 0, ran = 0, compared = 0, wrong_tasks = 0;
};
inline Counts counts;
inline std::int64_t shortage = 0;  // elements missing at the end of every array

[[noreturn]] inline void fail(const std::string& what) {
  std::fflush(stdout);
  std::fprintf(stderr, "fuzzer: %s\n", what.c_str());
  std::abort();
}

// Whether the checks accept the arguments; the error of a refusal must name one. `right` arguments must pass.
template <class Make>
bool is_accepted(bool right, Make make) {
  try {
    make();
    return true;
  } catch (const std::invalid_argument& error) {
    if (right) fail(std::string("a correct call was refused: ") + error.what());
    if (std::string(error.what()).find(": got ") == std::string::npos) fail(error.what());
    ++counts.refused;
    return false;
  }
}

// Allocations for the arrays of a call: random numbers in inputs, NaN in results.
class CallMemory {
 public:
  explicit CallMemory(std::uint64_t seed) : random_(seed) {}

  // Replaces a pointer that is not null by an allocation of `count` elements.
  template <class E>
  void allocate(const char* name, E*& pointer, std::int64_t count) {
    if (pointer == nullptr) return;
    using Element = std::remove_const_t<E>;
    auto* elements = new Element[static_cast<std::size_t>(std::max<std::int64_t>(count - shortage, 0))];
    allocations_.emplace_back(elements, [](void* memory) { delete[] static_cast<Element*>(memory); });
    pointer = elements;
    const double scale = scale_of(name);
    for (std::int64_t i = 0; i < count - shortage; ++i) {
      if constexpr (std::is_floating_point<Element>::value) {
        elements[i] = std::is_const<E>::value ? static_cast<Element>(scale * random_.unit())
                                              : std::numeric_limits<Element>::quiet_NaN();
      } else {
        elements[i] = tasks > 0 ? random_.below(tasks) : -1;
      }
    }
    if (std::is_same<E, const std::int64_t>::value && wrong_task && count > shortage) {
      const_cast<Element*>(pointer)[random_.below(count - shortage)] =
          random_.coin() ? Element(-1) : Element(tasks);
    }
  }

  double parameters = 1;   // scale of W
  std::int64_t tasks = 1;  // K
  bool wrong_task = false;

 private:
  double scale_of(const std::string& name) const {
    return name == "W" ? parameters : name == "A" || name == "C" ? std::sqrt(parameters) : 1;
  }

  Random random_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> allocations_;
};

// Whether a call is small enough to run; `for_each` calls a function for each of its arrays.
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
