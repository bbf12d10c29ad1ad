// What `attention` and `gram` should return: plain loops in double that share no code with csrc/cpu.
#pragma once

#include <vector>

#include "kernels.h"

namespace fastlin {

// The fields and shapes of Results; all of them, wanted or not.
struct OracleResults {
  std::vector<double> yhat, loss, per_task, dx, dq, dp, dA, dC, dW, dv, dh;
};

// With `magnitudes`, every input is replaced by its absolute value and every difference by a sum: each result
// is a polynomial in the inputs, and this is the sum of the absolute values of its terms.
template <class T>
OracleResults evaluate(const Problem<T>& problem, bool magnitudes);

// Gram matrices [B, m, m] of the tokens.
template <class T>
std::vector<double> evaluate_gram(const Problem<T>& problem, bool magnitudes);

// The most roundings that a term of each result passes through.
struct Roundings {
  double yhat, loss, per_task, dx, dq, dp, dA, dC, dW, dv, dh;
};
template <class T>
Roundings roundings(const Problem<T>& problem);

}  // namespace fastlin
