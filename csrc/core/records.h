// The sums that are kept for each task and trial, and the results that they give.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "kernels.h"

#ifndef FASTLIN_NO_UNROLL
#define FASTLIN_NO_UNROLL
#endif

namespace fastlin {

// First column of each sum in a row of a record; -1 where the sum is not kept.
struct Record {
  std::int64_t squares = -1;  // 1: sum of squared errors
  std::int64_t e = -1;        // H m: sum of G (g a), without the prompt
  std::int64_t p = -1;        // t m: dp (stack)
  std::int64_t q = -1;  // m: sum of r q, for dh, and in one layer for the prompt's part of the gradients
  std::int64_t a = -1;  // H m: sum of g a, for the prompt's part, in place of r q
  std::int64_t width = 0;

  template <class T>
  Record(const Problem<T>& P, const Results<T>& out, bool sums_a = false) {
    const auto column = [this](bool is_kept, std::int64_t size) {
      const std::int64_t first = is_kept ? width : -1;
      width += is_kept ? size : 0;
      return first;
    };
    const bool stack = P.layers > 0, prompted = P.p != nullptr && P.t > 0;
    squares = column(P.has_targets(), 1);
    e = column(out.dv != nullptr, P.H * P.m);
    p = column(stack && prompted && out.dp != nullptr, P.t * P.m);
    const bool needs_prompt = !stack && prompted && (out.dv != nullptr || out.dp != nullptr);
    q = column(out.dh != nullptr || (needs_prompt && !sums_a), P.m);
    a = column(needs_prompt && sums_a, P.H * P.m);
  }
};

// The threads that share a loop: one on a CPU; on a GPU those of a warp, with the same members.
struct Alone {
  static constexpr std::int64_t first = 0, step = 1;
  void sync() const {}
};

// Writes the results of task k for trial r from its record [width], which it overwrites. `count` is the
// number of sequences of the task in the whole batch. scratch [m]. out.dv is [R, H, K, m], whether tasks
// share v or not. Threads of a warp run most loops once: unrolled, they would be code that nobody runs.
template <class T, class Team>
FASTLIN_HD void finish_trial(const Problem<T>& P, const Results<T>& out, const Record& at, std::int64_t k,
                             std::int64_t r, double count, double* record, double* scratch, Team team) {
  const std::int64_t m = P.m, H = P.H;
  if (out.per_task != nullptr && team.first == 0) {
    // An empty batch may lack targets.
    const double sum = at.squares < 0 ? 0.0 : record[at.squares];
    out.per_task[r * P.K + k] = static_cast<T>(count > 0 ? sum / count : 0.0);
  }
  const T* prompts = P.p == nullptr ? nullptr : P.p + (r * P.K + k) * P.t * m;  // [t, m]
  T* dp = out.dp == nullptr ? nullptr : out.dp + (r * P.K + k) * P.t * m;
  FASTLIN_NO_UNROLL
  for (std::int64_t i = team.first; at.p >= 0 && i < P.t * m; i += team.step) {
    dp[i] = static_cast<T>(record[at.p + i]);
  }
  const double* rq = at.q < 0 ? nullptr : record + at.q;
  FASTLIN_NO_UNROLL
  for (std::int64_t j = team.first; out.dh != nullptr && j < m; j += team.step) {
    out.dh[(r * P.K + k) * m + j] = static_cast<T>(P.last_skip * rq[j]);
  }
  // In one layer the prompt is the same for all sequences of the task, so that its gradients need only s =
  // scale W' sum r q, the sum of g a: dv += sum_t p (p . s), dp = sum_h (p . v) s + (p . s) v.
  const bool sums_a = at.a >= 0, has_prompt = P.layers == 0 && (sums_a || rq != nullptr) && P.t > 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t h = 0; h < H; ++h) {
    const std::int64_t head = ((r * H + h) * P.K + k) * m;
    const T* v = P.v_of(r * H + h, k);
    double *e = at.e < 0 ? nullptr : record + at.e + h * m, *s = scratch;
    // m independent sums: one at a time would wait for each of its additions. Eight rows are loaded at once:
    // a GPU waits 500 clocks for each load that comes alone.
    FASTLIN_NO_UNROLL
    for (std::int64_t j = team.first; has_prompt && j < m; j += team.step) {
      s[j] = sums_a ? record[at.a + h * m + j] : 0;
    }
    constexpr std::int64_t kRows = 8;
    FASTLIN_NO_UNROLL
    for (std::int64_t i = 0; has_prompt && !sums_a && i < m; i += kRows) {
      const T* W = P.W + ((r * H + h) * m + i) * m;
      const std::int64_t rows = m - i < kRows ? m - i : kRows;
      double g[kRows];
      for (int u = 0; u < kRows; ++u) g[u] = u < rows ? P.scale * rq[i + u] : 0.0;
      FASTLIN_NO_UNROLL
      for (std::int64_t j = team.first; j < m; j += team.step) {
        T w[kRows];
        for (int u = 0; u < kRows; ++u) w[u] = u < rows ? W[u * m + j] : T(0);
        double sum = s[j];
        for (int u = 0; u < kRows; ++u) sum = u < rows ? sum + g[u] * w[u] : sum;
        s[j] = sum;
      }
    }
    team.sync();
    FASTLIN_NO_UNROLL
    for (std::int64_t t = 0; has_prompt && t < P.t; ++t) {
      const T* token = prompts + t * m;
      double with_v = 0, with_a = 0;
      for (std::int64_t i = 0; i < m; ++i) {
        with_v += static_cast<double>(token[i]) * v[i];
        with_a += token[i] * s[i];
      }
      FASTLIN_NO_UNROLL
      for (std::int64_t i = team.first; e != nullptr && i < m; i += team.step) e[i] += token[i] * with_a;
      FASTLIN_NO_UNROLL
      for (std::int64_t i = team.first; dp != nullptr && i < m; i += team.step) {
        const double grad = with_v * s[i] + with_a * v[i];
        dp[t * m + i] = static_cast<T>(h == 0 ? grad : dp[t * m + i] + grad);
      }
    }
    FASTLIN_NO_UNROLL
    for (std::int64_t i = team.first; e != nullptr && i < m; i += team.step) {
      out.dv[head + i] = static_cast<T>(e[i]);
    }
    team.sync();
  }
}

// Coefficient of a squared error of task k in the loss: weight / count, or 1 / total.
template <class T>
FASTLIN_HD T error_coefficient(const Problem<T>& P, std::int64_t k, double count, double total) {
  if (P.weight == nullptr) return static_cast<T>(1.0 / (total > 1.0 ? total : 1.0));
  return static_cast<T>(count > 0 ? P.weight[k] / count : 0.0);
}

// The loss of a trial: the tasks' means [K], weighted by `weight` or by their shares of the batch.
template <class T, class Count>
FASTLIN_HD T weighted_loss(const Problem<T>& P, const T* per_task, Count count, double total) {
  double sum = 0;
  FASTLIN_NO_UNROLL
  for (std::int64_t k = 0; k < P.K; ++k) {
    const double share = count(k) / (total > 1.0 ? total : 1.0);
    sum += (P.weight == nullptr ? share : P.weight[k]) * per_task[k];
  }
  return static_cast<T>(sum);
}

}  // namespace fastlin
