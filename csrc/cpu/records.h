// Sums per task, turned into results; those of runs are kept in double and joined over blocks in block order.
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
  // Tasks may be as many as sequences: those of narrow tokens do without the heap.
  constexpr std::int64_t kNarrow = 64;
  double narrow[kNarrow];
  std::vector<double> wide(static_cast<std::size_t>(P.m > kNarrow ? P.m : 0));
  double* scratch = wide.empty() ? narrow : wide.data();
  for (std::int64_t r = 0; r < P.R; ++r, record += plan.record.width) {
    finish_trial(P, out, plan.record, k, r, plan.count(k), record, scratch, Alone{});
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

// Loss [R].
template <class T>
void write_loss(const Plan<T>& plan, const Results<T>& out) {
  const Problem<T>& P = plan.problem;
  const auto count = [&](std::int64_t k) { return plan.count(k); };
  for (std::int64_t r = 0; r < P.R; ++r) {
    out.loss[r] = weighted_loss(P, out.per_task + r * P.K, count, plan.total());
  }
}

}  // namespace fastlin
