// Turns the arguments of an optimiser update into parameters and trials, and checks them, for both Python
// modules.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "binding_arguments.h"
#include "core/update.h"

namespace fastlin {

// values, gradients, first and second means, averages, idle trials, units: a list of addresses for each, an
// entry for each parameter; 0 is absent.
using ParameterArrays = std::array<Addresses, 7>;
using ParameterSizes = std::vector<std::array<std::int64_t, 3>>;  // size, copies, run
// gradient_scale, beta1, beta2, eps, weight_decay, clip, average_weight.
using UpdateNumbers = std::array<double, 7>;

struct UpdateArguments {
  UpdateArguments(std::int64_t R, const ParameterSizes& sizes, const ParameterArrays& arrays,
                  const Addresses& of_trials, bool is_adam, const UpdateNumbers& numbers)
      : R(R),
        sizes(sizes),
        arrays(arrays),
        of_trials(of_trials),
        rule{is_adam, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]} {
    check_within("R", R, 0, kMaxElements);
    check_count("of_trials", of_trials, 5);
    for (const Addresses& addresses : arrays) check_count("arrays", addresses, sizes.size());
  }

  const std::int64_t R;
  const ParameterSizes& sizes;
  const ParameterArrays& arrays;
  const Addresses& of_trials;  // loss, total, lr, updates, diverged
  const UpdateRule rule;
};

template <class T>
std::vector<UpdatedParameter<T>> parameters_of(const UpdateArguments& given) {
  const auto& [R, sizes, arrays, of_trials, rule] = given;
  std::vector<UpdatedParameter<T>> parameters;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const auto& [size, copies, run] = sizes[i];
    check_within("sizes", size, 0, kMaxElements);
    check_within("copies", copies, 1, kMaxElements);
    check_within("run", run, 1, kMaxElements);
    if (size % run != 0) refuse("run", std::to_string(run), "a divisor of " + std::to_string(size));
    const std::int64_t count = elements("sizes", {R, size});
    UpdatedParameter<T> p{size,
                          copies,
                          run,
                          at<T>(arrays[0], i),
                          at<const T>(arrays[1], i),
                          at<const T>(arrays[6], i),
                          at<T>(arrays[2], i),
                          at<T>(arrays[3], i),
                          at<T>(arrays[4], i),
                          at<const std::uint8_t>(arrays[5], i)};
    check_array("values", p.value, count, Use::kNeeded);
    check_array("gradients", p.gradient, elements("sizes", {R, size, copies}), Use::kNeeded);
    check_array("units", p.unit, size, Use::kOptional);
    check_array("first", p.first, count, Use::kNeeded);
    check_array("second", p.second, count, rule.is_adam ? Use::kNeeded : Use::kOptional);
    check_array("averages", p.average, count, rule.average_weight > 0.0 ? Use::kNeeded : Use::kOptional);
    parameters.push_back(p);
  }
  return parameters;
}

template <class T>
UpdatedTrials<T> trials_of(const UpdateArguments& given) {
  const auto& [R, sizes, arrays, of_trials, rule] = given;
  const UpdatedTrials<T> trials{R,
                                at<const T>(of_trials, 0),
                                at<double>(of_trials, 1),
                                at<const double>(of_trials, 2),
                                at<std::int64_t>(of_trials, 3),
                                at<std::int64_t>(of_trials, 4)};
  check_array("loss", trials.loss, R, Use::kNeeded);
  check_array("total", trials.total, R, Use::kNeeded);
  check_array("lr", trials.lr, R, Use::kNeeded);
  check_array("updates", trials.updates, 1, Use::kNeeded);
  check_array("diverged", trials.diverged, R, Use::kNeeded);
  return trials;
}

}  // namespace fastlin
