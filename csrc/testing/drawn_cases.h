// Sources of every kind, what is drawn from them, and losses and gradients of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"

namespace fastlin {

// Numbers of order one that are all different.
template <class T>
std::vector<T> numbers(std::int64_t count, double from) {
  std::vector<T> out(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(std::sin(from + 1.7 * i));
  return out;
}

enum Kind { kMixture, kShares, kSphere, kFixed };

// A source of that kind with the arrays that it refers to.
struct Drawn {
  std::vector<double> means, factors, cumulative, features;
  std::vector<std::int64_t> strata{0, 2, 1, 2, 2};
  Source source{};

  Drawn(Kind kind, std::int64_t d, std::int64_t n, bool everything) {
    const bool mixed = kind == kMixture || kind == kShares;
    source.d = d, source.n = n, source.K = mixed ? 3 : 1, source.bias = everything;
    means = numbers<double>(source.K * d, 1), factors = numbers<double>(source.K * d * d, 2);
    features = numbers<double>(d * d, 3);
    cumulative = {0.2, 0.6, 1.0};
    if (kind != kSphere) source.means = means.data();
    if (mixed) source.factors = factors.data();
    if (mixed) source.cumulative = cumulative.data();
    if (kind == kShares) source.strata = strata.data(), source.period = 5;
    if (everything) source.feature_factor = features.data();
    source.radius = 1.5, source.noise_std = everything ? 0.7 : 0.0;
    source.seed = 5, source.offset = ~std::uint64_t{0} - 20, source.step = 7, source.stream = 300;
  }
  std::int64_t m() const { return source.d + (source.bias ? 2 : 1); }
};

template <class T>
struct Kept {
  std::vector<T> x, q, y;
  std::vector<std::int64_t> task;

  // `draw` takes a source, B, is_gram and where the sample goes.
  template <class Draw>
  Kept(const Drawn& drawn, std::int64_t B, bool is_gram, const Draw& draw)
      : x(static_cast<std::size_t>(B * drawn.m() * (is_gram ? drawn.m() : drawn.source.n)), T(NAN)),
        q(static_cast<std::size_t>(B * drawn.m()), T(NAN)),
        y(static_cast<std::size_t>(B), T(NAN)),
        task(static_cast<std::size_t>(B), -1) {
    const Sample<T> out{x.data(), q.data(), y.data(), task.data()};
    draw(drawn.source, B, is_gram, out);
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
bool close(const Kept<T>& a, const Kept<T>& b) {
  return close(a.x, b.x) && close(a.q, b.q) && close(a.y, b.y) && a.task == b.task;
}

template <class T>
struct Answer {
  std::vector<T> loss, per_task, dp, dA, dC, dW, dv;
};

template <class T>
bool close(const Answer<T>& a, const Answer<T>& b) {
  return close(a.loss, b.loss) && close(a.per_task, b.per_task) && close(a.dp, b.dp) && close(a.dA, b.dA) &&
         close(a.dC, b.dC) && close(a.dW, b.dW) && close(a.dv, b.dv);
}

// Two trials, one prompt token, with a matrix layer or without; `attend` takes a problem and results. With
// `kept` they are of those sequences, else of drawn ones.
template <class T, class Attend>
Answer<T> answer(const Drawn& drawn, std::int64_t B, std::int64_t layers, const Kept<T>* kept,
                 const Attend& attend) {
  const std::int64_t m = drawn.m(), K = drawn.source.K, R = 2;
  const std::vector<T> p = numbers<T>(R * K * m, 4), W = numbers<T>(R * m * m, 5),
                       v = numbers<T>(R * K * m, 6);
  std::vector<T> A = numbers<T>(R * layers * m * m, 7), C = numbers<T>(R * layers * m * m, 8);
  Problem<T> P{};
  P.B = B, P.n = drawn.source.n, P.m = m, P.K = K, P.t = 1, P.R = R, P.H = 1, P.layers = layers;
  P.p = p.data(), P.W = W.data(), P.v = v.data();
  if (layers > 0) P.A = A.data(), P.C = C.data();
  P.scale = 0.05, P.first_skip = P.skip = 1, P.see_query = true;
  if (kept == nullptr) {
    P.source = &drawn.source;
  } else {
    P.x = kept->x.data(), P.x_batch = m * m, P.x_row = m, P.is_gram = true;
    P.q = kept->q.data(), P.q_batch = m, P.y = kept->y.data(), P.task = kept->task.data();
  }
  const auto empty = [](std::int64_t count) {
    return std::vector<T>(static_cast<std::size_t>(count), T(NAN));
  };
  Answer<T> out{empty(R),        empty(R * K),    empty(p.size()), empty(A.size()),
                empty(C.size()), empty(W.size()), empty(v.size())};
  Results<T> results{};
  results.loss = out.loss.data(), results.per_task = out.per_task.data(), results.dp = out.dp.data();
  if (layers > 0) results.dA = out.dA.data(), results.dC = out.dC.data();
  results.dW = out.dW.data(), results.dv = out.dv.data();
  attend(P, results);
  return out;
}

}  // namespace fastlin
