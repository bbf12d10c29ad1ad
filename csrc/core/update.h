// One optimiser update of all parameters of all trials: its arrays, and its arithmetic, which a CPU
// (cpu/update.cpp) and a GPU (cuda/update.cu) share. Adam and SGD are as torch.optim defines them:
//   g = scale * unit * sum of copies, scaled to a norm of at most `clip` per trial, + weight_decay * value
//   Adam: first += (1 - beta1)(g - first)     second = beta2 second + (1 - beta2) g^2
//         value -= lr / (1 - beta1^t) * first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
//   SGD:  first = beta1 first + g             value -= lr * first
#pragma once

#include <cmath>
#include <cstdint>

#include "core/philox.h"

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

  FASTLIN_HD bool trains(std::int64_t r) const { return idle == nullptr || idle[r] == 0; }
};

struct UpdateRule {
  bool is_adam;              // else SGD
  double gradient_scale;     // factor of all gradients
  double beta1, beta2, eps;  // of Adam; beta1 is the momentum of SGD
  double weight_decay;       // adds weight_decay * value to the gradient
  double clip;               // largest norm of a trial's gradient; negative: none
  double average_weight;     // weight of the new values in the averages; 0 leaves them
};

// What an update reads and writes per trial. A trial whose loss is not finite is marked, and left as it is
// from then on.
template <class T>
struct UpdatedTrials {
  std::int64_t R;
  const T* loss;           // [R] of this update
  double* total;           // [R] sum of the losses
  const double* lr;        // [R] learning rates
  std::int64_t* updates;   // [1] updates done
  std::int64_t* diverged;  // [R] the update, from 1 on, whose loss was not finite; 0: none

  // Adds the loss of update `done` to the total of trial r, and marks a trial that has diverged.
  FASTLIN_HD void note(std::int64_t r, std::int64_t done) const {
    const double number = static_cast<double>(loss[r]);
    total[r] += number;
    if (diverged[r] == 0 && !std::isfinite(number)) diverged[r] = done;
  }
};

// What the number of the update decides.
struct UpdateCorrections {
  double first, root;  // 1 - beta1^t, 1 / sqrt(1 - beta2^t)

  FASTLIN_HD UpdateCorrections(const UpdateRule& rule, double t)
      : first(1.0 - std::pow(rule.beta1, t)), root(1.0 / std::sqrt(1.0 - std::pow(rule.beta2, t))) {}
};

// The numbers of a trial's update; `square` is the squared norm of its gradient before `gradient_scale`.
template <class T>
struct UpdateConstants {
  T scale, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, step, root_factor;

  FASTLIN_HD UpdateConstants(const UpdateRule& rule, const UpdateCorrections& corrections, double lr,
                             double square)
      : scale(static_cast<T>(clipped_scale(rule, square))),
        decay(static_cast<T>(rule.weight_decay)),
        beta1(static_cast<T>(rule.beta1)),
        beta2(static_cast<T>(rule.beta2)),
        one_minus_beta1(static_cast<T>(1.0 - rule.beta1)),
        one_minus_beta2(static_cast<T>(1.0 - rule.beta2)),
        eps(static_cast<T>(rule.eps)),
        step(static_cast<T>(rule.is_adam ? lr / corrections.first : lr)),
        root_factor(static_cast<T>(corrections.root)) {}

 private:
  FASTLIN_HD static double clipped_scale(const UpdateRule& rule, double square) {
    const double scale = rule.gradient_scale;
    if (rule.clip < 0.0) return scale;
    const double norm = std::abs(scale) * std::sqrt(square);
    return norm > rule.clip ? scale * (rule.clip / norm) : scale;
  }
};

// The update of one number.
template <class T>
FASTLIN_HD inline void adam(const UpdateConstants<T>& k, T gradient, T& value, T& first, T& second) {
  const T g = k.scale * gradient + k.decay * value;
  first += k.one_minus_beta1 * (g - first);
  second = k.beta2 * second + k.one_minus_beta2 * (g * g);
  value -= k.step * first / (k.root_factor * std::sqrt(second) + k.eps);
}

template <class T>
FASTLIN_HD inline void sgd(const UpdateConstants<T>& k, T gradient, T& value, T& first) {
  first = k.beta1 * first + (k.scale * gradient + k.decay * value);
  value -= k.step * first;
}

// A running average with a new value of weight `weight`; a weight of 1 gives the value itself.
template <class T>
FASTLIN_HD inline T averaged(T weight, T value, T mean) {
  return weight < T(0.5) ? mean + weight * (value - mean) : value - (value - mean) * (T(1) - weight);
}

}  // namespace fastlin
