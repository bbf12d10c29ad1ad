// Compares the results of edge problems with those of the oracle.
//
// Tolerance: each result is a polynomial in the inputs. A rounding of relative size eps / 2 moves it by at
// most that times the sum of the absolute values of its terms. A term passes through N roundings; they are
// nearly independent and add up to sqrt(N) of one. The tolerance is four times that, element by element.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "testing/attention_cases.h"

namespace fastlin {

// The largest error of all comparisons so far, in tolerances.
inline double largest_error = 0;

template <class T>
bool close(const T* values, const std::vector<double>& expected, const std::vector<double>& magnitude,
           double steps, const char* what) {
  const double unit = std::numeric_limits<T>::epsilon() * std::sqrt(steps);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(values[i]) - expected[i]);
    if (!(error <= 4 * unit * magnitude[i])) {
      std::printf("%s[%zu] is %.9g instead of %.9g, tolerance %.2g\n", what, i,
                  static_cast<double>(values[i]), expected[i], 4 * unit * magnitude[i]);
      return false;
    }
    if (error > 0) largest_error = std::max(largest_error, error / (4 * unit * magnitude[i]));
  }
  return true;
}

template <class T>
bool same_bits(const OwnedResults<T>& one, const OwnedResults<T>& other) {
  for (std::size_t i = 0; i < one.buffers.size(); ++i) {
    const std::size_t bytes = static_cast<std::size_t>(one.count[i]) * sizeof(T);
    if (bytes > 0 && std::memcmp(one.buffers[i].get(), other.buffers[i].get(), bytes) != 0) {
      std::printf("%s has different bits\n", result_fields<T>()[i].name);
      return false;
    }
  }
  return true;
}

// A problem, the oracle's results, and how many roundings the terms of each result pass through.
template <class T>
struct CheckedProblem {
  explicit CheckedProblem(const Case& c, Shortage shortage = {})
      : shape(c),
        owned(c, shortage),
        expected(evaluate(owned.problem, false)),
        magnitude(evaluate(owned.problem, true)),
        steps(roundings(owned.problem)) {}

  bool holds(const OwnedResults<T>& outputs) const {
    for (std::size_t i = 0; i < outputs.buffers.size(); ++i) {
      const ResultField<T>& slot = result_fields<T>()[i];
      if (outputs.count[i] > 0 && !close(outputs.buffers[i].get(), expected.*slot.expected,
                                         magnitude.*slot.expected, steps.*slot.steps, slot.name)) {
        return false;
      }
    }
    return true;
  }

  Case shape;
  OwnedProblem<T> owned;
  OracleResults expected, magnitude;
  Roundings steps;
};

}  // namespace fastlin
