// The update of Adam and SGD, as torch.optim defines them:
//   g = scale * unit * sum of copies, scaled to a norm of at most `clip` per trial, + weight_decay * value
//   Adam: first += (1 - beta1)(g - first)     second = beta2 second + (1 - beta2) g^2
//         value -= lr / (1 - beta1^t) * first / (sqrt(second) / sqrt(1 - beta2^t) + eps)
//   SGD:  first = beta1 first + g             value -= lr * first

#include "cpu/update.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/parallel.h"

namespace fastlin {
namespace {

constexpr std::int64_t kWorthSharing = 1 << 16;  // numbers, about 40 us

template <class T>
struct Constants {
  T scale, decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, step, root_factor;
};

// Eight sums, so that additions do not wait for each other.
template <class T>
double squared_norm(const T* gradient, std::int64_t size) {
  double sums[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(gradient[i + j]) * gradient[i + j];
  }
  for (; i < size; ++i) sums[0] += static_cast<double>(gradient[i]) * gradient[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The gradient of a trial's values.
template <class T>
void pull(const UpdatedParameter<T>& p, const T* __restrict__ gradient, T* __restrict__ pulled) {
  for (std::int64_t at = 0; at < p.size; at += p.run) {
    for (std::int64_t i = 0; i < p.run; ++i) pulled[at + i] = gradient[at * p.copies + i];
    for (std::int64_t copy = 1; copy < p.copies; ++copy) {
      const T* other = gradient + at * p.copies + copy * p.run;
      for (std::int64_t i = 0; i < p.run; ++i) pulled[at + i] += other[i];
    }
  }
  if (p.unit == nullptr) return;
  for (std::int64_t i = 0; i < p.size; ++i) pulled[i] *= p.unit[i];
}

template <class T>
void adam(const Constants<T>& k, std::int64_t size, const T* __restrict__ gradient, T* __restrict__ value,
          T* __restrict__ first, T* __restrict__ second) {
  for (std::int64_t i = 0; i < size; ++i) {
    const T g = k.scale * gradient[i] + k.decay * value[i];
    first[i] += k.one_minus_beta1 * (g - first[i]);
    second[i] = k.beta2 * second[i] + k.one_minus_beta2 * (g * g);
    value[i] -= k.step * first[i] / (k.root_factor * std::sqrt(second[i]) + k.eps);
  }
}

template <class T>
void sgd(const Constants<T>& k, std::int64_t size, const T* __restrict__ gradient, T* __restrict__ value,
         T* __restrict__ first) {
  for (std::int64_t i = 0; i < size; ++i) {
    first[i] = k.beta1 * first[i] + (k.scale * gradient[i] + k.decay * value[i]);
    value[i] -= k.step * first[i];
  }
}

template <class T>
void average(T weight, std::int64_t size, const T* __restrict__ value, T* __restrict__ mean) {
  // A weight of 1 must give the value itself.
  if (weight < T(0.5)) {
    for (std::int64_t i = 0; i < size; ++i) mean[i] += weight * (value[i] - mean[i]);
  } else {
    for (std::int64_t i = 0; i < size; ++i) mean[i] = value[i] - (value[i] - mean[i]) * (T(1) - weight);
  }
}

template <class T>
void update_trial(const UpdateRule& rule, const std::vector<UpdatedParameter<T>>& parameters, std::int64_t r,
                  double lr, double t, T* pulled) {
  const auto trains = [r](const UpdatedParameter<T>& p) { return p.idle == nullptr || p.idle[r] == 0; };
  double scale = rule.gradient_scale, square = 0.0;
  T* gradient = pulled;
  for (const auto& p : parameters) {
    pull(p, p.gradient + r * p.size * p.copies, gradient);
    if (rule.clip >= 0.0 && trains(p)) square += squared_norm(gradient, p.size);
    gradient += p.size;
  }
  if (rule.clip >= 0.0) {
    const double norm = std::abs(scale) * std::sqrt(square);
    if (norm > rule.clip) scale *= rule.clip / norm;
  }
  Constants<T> k{};
  k.scale = static_cast<T>(scale), k.decay = static_cast<T>(rule.weight_decay);
  k.beta1 = static_cast<T>(rule.beta1), k.beta2 = static_cast<T>(rule.beta2);
  k.one_minus_beta1 = static_cast<T>(1.0 - rule.beta1), k.one_minus_beta2 = static_cast<T>(1.0 - rule.beta2);
  k.eps = static_cast<T>(rule.eps);
  k.step = static_cast<T>(rule.is_adam ? lr / (1.0 - std::pow(rule.beta1, t)) : lr);
  k.root_factor = static_cast<T>(1.0 / std::sqrt(1.0 - std::pow(rule.beta2, t)));
  const T weight = static_cast<T>(rule.average_weight);
  gradient = pulled;
  for (const auto& p : parameters) {
    const std::int64_t at = r * p.size;
    if (trains(p)) {
      if (rule.is_adam) {
        adam(k, p.size, gradient, p.value + at, p.first + at, p.second + at);
      } else {
        sgd(k, p.size, gradient, p.value + at, p.first + at);
      }
    }
    if (weight > T(0)) average(weight, p.size, p.value + at, p.average + at);
    gradient += p.size;
  }
}

}  // namespace

template <class T>
void update(const UpdateRule& rule, const UpdatedTrials<T>& trials,
            const std::vector<UpdatedParameter<T>>& parameters, int threads) {
  const std::int64_t done = ++*trials.updates;
  std::int64_t width = 0;  // of a trial
  for (const auto& p : parameters) width += p.size;
  const std::int64_t team = width * trials.R < kWorthSharing ? 1 : std::min<std::int64_t>(threads, trials.R);
  std::vector<T> pulled(static_cast<std::size_t>(width * team));
  const auto trial = [&](std::int64_t r, int thread) {
    const double loss = static_cast<double>(trials.loss[r]);
    trials.total[r] += loss;
    if (trials.diverged[r] == 0 && !std::isfinite(loss)) trials.diverged[r] = done;
    if (trials.diverged[r] != 0) return;
    update_trial(rule, parameters, r, trials.lr[r], static_cast<double>(done),
                 pulled.data() + width * thread);
  };
  for_each_block(trials.R, static_cast<int>(team), trial);
}

template void update(const UpdateRule&, const UpdatedTrials<float>&,
                     const std::vector<UpdatedParameter<float>>&, int);
template void update(const UpdateRule&, const UpdatedTrials<double>&,
                     const std::vector<UpdatedParameter<double>>&, int);

}  // namespace fastlin
