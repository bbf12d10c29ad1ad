// Turns the records of tasks into results. Records are in double; those of a task in several blocks are added
// in block order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace fastlin {

// Writes the results of task k from its complete record [R, width], which it overwrites.
template <class T>
void finish_task(const Plan<T>& plan, const Results<T>& out, std::int64_t k, double* record) {
  const Problem<T>& P = plan.problem;
  // There may be as many tasks as sequences, so narrow tokens avoid the heap.
  constexpr std::int64_t kNarrow = 64;
  double narrow[kNarrow];
  std::vector<double> wide(static_cast<std::size_t>(P.m > kNarrow ? P.m : 0));
  double* scratch = wide.empty() ? narrow : wide.data();
  for (std::int64_t r = 0; r < P.R; ++r, record += plan.record.width) {
    finish_trial(P, out, plan.record, k, r, plan.count(k), record, scratch, Alone{});
  }
}

// The tasks that a block shares with its neighbours: at most one at each end.
struct BoundaryTasks {
  std::int64_t first = -1, last = -1;  // -1: none
};

// Zeroes the results of all tasks; tasks with sequences overwrite them.
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
void join_boundary_records(const Plan<T>& plan, const Results<T>& out,
                           const std::vector<BoundaryTasks>& shared_tasks,
                           double* records) {  // [blocks, 2, R, width]
  const std::int64_t size = plan.problem.R * plan.record.width;
  std::int64_t task = -1;
  double* sum = nullptr;
  for (std::int64_t i = 0; i < 2 * plan.blocks; ++i) {
    const BoundaryTasks& block = shared_tasks[static_cast<std::size_t>(i / 2)];
    const std::int64_t next = i % 2 == 0 ? block.first : block.last;
    if (next < 0) continue;
    double* record = records + i * size;
    if (next == task) {
      for (std::int64_t j = 0; j < size; ++j) sum[j] += record[j];
    } else {
      if (task >= 0) finish_task(plan, out, task, sum);
      task = next;
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
