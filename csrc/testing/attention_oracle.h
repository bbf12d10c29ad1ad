// What `attention` and `gram` should return, by plain loops in double and by nothing of csrc/cpu.
#pragma once

#include <vector>

#include "kernels.h"

namespace fastlin {

// As Results, in the shapes that are written there; all of them, wanted or not.
struct Outcome {
  std::vector<double> yhat, loss, per_task, dx, dq, dp, dA, dC, dW, dv, dh;
};

// With `magnitudes`, every input is replaced by its absolute value and every difference by a sum: each result
// is a polynomial in the inputs, and this is the sum of the absolute values of its terms.
template <class T>
Outcome evaluate(const Problem<T>& problem, bool magnitudes);

// Gram matrices [B, m, m] of the tokens.
template <class T>
std::vector<double> evaluate_gram(const Problem<T>& problem, bool magnitudes);

// How many roundings the terms of each result pass through, at most.
struct Roundings {
  double yhat, loss, per_task, dx, dq, dp, dA, dC, dW, dv, dh;
};
template <class T>
Roundings roundings(const Problem<T>& problem);

}  // namespace fastlin
