#include "cpu/update.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/parallel.h"

namespace fastlin {
namespace {

constexpr std::int64_t kWorthSharing = 1 << 16;  // numbers, about 40 us

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
void adam_of(const UpdateConstants<T>& k, std::int64_t size, const T* __restrict__ gradient,
             T* __restrict__ value, T* __restrict__ first, T* __restrict__ second) {
  for (std::int64_t i = 0; i < size; ++i) adam(k, gradient[i], value[i], first[i], second[i]);
}

template <class T>
void sgd_of(const UpdateConstants<T>& k, std::int64_t size, const T* __restrict__ gradient,
            T* __restrict__ value, T* __restrict__ first) {
  for (std::int64_t i = 0; i < size; ++i) sgd(k, gradient[i], value[i], first[i]);
}

template <class T>
void average(T weight, std::int64_t size, const T* __restrict__ value, T* __restrict__ mean) {
  for (std::int64_t i = 0; i < size; ++i) mean[i] = averaged(weight, value[i], mean[i]);
}

template <class T>
void update_trial(const UpdateRule& rule, const UpdateCorrections& corrections,
                  const std::vector<UpdatedParameter<T>>& parameters, std::int64_t r, double lr, T* pulled) {
  double square = 0.0;
  T* gradient = pulled;
  for (const auto& p : parameters) {
    pull(p, p.gradient + r * p.size * p.copies, gradient);
    if (rule.clip >= 0.0 && p.trains(r)) square += squared_norm(gradient, p.size);
    gradient += p.size;
  }
  const UpdateConstants<T> k(rule, corrections, lr, square);
  const T weight = static_cast<T>(rule.average_weight);
  gradient = pulled;
  for (const auto& p : parameters) {
    const std::int64_t at = r * p.size;
    if (p.trains(r)) {
      if (rule.is_adam) {
        adam_of(k, p.size, gradient, p.value + at, p.first + at, p.second + at);
      } else {
        sgd_of(k, p.size, gradient, p.value + at, p.first + at);
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
  const UpdateCorrections corrections(rule, static_cast<double>(done));
  std::int64_t width = 0;  // of a trial
  for (const auto& p : parameters) width += p.size;
  const std::int64_t team = width * trials.R < kWorthSharing ? 1 : std::min<std::int64_t>(threads, trials.R);
  std::vector<T> pulled(static_cast<std::size_t>(width * team));
  const auto trial = [&](std::int64_t r, int thread) {
    trials.note(r, done);
    if (trials.diverged[r] != 0) return;
    update_trial(rule, corrections, parameters, r, trials.lr[r], pulled.data() + width * thread);
  };
  for_each_block(trials.R, static_cast<int>(team), trial);
}

template void update(const UpdateRule&, const UpdatedTrials<float>&,
                     const std::vector<UpdatedParameter<float>>&, int);
template void update(const UpdateRule&, const UpdatedTrials<double>&,
                     const std::vector<UpdatedParameter<double>>&, int);

}  // namespace fastlin
