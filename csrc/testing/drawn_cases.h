// Task sources of every kind, batches drawn from them, and the losses and gradients of these batches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "kernels.h"

namespace fastlin {

// Numbers of order one that are all different.
template <class T>
std::vector<T> distinct_numbers(std::int64_t count, double from) {
  std::vector<T> out(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(std::sin(from + 1.7 * i));
  return out;
}

enum SourceKind { kMixture, kShares, kSphere, kFixed };

// A source of one kind with the arrays that it points to. With `all_options` it has a constant coordinate, a
// feature covariance and noise.
struct TestSource {
  std::vector<double> means, factors, cumulative, features;
  std::vector<std::int64_t> strata{0, 2, 1, 2, 2};
  Source source{};

  TestSource(SourceKind kind, std::int64_t d, std::int64_t n, bool all_options) {
    const bool mixed = kind == kMixture || kind == kShares;
    source.d = d, source.n = n, source.K = mixed ? 3 : 1, source.bias = all_options;
    means = distinct_numbers<double>(source.K * d, 1),
    factors = distinct_numbers<double>(source.K * d * d, 2);
    features = distinct_numbers<double>(d * d, 3);
    cumulative = {0.2, 0.6, 1.0};
    if (kind != kSphere) source.means = means.data();
    if (mixed) source.factors = factors.data();
    if (mixed) source.cumulative = cumulative.data();
    if (kind == kShares) source.strata = strata.data(), source.period = 5;
    if (all_options) source.feature_factor = features.data();
    source.radius = 1.5, source.noise_std = all_options ? 0.7 : 0.0;
    source.seed = 5, source.offset = ~std::uint64_t{0} - 20, source.step = 7, source.stream = 300;
  }
  std::int64_t m() const { return source.d + (source.bias ? 2 : 1); }
};

// Calls holds(source) for sources of every kind, from empty contexts to more tokens than features, until one
// does not hold.
template <class F>
bool all_sources_hold(F holds) {
  for (SourceKind kind : {kMixture, kShares, kSphere, kFixed}) {
    for (std::int64_t n : {0, 1, 4, 9}) {
      const TestSource source(kind, n % 2 == 0 ? 5 : 2, n, n != 4);
      if (holds(source)) continue;
      std::printf("kind %d, n %lld\n", kind, static_cast<long long>(n));
      return false;
    }
  }
  return true;
}

template <class T>
struct SampledBatch {
  std::vector<T> x, q, y;
  std::vector<std::int64_t> task;

  // draw(source, B, is_gram, sample) fills the sample.
  template <class Draw>
  SampledBatch(const TestSource& test, std::int64_t B, bool is_gram, const Draw& draw)
      : x(static_cast<std::size_t>(B * test.m() * (is_gram ? test.m() : test.source.n)), T(NAN)),
        q(static_cast<std::size_t>(B * test.m()), T(NAN)),
        y(static_cast<std::size_t>(B), T(NAN)),
        task(static_cast<std::size_t>(B), -1) {
    const Sample<T> out{x.data(), q.data(), y.data(), task.data()};
    draw(test.source, B, is_gram, out);
  }
};

template <class T>
bool close(const std::vector<T>& a, const std::vector<T>& b) {
  const double allowed = sizeof(T) == sizeof(float) ? 1e-4 : 1e-11;
  double size = 1, error = 0;
  for (const T& value : b) size = std::max(size, std::fabs(static_cast<double>(value)));
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i])) return false;
    error = std::max(error, std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  }
  return a.size() == b.size() && error <= allowed * size;
}

template <class T>
bool close(const SampledBatch<T>& a, const SampledBatch<T>& b) {
  return close(a.x, b.x) && close(a.q, b.q) && close(a.y, b.y) && a.task == b.task;
}

template <class T>
struct LossAndGradients {
  std::vector<T> loss, per_task, dp, dA, dC, dW, dv;
};

template <class T>
bool close(const LossAndGradients<T>& a, const LossAndGradients<T>& b) {
  return close(a.loss, b.loss) && close(a.per_task, b.per_task) && close(a.dp, b.dp) && close(a.dA, b.dA) &&
         close(a.dC, b.dC) && close(a.dW, b.dW) && close(a.dv, b.dv);
}

// Two trials, one prompt token, with or without a matrix layer; attend(problem, results) runs the kernel. The
// sequences are those of `stored`, or the kernel draws them when it is null.
template <class T, class Attend>
LossAndGradients<T> loss_and_gradients(const TestSource& test, std::int64_t B, std::int64_t layers,
                                       const SampledBatch<T>* stored, const Attend& attend) {
  const std::int64_t m = test.m(), K = test.source.K, R = 2;
  const std::vector<T> p = distinct_numbers<T>(R * K * m, 4), W = distinct_numbers<T>(R * m * m, 5),
                       v = distinct_numbers<T>(R * K * m, 6);
  std::vector<T> A = distinct_numbers<T>(R * layers * m * m, 7),
                 C = distinct_numbers<T>(R * layers * m * m, 8);
  Problem<T> P{};
  P.B = B, P.n = test.source.n, P.m = m, P.K = K, P.t = 1, P.R = R, P.H = 1, P.layers = layers;
  P.p = p.data(), P.W = W.data(), P.v = v.data();
  if (layers > 0) P.A = A.data(), P.C = C.data();
  P.scale = 0.05, P.first_skip = P.skip = 1, P.see_query = true;
  if (stored == nullptr) {
    P.source = &test.source;
  } else {
    P.x = stored->x.data(), P.x_batch = m * m, P.x_row = m, P.is_gram = true;
    P.q = stored->q.data(), P.q_batch = m, P.y = stored->y.data(), P.task = stored->task.data();
  }
  const auto nans = [](std::int64_t count) {
    return std::vector<T>(static_cast<std::size_t>(count), T(NAN));
  };
  LossAndGradients<T> out{nans(R),        nans(R * K),    nans(p.size()), nans(A.size()),
                          nans(C.size()), nans(W.size()), nans(v.size())};
  Results<T> results{};
  results.loss = out.loss.data(), results.per_task = out.per_task.data(), results.dp = out.dp.data();
  if (layers > 0) results.dA = out.dA.data(), results.dC = out.dC.data();
  results.dW = out.dW.data(), results.dv = out.dv.data();
  attend(P, results);
  return out;
}

// Whether `draw` draws what `expected_draw` does, up to rounding, and `attend` returns for drawn sequences
// what it returns for the same sequences stored.
template <class T, class Draw, class ExpectedDraw, class Attend>
bool draws_hold(const TestSource& test, std::int64_t B, const Draw& draw, const ExpectedDraw& expected_draw,
                const Attend& attend) {
  for (bool is_gram : {false, true}) {
    const SampledBatch<T> batch(test, B, is_gram, draw);
    if (!close(batch, SampledBatch<T>(test, B, is_gram, expected_draw))) return false;
    for (std::int64_t layers = 0; is_gram && layers <= 1; ++layers) {
      if (!close(loss_and_gradients<T>(test, B, layers, nullptr, attend),
                 loss_and_gradients<T>(test, B, layers, &batch, attend))) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace fastlin
