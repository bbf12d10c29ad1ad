// Optimiser updates over edge sizes, in arrays of exactly their size, for the sanitizers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "core/update.h"

namespace fastlin {

template <class T>
struct UpdateArrays {
  std::vector<T> value, gradient, unit, first, second, average;
  std::vector<std::uint8_t> idle;
};

// The arrays after two calls apply(rule, trials, parameters); in the second one the first trial diverges.
// Empty if that was not noted.
template <class T, class Apply>
std::vector<UpdateArrays<T>> updated(const UpdateRule& rule, std::int64_t R, Apply apply) {
  constexpr std::int64_t kCopies = 3;
  std::vector<UpdateArrays<T>> all;
  std::vector<UpdatedParameter<T>> parameters;
  for (const std::int64_t size : {0, 1, 7, 8, 121, 4096}) {
    const auto count = static_cast<std::size_t>(R * size);
    UpdateArrays<T> a{std::vector<T>(count),
                      std::vector<T>(count * kCopies),
                      std::vector<T>(static_cast<std::size_t>(size), T(0.5)),
                      std::vector<T>(count),
                      std::vector<T>(count),
                      std::vector<T>(count),
                      std::vector<std::uint8_t>(static_cast<std::size_t>(R))};
    for (std::size_t i = 0; i < count; ++i) {
      a.value[i] = static_cast<T>(static_cast<double>(i % 17) - 8.0);
    }
    for (std::size_t i = 0; i < a.gradient.size(); ++i) {
      a.gradient[i] = static_cast<T>(static_cast<double>(i % 23) - 11.0);
    }
    for (std::int64_t r = 0; r < R; ++r) a.idle[static_cast<std::size_t>(r)] = r % 3 == 2 ? 1 : 0;
    all.push_back(std::move(a));
  }
  for (UpdateArrays<T>& a : all) {
    const auto size = static_cast<std::int64_t>(a.value.size()) / R;
    const std::int64_t run = size % 11 == 0 && size > 0 ? 11 : std::max<std::int64_t>(size, 1);
    const bool has_unit = size % 2 != 0;
    parameters.push_back({size, kCopies, run, a.value.data(), a.gradient.data(),
                          has_unit ? a.unit.data() : nullptr, a.first.data(),
                          rule.is_adam ? a.second.data() : nullptr, a.average.data(), a.idle.data()});
  }
  std::vector<T> loss(static_cast<std::size_t>(R), T(1));
  std::vector<double> total(loss.size()), lr(loss.size(), 1e-2);
  std::vector<std::int64_t> diverged(loss.size());
  std::int64_t updates = 0;
  const UpdatedTrials<T> trials{R, loss.data(), total.data(), lr.data(), &updates, diverged.data()};
  apply(rule, trials, parameters);
  loss[0] = static_cast<T>(NAN);
  apply(rule, trials, parameters);
  if (updates != 2 || diverged[0] != 2) all.clear();
  return all;
}

template <class T>
bool same_finite(const std::vector<T>& a, const std::vector<T>& b) {
  for (const T x : a) {
    if (!std::isfinite(x)) return false;
  }
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Whether both have the same bits, and every number is finite.
template <class T>
bool agree(const std::vector<UpdateArrays<T>>& one, const std::vector<UpdateArrays<T>>& other) {
  if (one.empty() || other.empty()) return false;
  for (std::size_t i = 0; i < one.size(); ++i) {
    const UpdateArrays<T>&a = one[i], &b = other[i];
    if (!same_finite(a.value, b.value) || !same_finite(a.first, b.first) ||
        !same_finite(a.second, b.second) || !same_finite(a.average, b.average)) {
      return false;
    }
  }
  return true;
}

// Calls holds(rule, R), which counts what holds out of `each`, for every rule and these numbers of trials;
// prints "ok <count>" and returns 0 if all holds.
template <class Holds>
int all_updates_hold(std::initializer_list<std::int64_t> trials, int each, Holds holds) {
  int passed = 0, expected = 0;
  for (const bool is_adam : {true, false}) {
    for (const double clip : {-1.0, 0.5}) {
      const UpdateRule rule{is_adam, 0.5, 0.9, 0.98, 1e-8, 0.1, clip, 0.25};
      for (const std::int64_t R : trials) {
        passed += holds(rule, R);
        expected += each;
      }
    }
  }
  std::printf("%s %d\n", passed == expected ? "ok" : "failed", passed);
  return passed == expected ? 0 : 1;
}

}  // namespace fastlin
