// Edge problems with what their results should be, and whether they are.
//
// Tolerance: each result is a polynomial in the inputs, so that a rounding of relative size eps / 2 moves it
// by at most that times the sum of the absolute values of its terms. A term passes through N roundings, which
// are as good as independent and add up to sqrt(N); four times that, element by element.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "testing/attention_cases.h"

namespace fastlin {

// Whether the values are as expected; the largest error in tolerances is kept.
inline double worst = 0;

template <class T>
bool close(const T* found, const std::vector<double>& expected, const std::vector<double>& magnitude,
           double steps, const char* what) {
  const double unit = std::numeric_limits<T>::epsilon() * std::sqrt(steps);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(found[i]) - expected[i]);
    if (!(error <= 4 * unit * magnitude[i])) {
      std::printf("%s[%zu] is %.9g instead of %.9g, tolerance %.2g\n", what, i, static_cast<double>(found[i]),
                  expected[i], 4 * unit * magnitude[i]);
      return false;
    }
    if (error > 0) worst = std::max(worst, error / (4 * unit * magnitude[i]));
  }
  return true;
}

template <class T>
bool same_bits(const Made<T>& one, const Made<T>& other) {
  for (std::size_t i = 0; i < one.buffers.size(); ++i) {
    const std::size_t bytes = static_cast<std::size_t>(one.count[i]) * sizeof(T);
    if (bytes > 0 && std::memcmp(one.buffers[i].get(), other.buffers[i].get(), bytes) != 0) {
      std::printf("%s has other bits\n", slots<T>()[i].name);
      return false;
    }
  }
  return true;
}

// A problem, what its results are, and through how many roundings.
template <class T>
struct Question {
  explicit Question(const Case& c, Shortage shortage = {})
      : shape(c),
        given(c, shortage),
        expected(evaluate(given.problem, false)),
        magnitude(evaluate(given.problem, true)),
        steps(roundings(given.problem)) {}

  bool holds(const Made<T>& made) const {
    for (std::size_t i = 0; i < made.buffers.size(); ++i) {
      const Slot<T>& slot = slots<T>()[i];
      if (made.count[i] > 0 && !close(made.buffers[i].get(), expected.*slot.expected,
                                      magnitude.*slot.expected, steps.*slot.steps, slot.name)) {
        return false;
      }
    }
    return true;
  }

  Case shape;
  Given<T> given;
  Outcome expected, magnitude;
  Roundings steps;
};

}  // namespace fastlin
