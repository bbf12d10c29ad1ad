// One optimiser update of all parameters of all trials.
#pragma once

#include <cstdint>
#include <vector>

namespace fastlin {

// A parameter [R, size], its gradient and what the optimiser keeps of it. The gradient may be that of a form
// that repeats each run of numbers `copies` times and has a factor: the update sums and scales it.
template <class T>
struct UpdatedParameter {
  std::int64_t size;         // numbers of one trial
  std::int64_t copies, run;  // run divides size
  T* value;                  // [R, size]
  const T* gradient;         // [R, size / run, copies, run]
  const T* unit;             // [size] factor of the gradient; null: one
  T* first;                  // [R, size] mean of gradients (Adam), or momentum
  T* second;                 // [R, size] mean of squared gradients; null for SGD
  T* average;                // [R, size] running average of the values; null: none
  const std::uint8_t* idle;  // [R] trials that do not train it; null: all train it
};

struct UpdateRule {
  bool is_adam;              // else SGD
  double gradient_scale;     // factor of all gradients
  double beta1, beta2, eps;  // of Adam; beta1 is the momentum of SGD
  double weight_decay;       // adds weight_decay * value to the gradient
  double clip;               // largest norm of a trial's gradient; negative: none
  double average_weight;     // weight of the new values in the averages; 0 leaves them
};

// What an update reads and writes per trial.
template <class T>
struct UpdatedTrials {
  std::int64_t R;
  const T* loss;           // [R] of this update
  double* total;           // [R] sum of the losses
  const double* lr;        // [R] learning rates
  std::int64_t* updates;   // [1] updates done
  std::int64_t* diverged;  // [R] the update, from 1 on, whose loss was not finite; 0: none
};

// A trial whose loss is not finite is marked, and left as it is from then on. Trials do not interact, and one
// thread updates a trial: the bits are the same for any number of threads.
template <class T>
void update(const UpdateRule& rule, const UpdatedTrials<T>& trials,
            const std::vector<UpdatedParameter<T>>& parameters, int threads);

}  // namespace fastlin
