// Sums per task: kept in double for each run, joined over blocks in block order, and turned into results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace fastlin {

// Writes the results of task k from its whole record [R, width], which is used up.
template <class T>
void finish_task(const Plan<T>& plan, const Results<T>& out, std::int64_t k, double* record) {
  const Problem<T>& P = plan.problem;
  const Record& at = plan.record;
  const std::int64_t m = P.m, H = P.H;
  std::vector<double> s(static_cast<std::size_t>(m));
  for (std::int64_t r = 0; r < P.R; ++r, record += at.width) {
    if (at.squares >= 0) {
      out.per_task[r * P.K + k] = static_cast<T>(record[at.squares] / plan.count(k));
    }
    const T* prompts = P.p == nullptr ? nullptr : P.p + (r * P.K + k) * P.t * m;  // [t, m]
    T* dp = out.dp == nullptr ? nullptr : out.dp + (r * P.K + k) * P.t * m;
    if (at.p >= 0) {
      for (std::int64_t i = 0; i < P.t * m; ++i) dp[i] = static_cast<T>(record[at.p + i]);
    }
    const double* rq = at.q < 0 ? nullptr : record + at.q;
    for (std::int64_t j = 0; out.dh != nullptr && j < m; ++j) {
      out.dh[(r * P.K + k) * m + j] = static_cast<T>(P.last_skip * rq[j]);
    }
    for (std::int64_t h = 0; h < H; ++h) {
      const std::int64_t head = ((r * H + h) * P.K + k) * m;
      double* e = at.e < 0 ? nullptr : record + at.e + h * m;
      // In one layer the prompt is the same for all sequences of the task, so that s = scale W' sum r q, the
      // sum of g a, says all: dv += sum_t p (p . s), dp = sum_h (p . v) s + (p . s) v.
      const bool has_prompt = P.layers == 0 && rq != nullptr && P.t > 0;
      if (has_prompt) {
        const T* W = P.W + (r * H + h) * m * m;
        std::fill(s.begin(), s.end(), 0.0);
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < m; ++j) s[j] += P.scale * rq[i] * W[i * m + j];
        }
      }
      for (std::int64_t t = 0; has_prompt && t < P.t; ++t) {
        const T* token = prompts + t * m;
        double with_v = 0, with_a = 0;
        for (std::int64_t i = 0; i < m; ++i) {
          with_v += static_cast<double>(token[i]) * P.v[head + i];
          with_a += token[i] * s[i];
        }
        for (std::int64_t i = 0; e != nullptr && i < m; ++i) e[i] += token[i] * with_a;
        for (std::int64_t i = 0; dp != nullptr && i < m; ++i) {
          const double grad = with_v * s[i] + with_a * P.v[head + i];
          dp[t * m + i] = static_cast<T>(h == 0 ? grad : dp[t * m + i] + grad);
        }
      }
      for (std::int64_t i = 0; e != nullptr && i < m; ++i) out.dv[head + i] = static_cast<T>(e[i]);
    }
  }
}

// Records of the runs that a block shares with its neighbours: at most one at each end.
struct Ends {
  std::int64_t first = -1, last = -1;  // tasks; -1 when there is no such run
};

// Writes zeros where no sequence is; the finished runs come over them.
template <class T>
void clear_results(const Plan<T>& plan, const Results<T>& out) {
  const Problem<T>& P = plan.problem;
  const std::int64_t vectors = P.R * P.K * P.m;
  if (out.per_task != nullptr) std::fill_n(out.per_task, P.R * P.K, T(0));
  if (out.dv != nullptr) std::fill_n(out.dv, vectors * P.H, T(0));
  if (out.dp != nullptr) std::fill_n(out.dp, vectors * P.t, T(0));
  if (out.dh != nullptr) std::fill_n(out.dh, vectors, T(0));
}

// Adds the records of each task that lies in several blocks, in block order, and finishes it.
template <class T>
void join_ends(const Plan<T>& plan, const Results<T>& out, const std::vector<Ends>& ends,
               double* records) {  // [blocks, 2, R, width]
  const std::int64_t size = plan.problem.R * plan.record.width;
  std::int64_t task = -1;
  double* sum = nullptr;
  for (std::int64_t i = 0; i < 2 * plan.blocks; ++i) {
    const Ends& end = ends[static_cast<std::size_t>(i / 2)];
    const std::int64_t found = i % 2 == 0 ? end.first : end.last;
    if (found < 0) continue;
    double* record = records + i * size;
    if (found == task) {
      for (std::int64_t j = 0; j < size; ++j) sum[j] += record[j];
    } else {
      if (task >= 0) finish_task(plan, out, task, sum);
      task = found;
      sum = record;
    }
  }
  if (task >= 0) finish_task(plan, out, task, sum);
}

// Loss [R]: the tasks' means with their weights, or with their shares of the batch.
template <class T>
void write_loss(const Plan<T>& plan, const Results<T>& out) {
  const Problem<T>& P = plan.problem;
  for (std::int64_t r = 0; r < P.R; ++r) {
    double sum = 0;
    for (std::int64_t k = 0; k < P.K; ++k) {
      const double share = plan.count(k) / std::max(plan.total(), 1.0);
      sum += (P.weight == nullptr ? share : P.weight[k]) * out.per_task[r * P.K + k];
    }
    out.loss[r] = static_cast<T>(sum);
  }
}

}  // namespace fastlin
